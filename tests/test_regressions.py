"""What reviewers broke once, so that nobody breaks it again."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import setfold
from setfold.core import persist
from setfold.core.state import SetState


def make(**changes):
    torch.manual_seed(0)
    chosen = {"dim_in": 3, "num_slots": 4, "dim_slot": 5, "dim_out": 6} | changes
    return setfold.SlotSetEncoder(**chosen).double().eval()


def draw(*shape):
    torch.manual_seed(1)
    return torch.randn(*shape, dtype=torch.float64)


def test_weights_of_zero_do_not_make_nan_of_what_is_hidden():
    encoder = make(aggregate="max", attention="softmax")
    with torch.no_grad():
        encoder.to_key.weight.mul_(1000)  # weights that underflow to zero
    elements, mask = draw(2, 30, 3), torch.rand(2, 30) < 0.5
    expected = torch.cat([encoder(elements[i : i + 1, mask[i]]) for i in range(2)])
    torch.testing.assert_close(encoder(elements, mask), expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        found = encoder(elements, mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("aggregate", ["max", "min", "mean"])
def test_compiled_masks_have_finite_gradients(aggregate):
    torch._dynamo.reset()
    encoder = make(aggregate=aggregate, slots="learned")
    elements, mask = draw(2, 8, 3), torch.rand(2, 8) < 0.6
    torch.compile(encoder, backend="aot_eager")(elements, mask).sum().backward()
    compiled = encoder.to_key.weight.grad.clone()
    encoder.zero_grad()
    encoder(elements, mask).sum().backward()
    torch.testing.assert_close(compiled, encoder.to_key.weight.grad)


class Log(nn.Module):
    def forward(self, rows):
        return rows.log()


def test_compiled_features_do_not_meet_what_is_hidden():
    torch._dynamo.reset()
    model = setfold.Composition(make(), features=Log())
    elements, mask = draw(2, 8, 3).abs() + 0.1, torch.tensor([[True] * 5 + [False] * 3] * 2)
    found = torch.compile(model, backend="aot_eager")(elements, mask)
    torch.testing.assert_close(found, model(elements, mask))


def test_a_mask_that_is_overwritten_before_the_backward_pass_is_noticed():
    encoder = make()
    elements, mask = draw(1, 6000, 3), torch.rand(1, 6000) < 0.5
    loss = encoder(elements, mask).square().sum()
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_small_chunks_that_overflow_are_noticed(similarity):
    encoder = make(similarity=similarity).float()
    with torch.no_grad():
        encoder.to_key.weight.mul_(1e15)
        with pytest.raises(setfold.NonFiniteError):
            encoder.readout(encoder.update(encoder.initial_state(), 1e25 * draw(1, 5, 3).float()))


OVERFLOWING = {
    "sigmoid": {},
    "softmax": {"attention": "softmax"},
    "sigmoid, max": {"aggregate": "max"},
    "softmax, max": {"aggregate": "max", "attention": "softmax"},
    "softmax, weighted mean": {"aggregate": "weighted_mean", "attention": "softmax"},
    "over elements": None,
}


@pytest.mark.parametrize("length", [1, 5, 300, 3000])
@pytest.mark.parametrize("name", OVERFLOWING)
def test_a_logit_that_overflows_is_noticed_or_right(name, length):
    """Its sign may be wrong, and a weight of 0 or 1 would hide that."""
    changes, raised = OVERFLOWING[name], 0
    for seed in range(10):
        encoder = setfold.AttentionPool(3, 4, 6) if changes is None else make(**changes)
        torch.manual_seed(seed)
        elements = torch.randn(1, length, 3)
        elements[0, -1] *= 1e25
        with torch.no_grad():
            encoder.to_key.weight.mul_(1e15)
            precise = copy.deepcopy(encoder).double().eval()
            encoder = encoder.float().eval()
            expected = precise(elements.double())
            try:
                found = encoder.readout(encoder.update(encoder.initial_state(1), elements))
            except setfold.NonFiniteError:
                raised += 1
                continue
        atol = 1e-3 * float(expected.abs().max())
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=atol)
    assert raised


class Squares(setfold.SlotSetEncoder):
    def featurize(self, elements, mask, context):
        return elements**2


def test_features_of_a_subclass_count_everywhere():
    encoder = Squares(3, 4, 5, 6).double().eval()
    elements = draw(1, 6, 3)
    expected = encoder(elements)
    with torch.no_grad():
        small = encoder.readout(encoder.update(encoder.initial_state(), elements))
        index = torch.zeros(6, dtype=torch.long)
        ragged = encoder(elements[0], index=index, batch_size=1)
    torch.testing.assert_close(small, expected)
    torch.testing.assert_close(ragged, expected)


def test_batch_norm_trains_on_ragged_batches():
    model = setfold.DeepSets(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 4).double().train()
    index = torch.tensor([0, 0, 1, 2, 2, 2])
    found = model(draw(6, 3), index=index, batch_size=3)
    found.sum().backward()
    assert found.shape == (3, 4)


@pytest.mark.parametrize("changes", [{}, {"similarity": "cosine"}, {"aggregate": "max"}])
@pytest.mark.parametrize("length", [10, 6000])
@pytest.mark.parametrize("tracked", [True, False])
def test_autocast_rounds_features_and_nothing_else(changes, length, tracked):
    encoder = make(**changes).float()
    features = nn.Linear(3, 3)
    model = setfold.Composition(encoder, features=features)
    elements = draw(1, length, 3).float()
    expected = encoder(elements)
    with torch.set_grad_enabled(tracked), torch.autocast("cpu", torch.float16):
        torch.testing.assert_close(encoder(elements), expected)
        assert model(elements).isfinite().all()
    torch.testing.assert_close(encoder(elements), expected)


def test_a_context_reaches_the_features_within():
    class Shift(nn.Module):
        def forward(self, elements, context):
            return elements + context.unsqueeze(1)

    inner = setfold.Composition(make(), features=Shift())
    outer = setfold.Composition(inner, head=nn.Flatten())
    elements, context = draw(2, 5, 3), draw(2, 3)
    expected = make()(elements + context.unsqueeze(1)).flatten(1)
    torch.testing.assert_close(outer(elements, context=context), expected)


def test_states_own_what_they_begin_with():
    encoder = make()
    slots = draw(4, 5)
    state = encoder.initial_state(slots=slots)
    slots.zero_()
    assert state.slots.abs().sum() > 0
    learned = make(slots="learned")
    state = learned.initial_state()
    before = state.slots.clone()
    with torch.no_grad():
        learned.slot_values.add_(1)
    assert torch.equal(state.slots, before)


def test_settings_of_modules_are_part_of_the_weights():
    class Power(nn.Module):
        def __init__(self, exponent):
            super().__init__()
            self.exponent = exponent

        def forward(self, rows):
            return rows**self.exponent

    states = [setfold.Composition(make(), features=Power(e)).initial_state() for e in (1.0, 3.0)]
    with pytest.raises(setfold.StateMismatchError, match="weights"):
        states[0].merge(states[1])


def test_a_state_of_the_first_level_is_not_one_of_the_hierarchy():
    first = make()
    hierarchy = setfold.HierarchicalSlotSetEncoder([first, make(dim_in=6)]).eval()
    with pytest.raises(setfold.StateMismatchError, match="does not belong to this Hierarchical"):
        hierarchy.readout(first.initial_state())


def test_states_do_not_grow_in_long_streams_of_single_elements():
    encoder = make()
    with torch.no_grad():
        state = encoder.initial_state()
        sizes = set()
        for _ in range(1000):
            state = encoder.update(state, torch.ones(1, 1, 3, dtype=torch.float64))
            sizes.add(sum(tensor.nbytes for tensor in state.tensors().values()))
    assert len(sizes) == 1
    assert int(state.count) == 1000


def test_indices_of_other_libraries_work():
    import numpy as np

    state = SetState.stack([make().initial_state() for _ in range(3)])
    assert len(state[np.int64(1)]) == 1


def test_the_check_leaves_random_numbers_alone():
    encoder = make().float().train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    setfold.check(encoder, processes=False)
    assert torch.equal(torch.rand(3), expected)


def test_an_encoder_can_be_made_on_the_meta_device():
    with torch.device("meta"):
        assert setfold.SlotSetEncoder(3, 4, 5, 6).slot_mean.is_meta


# ---- what is kept between calls ----------------------------------------------------------------


def test_fake_tensors_are_not_kept():
    encoder, elements = make(), draw(1, 9, 3)
    expected = encoder(elements)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        encoder.initial_state(1)
    assert encoder.readout(encoder.update(encoder.initial_state(1), elements)).isfinite().all()
    with torch.no_grad():
        torch.testing.assert_close(encoder(elements), expected, rtol=1e-12, atol=1e-12)


def test_freed_weights_are_an_error_and_no_crash():
    encoder, elements = make(), draw(1, 9, 3)
    with torch.no_grad():
        encoder(elements)
        encoder.to_key.weight.untyped_storage().resize_(0)
        with pytest.raises(setfold.InputError, match="freed"):
            encoder(elements)


def test_half_precision_means_of_many_slots_do_not_overflow():
    encoder = make(dim_in=8, num_slots=512).float()
    elements = draw(1, 512, 8).float()
    with torch.no_grad():
        expected = encoder(elements)
        found = encoder.half()(elements.half()).float()
    assert (found - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_slots_of_a_state_are_its_own(grad, training):
    encoder = make(slots="learned").train(training)
    with torch.set_grad_enabled(grad):
        state = encoder.initial_state()
    before = state.slots.detach().clone()
    encoder.slot_values.data.add_(1)
    assert torch.equal(state.slots, before)


def test_writing_to_an_encoding_does_not_change_the_state():
    encoder = setfold.Pool(3, "sum").double()
    state = encoder.update(encoder.initial_state(), draw(1, 4, 3))
    expected = encoder.readout(state).clone()
    encoder.readout(state).zero_()
    assert torch.equal(encoder.readout(state), expected)


def test_constants_of_a_transform_are_not_kept():
    with torch.no_grad():
        torch.func.functionalize(make())(draw(1, 19, 3))
        assert make(dim_in=5)(draw(1, 19, 5)).isfinite().all()


def test_hooks_run_every_time():
    encoder, elements = make(), draw(2, 20, 3)
    with torch.no_grad():
        encoder(elements)
        encoder.norm.register_forward_hook(lambda module, inputs, output: 7 * output)
        found = encoder(elements)
    torch.testing.assert_close(found, encoder(elements), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [9, 600])
def test_function_transforms(length):
    encoder, elements = make(), draw(5, 1, length, 3)
    with torch.no_grad():
        found = torch.func.vmap(encoder)(elements)
        expected = encoder(elements[:, 0]).unsqueeze(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = {name: p.detach() for name, p in encoder.named_parameters()}

    def loss(weights, one):
        return torch.func.functional_call(encoder, weights, (one,)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, elements)
    loss(weights := dict(encoder.named_parameters()), elements[2]).backward()
    expected = weights["to_key.weight"].grad
    torch.testing.assert_close(per_sample["to_key.weight"][2], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("length", [9, 600])
def test_the_meta_device(length):
    encoder = make().to("meta")
    assert encoder(torch.empty(1, length, 3, dtype=torch.float64, device="meta")).is_meta


def test_read_only_masks_of_a_list_are_the_same_when_they_are_read_again():
    mask = np.ones((1, 30), bool)
    mask.flags.writeable = False
    setfold.fold(make(), [(draw(1, 30, 3), mask), (draw(1, 30, 3), mask)]).sum().backward()


CHANGES = {
    "negative count": lambda named: named | {"count": -named["count"]},
    "float count": lambda named: named | {"count": named["count"].double()},
    "counts of other sets": lambda named: named | {"count": named["count"].repeat(2)},
    "shape": lambda named: named | {"sum.0": named["sum.0"][..., :-1].clone()},
    "dtype": lambda named: named | {"sum.0": named["sum.0"].long()},
    "NaN": lambda named: named | {"sum.0": named["sum.0"] * torch.nan},
    "slots": lambda named: named | {"slots.0": named["slots.0"][0, 0]},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_state_files_of_another_form_are_file_errors(change, tmp_path):
    encoder, path = make(), tmp_path / "state"
    encoder.update(encoder.initial_state(), draw(1, 4, 3)).save(path)
    _, named, description = persist.read(path)
    persist.write(path, "state", change(named), description)
    with pytest.raises(setfold.FileError):
        SetState.load(path)
