"""Equivariant Deep Sets against plain loops, and what is its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import setfold
from tests import reference
from tests.small import TIGHT, assert_layer_agrees, assert_loops_agree, draw
from tests.strategies import DIM_IN, cases, equivariant_deep_sets, seeded


@st.composite
def layers(draw):
    seeded(draw)
    width, subtract = draw(st.integers(1, 4)), draw(st.sampled_from(["max", "mean"]))
    return setfold.EquivariantLayer(DIM_IN, width, subtract, draw(st.booleans())).double()


@given(layer=layers(), case=cases(), masked=st.booleans())
def test_a_layer_is_what_the_loops_say(layer, case, masked):
    mask = case.mask if masked else None
    loops = lambda rows: reference.equivariant(layer, rows)  # noqa: E731
    assert_layer_agrees(layer, loops, case.elements, mask)


@settings(max_examples=60)
@given(encoder=equivariant_deep_sets(), case=cases(), masked=st.booleans())
def test_it_is_what_the_loops_say(encoder, case, masked):
    encoder, mask = encoder.double(), case.mask if masked else None
    loops = lambda rows: reference.equivariant_deep_sets(encoder, rows)  # noqa: E731
    assert_loops_agree(encoder, loops, case.elements, mask)


@pytest.mark.parametrize("subtract", ["max", "mean"])
@pytest.mark.parametrize("shared", [True, False])
def test_gradients_are_those_of_the_formula(subtract, shared):
    torch.manual_seed(0)
    layer = setfold.EquivariantLayer(3, 4, subtract, shared).double()
    elements, slope = draw(2, 7, 3).requires_grad_(), draw(2, 7, 4, seed=1)
    wanted = [elements, *layer.parameters()]
    found = torch.autograd.grad((layer(elements) * slope).sum(), wanted)
    pooled = elements.mean(1, True) if subtract == "mean" else elements.amax(1, True)
    weight, bias = layer.look.of_element.weight, layer.look.of_element.bias
    other = weight if shared else layer.look.of_set.weight
    formula = (elements @ weight.t() + bias - pooled @ other.t()).tanh()
    assert_close(found, torch.autograd.grad((formula * slope).sum(), wanted), **TIGHT)


def test_what_all_elements_share_is_subtracted():
    torch.manual_seed(0)
    encoder, elements = setfold.EquivariantDeepSets(3, [5, 4]).double(), draw(2, 8, 3)
    assert_close(encoder(elements + draw(2, 1, 3, seed=1)), encoder(elements), **TIGHT)


def test_one_activation_serves_all_layers():
    encoder = setfold.EquivariantDeepSets(3, [5, 4], activation=nn.PReLU())
    slopes = [p for p in encoder.parameters() if p.shape == (1,)]
    assert len(slopes) == 1
    encoder(torch.randn(2, 8, 3)).sum().backward()
    assert slopes[0].grad.abs() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dims": []}, r"dims must be a list of at least one layer width; got \[\]"),
        ({"dims": 8}, "dims must be a list of at least one layer width; got 8"),
        ({"dims": [4, 0]}, "dim_out must be an integer of at least 1; got 0"),
        ({"dim_in": 0}, "dim_in must be an integer of at least 1"),
        ({"subtract": "sum"}, "subtract must be one of 'max', 'mean'; got 'sum'"),
        ({"aggregate": "median"}, "aggregate must be one of"),
    ],
)
def test_bad_settings_say_what_is_allowed(changes, message):
    with pytest.raises(setfold.InputError, match=message):
        setfold.EquivariantDeepSets(**({"dim_in": 3, "dims": [4]} | changes))
