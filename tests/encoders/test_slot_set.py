"""The Slot Set Encoder against plain loops, and what is its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import setfold
from tests import reference
from tests.strategies import cases, slot_set_encoders


def make(**changes):
    chosen = {"dim_in": 3, "num_slots": 4, "dim_slot": 5, "dim_out": 6} | changes
    return setfold.SlotSetEncoder(**chosen).double().eval()


@settings(max_examples=60)
@given(encoder=slot_set_encoders(), case=cases(), tracked=st.booleans(), training=st.booleans())
def test_it_is_what_the_loops_say(encoder, case, tracked, training):
    encoder = encoder.double().train(training)
    with torch.set_grad_enabled(tracked):
        empty = encoder.initial_state(case.batch_size)
        found = encoder.readout(encoder.update(empty, case.elements)).detach()
    for number in range(case.batch_size):
        expected = reference.slot_set(encoder, case.elements[number], empty.slots[number])
        np.testing.assert_allclose(found[number], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_slots", [3, 40])  # folded, and not
def test_both_ways_to_sum_give_the_same(num_slots):
    torch.manual_seed(0)
    encoder = make(dim_in=8, dim_out=4, num_slots=num_slots)
    assert encoder.folded == (num_slots == 3)
    elements = torch.randn(1, 20, 8, dtype=torch.float64)
    state = encoder.initial_state()
    expected = reference.slot_set(encoder, elements[0], state.slots[0])
    found = encoder.readout(encoder.update(state, elements)).detach()[0]
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def test_large_sets_take_the_tiled_way_to_the_same_gradients():
    torch.manual_seed(0)
    for changes in ({}, {"similarity": "cosine"}, {"dim_out": 2, "num_slots": 40}):
        encoder = make(slots="learned", **changes)
        elements = torch.randn(1, 9000, 3, dtype=torch.float64)

        def gradients(chunks, encoder=encoder):
            encoder.zero_grad()
            setfold.fold(encoder, chunks).square().sum().backward()
            return [p.grad.clone() for p in encoder.parameters()]

        pairs = zip(gradients([elements]), gradients(elements.split(1000, 1)), strict=True)
        for whole, chunked in pairs:
            torch.testing.assert_close(whole, chunked, rtol=1e-10, atol=1e-12)


def test_evaluation_slots_are_the_same_for_every_set_state_and_copy():
    encoder = make()
    first, second = encoder.initial_state(2), encoder.initial_state(3)
    assert torch.equal(first.slots[0], first.slots[1])
    assert torch.equal(first.slots[0], second.slots[2])
    copy = make()
    copy.load_state_dict(encoder.state_dict())
    assert torch.equal(copy.initial_state(1).slots, first.slots[:1])


def test_evaluation_noise_is_frozen_for_good():
    from setfold.encoders.slot_set import _evaluation_noise

    noise = _evaluation_noise(7, 2, 2)
    expected = torch.tensor(
        [[-0.7919846773147583, 0.4624015986919403], [0.5262627601623535, -1.8005709648132324]]
    )
    assert torch.equal(noise, expected)


def test_another_number_of_slots_is_another_draw():
    encoder = make()
    many = encoder.initial_state(1, num_slots=9)
    assert many.slots.shape == (1, 9, 5)
    assert torch.equal(many.slots, encoder.initial_state(1, num_slots=9).slots)
    assert not torch.equal(many.slots[:, :4], encoder.initial_state(1).slots)
    found = encoder.readout(encoder.update(many, torch.randn(1, 8, 3, dtype=torch.float64)))
    assert found.shape == (1, 9, 6)


def test_training_draws_anew_and_a_generator_repeats():
    encoder = make().train()
    assert not torch.equal(encoder.initial_state(1).slots, encoder.initial_state(1).slots)
    drawn = [
        encoder.initial_state(1, generator=torch.Generator().manual_seed(3)).slots for _ in range(2)
    ]
    assert torch.equal(*drawn)
    with_seed = make().eval().initial_state(1, generator=torch.Generator().manual_seed(3))
    assert torch.equal(with_seed.slots, drawn[0])


def test_random_slots_train_their_mean_and_deviation():
    encoder = make().train()
    encoder(torch.randn(2, 10, 3, dtype=torch.float64)).square().sum().backward()
    assert encoder.slot_mean.grad.abs().max() > 0
    assert encoder.slot_deviation.grad.abs().max() > 0


def test_learned_slots_are_as_many_as_they_are():
    encoder = make(slots="learned")
    with pytest.raises(setfold.InputError, match="learned slots"):
        encoder.initial_state(1, num_slots=9)
    with pytest.raises(setfold.InputError, match="learned slots"):
        encoder.initial_state(1, generator=torch.Generator())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 0}, "num_slots must be an integer of at least 1"),
        ({"aggregate": "median"}, "aggregate must be one of"),
        ({"aggregate": []}, "aggregate must be one of"),
        ({"aggregate": ["sum", "sum"]}, "different"),
        ({"slots": "drawn"}, "slots must be one of"),
        ({"attention": "relu"}, "attention must be one of"),
        ({"similarity": "l2"}, "similarity must be one of"),
    ],
)
def test_bad_settings_say_what_is_allowed(changes, message):
    with pytest.raises(setfold.InputError, match=message):
        make(**changes)


def test_given_slots_must_fit():
    encoder = make()
    with pytest.raises(setfold.InputError, match=r"slots must be \(K, 5\)"):
        encoder.initial_state(2, slots=torch.randn(4, 6, dtype=torch.float64))
    with pytest.raises(setfold.InputError, match="not both"):
        encoder.initial_state(2, slots=torch.randn(4, 5), num_slots=4)


def test_one_slot_warns_and_its_attention_has_no_gradient():
    with pytest.warns(setfold.CancelledAttentionWarning, match="one slot"):
        encoder = make(num_slots=1, slots="learned")
    encoder(torch.randn(1, 10, 3, dtype=torch.float64)).sum().backward()
    for parameter in (encoder.slot_values, encoder.to_key.weight, encoder.to_query.weight):
        assert parameter.grad is None or parameter.grad.abs().max() < 1e-14


def test_masses_sum_to_one_over_the_slots():
    encoder = make(aggregate=["weighted_mean", "mass"])
    found = encoder(torch.randn(2, 10, 3, dtype=torch.float64))
    assert found.shape == (2, 4, 7)
    assert encoder.dim_readout == 7
    torch.testing.assert_close(found[..., -1].sum(1), torch.ones(2, dtype=torch.float64))


def test_a_stack_of_training_states_goes_on_set_by_set():
    encoder = make().train()
    states = [encoder.initial_state(1) for _ in range(3)]
    elements = torch.randn(3, 10, 3, dtype=torch.float64)
    together = encoder.readout(encoder.update(setfold.SetState.stack(states), elements))
    for number, state in enumerate(states):
        alone = encoder.readout(encoder.update(state, elements[number : number + 1]))
        torch.testing.assert_close(together[number : number + 1], alone, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("aggregate", ["mean", "max", ["weighted_mean", "mass"]])
def test_compiled_and_exported_forwards_agree(aggregate):
    torch._dynamo.reset()
    encoder = make(aggregate=aggregate)
    elements = torch.randn(2, 12, 3, dtype=torch.float64)
    mask = torch.rand(2, 12) < 0.7
    expected = encoder(elements, mask)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(elements, mask), expected)
    exported = torch.export.export(encoder, (elements, mask)).module()
    torch.testing.assert_close(exported(elements, mask), expected)


def test_an_exported_forward_takes_any_number_of_sets_and_elements():
    encoder = make()
    anything = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    example = (torch.randn(2, 12, 3, dtype=torch.float64),)
    exported = torch.export.export(encoder, example, dynamic_shapes=(anything,)).module()
    elements = torch.randn(5, 77, 3, dtype=torch.float64)
    torch.testing.assert_close(exported(elements), encoder(elements))


# ---- weights that underflow ----------------------------------------------------------------------


def steep(gap, aggregate="weighted_mean", **changes):
    """Logits of 0, -gap, -2 gap, ... for every element, and values that are the elements."""
    changes = {"dim_in": 3, "dim_slot": 3, "dim_out": 3, "slots": "learned"} | changes
    encoder = make(aggregate=aggregate, attention="softmax", **changes)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.zero_()
        if encoder.similarity == "cosine":
            encoder.to_bias.weight[0, 0] = gap
        else:
            encoder.to_key.bias[0] = gap * 3**0.5
            encoder.to_query.weight[0, 0] = 1
        places = torch.arange(encoder.num_slots)
        encoder.slot_values[:, 0], encoder.norm.weight[0] = -places.double(), 1
        encoder.norm.forward = lambda slots: slots  # logits of these sizes and no others
        encoder.to_value.weight.copy_(torch.eye(3))
    return encoder


GAPS = [0.0, 1.0, 80.0, 110.0, 800.0, 1e5, 1e30]


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("similarity", ["dot", "cosine"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", GAPS)
def test_one_element_reads_its_value_in_every_slot(gap, dtype, similarity, tracked):
    encoder = steep(gap, similarity=similarity).to(dtype)
    element = torch.tensor([[[0.3, -1e-3, 1e4]]], dtype=dtype)
    expected = element.expand(1, 4, 3)
    mask, index = torch.tensor([[False, True]]), torch.zeros(1, dtype=torch.long)
    with torch.set_grad_enabled(tracked):
        padded = torch.cat([torch.full_like(element, torch.nan), element], 1)
        for found in (
            encoder(element),
            encoder.readout(encoder.update(encoder.initial_state(), element)),
            encoder(padded, mask),
            encoder(element[0], index=index, batch_size=1),
            setfold.fold(encoder, [element, element[:, :0]]),
        ):
            torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=0)


WAYS = {
    "one chunk": lambda encoder, elements: encoder(elements),
    "chunks": lambda encoder, elements: setfold.fold(encoder, elements.split([1, 0, 7, 4992], 1)),
    "graph": lambda encoder, elements: setfold.fold(
        encoder, elements.split([1, 0, 7, 4992], 1), gradient="autograd"
    ),
}


@pytest.mark.parametrize("changes", [{}, {"num_slots": 40, "dim_in": 8, "dim_out": 4}], ids=[*"ab"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sharp", [1.0, 1e4])
def test_sums_relative_to_the_largest_weight_are_those_of_logarithms(way, sharp, changes):
    """Values and gradients in float64 are those of torch's logsumexp; weights may underflow."""
    torch.manual_seed(0)
    aggregate = ["mass", "weighted_mean", "sum"]
    encoder = make(aggregate=aggregate, attention="softmax", slots="learned", **changes)
    assert encoder.folded == (not changes)
    with torch.no_grad():
        encoder.to_key.bias.mul_(sharp)  # far from each other, for all elements
    elements = torch.randn(1, 5000, encoder.dim_in, dtype=torch.float64, requires_grad=True)
    wanted = [elements, *encoder.parameters()]
    logits = encoder.prepare(encoder.initial_state().frame).scores.logits(elements)
    shares = logits.log_softmax(-1)
    values = encoder.to_value(elements)
    expected = torch.cat(
        [
            shares.exp().mean(1).unsqueeze(-1),
            shares.softmax(1).transpose(1, 2) @ values,
            shares.exp().transpose(1, 2) @ values,
        ],
        -1,
    )
    if sharp > 1:
        assert (shares.amax(1) < -700).any()  # exp is zero even in float64
    found = WAYS[way](encoder, elements)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    slope = torch.randn(expected.shape, dtype=torch.float64)
    scale = torch.tensor([1.0] + [1.0] * encoder.dim_out + [1e-3] * encoder.dim_out).double()
    by_us = torch.autograd.grad((found * slope * scale).sum(), wanted, allow_unused=True)
    by_torch = torch.autograd.grad((expected * slope * scale).sum(), wanted, allow_unused=True)
    for ours, theirs in zip(by_us, by_torch, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8 * sharp)


