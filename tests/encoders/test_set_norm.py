"""Normalisation by the set's own moments against plain loops and torch, and what is its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import instance_norm, layer_norm
from torch.testing import assert_close

import setfold
from tests import reference
from tests.small import TIGHT, assert_layer_agrees, assert_loops_agree, draw
from tests.strategies import DIM_IN, cases, seeded

OVER = pytest.mark.parametrize("over", ["feature", "set"])


@st.composite
def norms(draw):
    seeded(draw)
    over, epsilon = draw(st.sampled_from(["feature", "set"])), draw(st.sampled_from([1e-5, 0.1]))
    layer = setfold.SetNorm(DIM_IN, over, epsilon).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


@given(layer=norms(), case=cases(), masked=st.booleans())
def test_a_norm_is_what_the_loops_say(layer, case, masked):
    mask = case.mask if masked else None
    loops = lambda rows: reference.set_norm(layer, rows)  # noqa: E731
    assert_layer_agrees(layer, loops, case.elements, mask)


@given(case=cases(), masked=st.booleans())
def test_moments_are_what_the_loops_say(case, masked):
    encoder, mask = setfold.Moments(DIM_IN).double(), case.mask if masked else None
    assert_loops_agree(encoder, reference.moments, case.elements, mask)


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize(
    ("lengths", "error"),  # two means near 1e8 are known to 1e-8, and so is their distance
    [([1000], 1e-14), ([300, 0, 700], 1e-8), ([1] * 300 + [700], 1e-8)],
    ids=["whole", "chunks", "one by one"],
)
def test_a_mean_far_from_zero_does_not_cancel(lengths, error, tracked):
    elements = 1e8 + draw(2, 1000, 3)
    encoder = setfold.Moments(3).double()
    with torch.set_grad_enabled(tracked):
        state = encoder.initial_state(2)
        for chunk in elements.split(lengths, 1):
            state = encoder.update(state, chunk)
        found = encoder.readout(state)
    for number in range(2):
        expected = reference.moments(elements[number])
        np.testing.assert_allclose(found[number, 0], expected[0], rtol=1e-14)
        np.testing.assert_allclose(found[number, 1], expected[1], rtol=error)


def test_elements_far_from_zero_are_normalised():
    elements = 1e8 + draw(2, 1000, 3)
    normal = setfold.SetNorm(3, epsilon=1e-300).double()(elements)
    assert_close(normal.mean(1), torch.zeros(2, 3, dtype=torch.float64), rtol=0, atol=5e-8)
    assert_close(normal.square().mean(1), torch.ones(2, 3, dtype=torch.float64), rtol=1e-9, atol=0)


def test_moments_of_merged_states_are_those_of_all_elements():
    encoder, elements = setfold.Moments(3).double(), 1e8 + draw(2, 1000, 3)
    states = [
        encoder.update(encoder.initial_state(2), c) for c in elements.split([10, 600, 390], 1)
    ]
    for order in ([0, 1, 2], [2, 0, 1]):
        first, second, third = (states[i] for i in order)
        found = encoder.readout(first.merge(second).merge(third))[:, 1]
        for number in range(2):
            expected = reference.moments(elements[number])[1]
            np.testing.assert_allclose(found[number], expected, rtol=1e-8)


def test_single_precision_keeps_small_deviations():
    elements = (1e3 + draw(1, 500, 3)).float()
    found = setfold.Moments(3)(elements)[:, 1]
    assert_close(found, elements.double().var(1, correction=0).float(), rtol=1e-6, atol=0)


# ---- torch's norms ---------------------------------------------------------------------------


def test_over_features_it_is_an_instance_norm():
    layer, elements = setfold.SetNorm(3).double(), draw(2, 9, 3)
    expected = instance_norm(elements.transpose(1, 2), eps=1e-5).transpose(1, 2)
    assert_close(layer(elements), expected, **TIGHT)


def test_over_the_set_it_is_a_layer_norm_of_the_whole_set():
    layer, elements = setfold.SetNorm(3, over="set").double(), draw(2, 9, 3)
    assert_close(layer(elements), layer_norm(elements, (9, 3), eps=1e-5), **TIGHT)


@OVER
def test_gradients_are_those_of_torch(over):
    layer, elements = setfold.SetNorm(3, over).double(), draw(2, 9, 3).requires_grad_()
    slope = draw(2, 9, 3, seed=1)
    found = torch.autograd.grad((layer(elements) * slope).sum(), elements)
    if over == "set":
        formula = layer_norm(elements, (9, 3), eps=1e-5)
    else:
        formula = instance_norm(elements.transpose(1, 2), eps=1e-5).transpose(1, 2)
    assert_close(found, torch.autograd.grad((formula * slope).sum(), elements), **TIGHT)


# ---- what is degenerate ------------------------------------------------------------------------


@OVER
def test_equal_elements_give_finite_gradients(over):
    layer = setfold.SetNorm(3, over).double()
    for elements in (torch.ones(2, 5, 3), torch.ones(2, 1, 3)):
        leaf = elements.double().requires_grad_()
        made = layer(leaf)
        made.square().sum().backward()
        assert_close(made, torch.zeros_like(made), **TIGHT)
        assert leaf.grad.isfinite().all()


@OVER
def test_padding_leaves_no_trace_in_gradients(over):
    layer, elements = setfold.SetNorm(3, over).double(), draw(2, 5, 3)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0] * 5]).bool()
    leaf = elements.masked_fill(~mask.unsqueeze(-1), torch.nan).requires_grad_()
    layer(leaf, mask).pow(3).sum().backward()
    alone = elements[:1, mask[0]].clone().requires_grad_()
    (expected,) = torch.autograd.grad(layer(alone).pow(3).sum(), alone)
    assert_close(leaf.grad[mask], expected[0], **TIGHT)
    assert not leaf.grad[~mask].any()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim must be an integer of at least 1; got 0"),
        ({"dim": 3, "over": "batch"}, "over must be one of 'feature', 'set'; got 'batch'"),
    ],
)
def test_bad_settings_say_what_is_allowed(arguments, message):
    with pytest.raises(setfold.InputError, match=message):
        setfold.SetNorm(**arguments)
    with pytest.raises(setfold.InputError, match="dim_in must be an integer of at least 1"):
        setfold.Moments(0)
