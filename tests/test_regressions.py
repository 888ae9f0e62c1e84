"""What reviewers broke once, so that nobody breaks it again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import setfold
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


def test_small_chunks_that_overflow_are_noticed():
    encoder = make(similarity="cosine").float()
    with torch.no_grad(), pytest.raises(setfold.NonFiniteError):
        encoder.readout(encoder.update(encoder.initial_state(), 1e25 * draw(1, 5, 3).float()))


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
