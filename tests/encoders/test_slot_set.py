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
        assert encoder.absorb_groups(elements, iter(()), encoder.prepare(empty.frame)) is not None
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
