from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import setfold
from tests import reference


def level(dim_in, num_slots=4, **changes):
    return setfold.SlotSetEncoder(dim_in, num_slots, dim_slot=5, dim_out=6, **changes)


def make(*levels, **changes):
    return setfold.HierarchicalSlotSetEncoder(levels, **changes).double().eval()


def test_it_is_the_loops_one_level_after_the_other():
    torch.manual_seed(0)
    encoder = make(level(3), level(6, aggregate="max"), level(6, 2), activation=nn.Tanh())
    elements = torch.randn(1, 9, 3, dtype=torch.float64)
    state = encoder.initial_state()
    found = encoder.readout(encoder.update(state, elements)).detach()[0]
    expected = elements[0]
    for number, (stage, slots) in enumerate(zip(encoder.levels, state.frame, strict=True)):
        expected = torch.tanh(expected) if number else expected
        expected = torch.from_numpy(reference.slot_set(stage, expected, slots[0]))
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def test_running_the_stack_on_every_chunk_would_give_another_answer():
    """Why only the first level sees the stream."""
    torch.manual_seed(0)
    encoder = make(level(3, aggregate="sum"), level(6, aggregate="sum"))
    elements = torch.randn(1, 10, 3, dtype=torch.float64)
    wrong = sum(encoder(chunk) for chunk in elements.split(5, 1))
    assert (wrong - encoder(elements)).abs().max() > 1e-3
    right = setfold.fold(encoder, elements.split(5, 1))
    torch.testing.assert_close(right, encoder(elements), rtol=1e-12, atol=1e-13)


def test_slots_of_every_level_are_drawn_once_per_state():
    encoder = make(level(3), level(6)).train()
    state = encoder.update(encoder.initial_state(), torch.randn(1, 5, 3, dtype=torch.float64))
    assert torch.equal(encoder.readout(state), encoder.readout(state))
    with pytest.raises(setfold.StateMismatchError, match="different slots"):
        state.merge(encoder.initial_state())


def test_upper_levels_may_change_under_a_kept_state():
    encoder = make(level(3), level(6))
    with torch.no_grad():
        state = encoder.update(encoder.initial_state(), torch.randn(1, 50, 3, dtype=torch.float64))
        before = encoder.readout(state)
        encoder.levels[1].to_value.weight.mul_(2)
        assert not torch.equal(encoder.readout(state), before)


def test_slots_are_normalized_between_levels_by_default():
    encoder, values = make(level(3), level(6)), torch.randn(2, 4, 6, dtype=torch.float64)
    found = encoder.activation(values)
    expected = nn.functional.layer_norm(values.relu(), (6,), eps=1e-8)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_with_residuals_each_level_adds_to_the_one_before():
    torch.manual_seed(0)
    encoder = make(level(3), level(6, aggregate="max"), level(6), residual=True)
    assert all(float((factor.detach() - 0.1).abs().max()) < 1e-8 for factor in encoder.factors)
    nn.init.normal_(encoder.factors[0])
    elements = torch.randn(1, 9, 3, dtype=torch.float64)
    state = encoder.initial_state()
    found = encoder.readout(encoder.update(state, elements)).detach()[0]
    first, *upper = encoder.levels
    expected = torch.from_numpy(reference.slot_set(first, elements[0], state.frame[0][0]))
    for stage, slots, factor in zip(upper, state.frame[1:], encoder.factors, strict=True):
        inputs = nn.functional.layer_norm(expected.relu(), (6,), eps=1e-8)
        added = torch.from_numpy(reference.slot_set(stage, inputs, slots[0]))
        expected = expected + factor.detach() * added
    np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-12)


def test_residuals_need_levels_of_the_same_shape():
    with pytest.raises(setfold.InputError, match=r"same num_slots .* \(4, 6\), \(2, 6\)"):
        make(level(3), level(6, 2), residual=True)


def test_residuals_need_as_many_slots_in_every_level():
    encoder = make(level(3), level(6), residual=True)
    slots = [torch.zeros(5, 5, dtype=torch.float64), torch.zeros(1, 5, dtype=torch.float64)]
    state = encoder.initial_state(slots=slots)
    with pytest.raises(setfold.InputError, match=r"same number of slots; got \[5, 1\]"):
        encoder.update(state, torch.randn(1, 5, 3, dtype=torch.float64))


def test_random_slots_may_change_their_number_in_all_levels():
    encoder = make(level(3), level(6), residual=True)
    state = encoder.initial_state(num_slots=7)
    state = encoder.update(state, torch.randn(1, 5, 3, dtype=torch.float64))
    assert encoder.readout(state).shape == (1, 7, 6)


def test_as_printed_with_one_slot_at_the_end_it_collapses_and_says_so():
    with pytest.warns(setfold.CancelledAttentionWarning, match="one slot"):
        last = level(6, 1, aggregate="sum", slots="learned")
    first = level(3, aggregate="sum", slots="learned")
    with pytest.warns(setfold.CancelledAttentionWarning, match="collapses"):
        encoder = make(first, last, activation=nn.Identity())
    elements = torch.randn(1, 10, 3, dtype=torch.float64)
    found = encoder(elements)
    # a linear map of the sum of the elements, and nothing else
    summed = first.to_value(elements).sum(1)
    expected = last.to_value.weight @ summed[0] + 4 * last.to_value.bias
    torch.testing.assert_close(found[0, 0], expected, rtol=1e-11, atol=1e-11)
    found.sum().backward()
    assert first.to_key.weight.grad.abs().max() < 1e-12
    assert first.slot_values.grad.abs().max() < 1e-12


def test_widths_must_match():
    with pytest.raises(setfold.InputError, match="level 2 must have dim_in=6"):
        make(level(3), level(5))
    with pytest.raises(setfold.InputError, match="at least one level"):
        make()


def test_learned_and_random_levels_mix_with_a_generator():
    encoder = make(level(3), level(6, slots="learned"))
    drawn = encoder.initial_state(1, num_slots=7, generator=torch.Generator().manual_seed(0))
    assert drawn.slots.shape == (1, 7, 5)
    assert encoder.readout(drawn).shape == (1, 4, 6)