def test_sets_with_slots_of_their_own_keep_a_peak_each():
    encoder = steep(110.0).float().train()
    frames = [torch.randn(1, 4, 3) * 40 for _ in range(3)]
    states = [encoder.initial_state(1, slots=frame) for frame in frames]
    elements = torch.randn(3, 9, 3)
    together = encoder.readout(encoder.update(setfold.SetState.stack(states), elements))
    for number, state in enumerate(states):
        alone = encoder.readout(encoder.update(state, elements[number : number + 1]))
        torch.testing.assert_close(together[number : number + 1], alone)


def test_a_hierarchy_reads_slots_of_little_weight():
    upper = make(dim_in=3)
    levels = [steep(110.0), upper]
    encoder = setfold.HierarchicalSlotSetEncoder(levels, torch.nn.ReLU()).float().eval()
    element = torch.tensor([[[0.3, 2.0, 1.0]]])
    expected = upper.encode(element.expand(1, 4, 3), upper.initial_state().frame[0])
    torch.testing.assert_close(encoder(element), expected)


def test_a_quotient_of_softmax_weights_cannot_remove_elements_and_others_can():
    elements = torch.randn(1, 9, 3, dtype=torch.float64)
    for aggregate in ("weighted_mean", ["sum", "weighted_mean"]):
        encoder = make(aggregate=aggregate, attention="softmax")
        state = encoder.update(encoder.initial_state(), elements)
        with pytest.raises(setfold.NotRemovableError, match="relative to the largest weight"):
            encoder.remove(state, elements)
    for changes in ({"aggregate": ["sum", "mass"], "attention": "softmax"}, {"aggregate": "mean"}):
        encoder = make(**changes)
        state = encoder.update(encoder.initial_state(), elements)
        assert not encoder.readout(encoder.remove(state, elements)).any()


@pytest.mark.parametrize("tracked", [True, False])
def test_logits_that_overflow_do_not_pass_for_an_empty_slot(tracked):
    encoder = steep(1e30).float()
    with torch.no_grad():
        encoder.to_query.weight.mul_(-1e10)
    with torch.set_grad_enabled(tracked), pytest.raises(setfold.NonFiniteError):
        encoder(torch.ones(1, 5, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu():
    encoder = make()
    elements = torch.randn(2, 12, 3, dtype=torch.float64)
    expected = encoder(elements)
    torch.testing.assert_close(encoder.cuda()(elements.cuda()).cpu(), expected)


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs an MPS device")
def test_mps_agrees_with_the_cpu():
    encoder = make().float()
    elements = torch.randn(2, 12, 3)
    expected = encoder(elements)
    found = encoder.to("mps")(elements.to("mps")).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def wrapped(kind, encoder):
    if kind == "hierarchy":
        upper = make(dim_in=6, num_slots=2)
        return setfold.HierarchicalSlotSetEncoder([encoder, upper]).double().eval()
    if kind == "composition":
        features = torch.nn.Linear(2, 3).double()
        return setfold.Composition(encoder, features).eval()
    return encoder


@pytest.mark.parametrize("kind", ["alone", "hierarchy", "composition"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_ragged_updates_without_a_graph_are_those_of_each_set_alone(kind, dtype, bound):
    torch.manual_seed(0)
    encoder = wrapped(kind, make()).to(dtype)
    lengths = torch.cat([torch.arange(70), torch.tensor([1, 0, 20_000])])
    index = torch.arange(len(lengths)).repeat_interleave(lengths)
    index = index[torch.randperm(len(index))]
    elements = torch.randn(len(index), 2 if kind == "composition" else 3, dtype=dtype)
    with torch.no_grad():
        empty = encoder.initial_state(len(lengths))
        prepared = encoder.prepare(empty.frame)
        assert encoder.absorb_ragged(elements, index, len(lengths), prepared) is not None
        state = encoder.update(encoder.update(empty, elements, index=index), elements, index=index)
        left = encoder.remove(state, elements, index=index)
        for number in range(len(lengths)):
            alone = elements[index == number].unsqueeze(0)
            expected = encoder.update(empty[number], alone).statistics["sum"][0]
            for found, times in ((state, 2), (left, 1)):
                (sums,) = found[number].statistics["sum"]
                size = float(expected.abs().max().clamp_min(1))
                assert float((sums - times * expected).abs().max()) <= bound * times * size
    assert state.count.tolist() == (2 * lengths).tolist()


def test_a_ragged_chunk_with_a_broken_row_leaves_the_state_as_it_was():
    encoder, index = make(), torch.arange(100).repeat_interleave(torch.arange(100))
    elements = torch.randn(len(index), 3, dtype=torch.float64)
    with torch.no_grad():
        state = encoder.update(encoder.initial_state(100), elements, index=index)
        before = state.statistics["sum"][0].clone()
        elements[1234, 1] = torch.nan
        with pytest.raises(setfold.NonFiniteError, match=r"elements\[1234, 1\] is nan"):
            encoder.update(state, elements, index=index)
    assert torch.equal(state.statistics["sum"][0], before)


# ---- width of the keys -------------------------------------------------------------------------


def test_keys_have_a_width_of_their_own():
    encoder = setfold.SlotSetEncoder(3, 4, 6, 2, dim_key=16)
    assert encoder.to_key.out_features == encoder.to_query.out_features == 16
    assert encoder(torch.randn(2, 9, 3)).shape == (2, 4, 2)
    assert "dim_key=16" in repr(encoder)


def test_cosine_similarity_of_keys_of_one_dimension_is_an_error():
    with pytest.raises(setfold.InputError, match="attention is constant"):
        setfold.SlotSetEncoder(3, 32, 6, 1, similarity="cosine")
    with pytest.raises(setfold.InputError, match="at least 2 dimensions"):
        setfold.SlotSetEncoder(3, 32, 6, 8, similarity="cosine", dim_key=1)
    encoder = setfold.SlotSetEncoder(3, 32, 6, 1, similarity="cosine", dim_key=16)
    weights = encoder.weights(encoder.initial_state(), torch.randn(1, 9, 3))
    assert float(weights.detach().std(1).min()) > 1e-4  # elements differ
