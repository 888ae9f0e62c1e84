"""Elements as small and as large as float32 allows: the encoding of float64, or an error."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import setfold
from tests.core.test_absorb import ENCODERS as STREAMING
from tests.core.test_whole import ENCODERS as WHOLE
from tests.small import draw, moved

ENCODERS = STREAMING | WHOLE
SIZES = [1e-38, 1e-30, 1e-10, 1e10, 1e18, 2e19, 1e20, 1e25, 1e30, 1e35, 1e38]
# Larger elements may be refused. A variance by slot is a sum of squares, which do not fit.
REFUSED = dict.fromkeys(ENCODERS, 1e35) | {"places, several": 1e19}
LARGEST = torch.finfo(torch.float32).max

pytestmark = pytest.mark.filterwarnings("ignore::setfold.CancelledAttentionWarning")


def pair_of(build):
    torch.manual_seed(0)
    encoder = moved(build()).float()
    return encoder, copy.deepcopy(encoder).double()


@pytest.mark.parametrize("name", ENCODERS)
def test_encodings_are_those_of_float64(name):
    encoder, wide = pair_of(ENCODERS[name])
    for size in SIZES:
        elements = (size * draw(3, 7, 3, seed=1).clamp(-3, 3)).float()
        expected = wide(elements.double()).detach()
        try:
            found = encoder(elements).detach().double()
        except setfold.NonFiniteError:
            assert size > REFUSED[name], f"{size} is refused"
            continue
        rounded = torch.where(expected.abs() > LARGEST, expected.sign() * torch.inf, expected)
        scale = rounded.abs().nan_to_num(posinf=0).max()
        assert_close(found, rounded, rtol=1e-3, atol=1e-4 * float(scale))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_that_does_not_fit_is_infinite_and_the_state_is_right(sign):
    elements = torch.full((1, 4, 1), sign * 3e38)
    slots = setfold.SlotSetEncoder(1, 2, 3, 1, "sum").eval()
    with torch.no_grad():
        slots.to_value.weight.fill_(1.0)
        slots.to_key.weight.fill_(0.0)  # so that each slot gets half of every element
        for encoder in (setfold.Pool(1, "sum"), slots):
            state = encoder.initial_state(1)
            for element in elements.split(1, 1):
                state = encoder.update(state, element)
            assert (encoder.readout(state) == sign * torch.inf).all()
            for element in elements[:, 1:].split(1, 1):
                state = encoder.remove(state, element)
            assert encoder.readout(state).isfinite().all()
    assert setfold.Pool(1, "sum")(elements) == sign * torch.inf


def test_a_variance_that_does_not_fit_is_infinite():
    mean, variance = setfold.Moments(1)(torch.tensor([[[2e38], [-1e38]]]))[0]
    assert_close(mean, torch.tensor([5e37]))
    assert variance == torch.inf


def test_levels_that_overflow_raise():
    levels = [setfold.SlotSetEncoder(3, 2, 4, 3, "sum"), setfold.SlotSetEncoder(3, 2, 4, 3, "mass")]
    encoder, elements = setfold.HierarchicalSlotSetEncoder(levels, nn.Identity()), draw(2, 9, 3)
    with torch.no_grad():
        levels[0].to_value.weight.fill_(1e5)
    huge = (1e36 * (1 + elements.abs())).float()
    state = encoder.update(encoder.initial_state(2), huge)
    with pytest.raises(setfold.NonFiniteError, match="layers overflow in float32"):
        encoder.readout(state)
    with pytest.raises(setfold.NonFiniteError, match="layers overflow in float32"):
        encoder(huge)
    assert encoder(1e-20 * huge).isfinite().all()


def test_an_activation_does_not_hide_what_overflows():
    encoder = setfold.EquivariantDeepSets(2, [3])
    elements = torch.tensor([[[3e38, 3e38], [-3e38, 3e38]]])
    with pytest.raises(setfold.NonFiniteError, match="layers overflow"):
        encoder(elements)
    with pytest.raises(setfold.NonFiniteError, match="layers overflow"):
        setfold.fold(encoder, [elements])


def test_seeds_without_norms_that_overflow_raise():
    encoder = setfold.SeedAttention(3, 2, 1, layer_norm=False)
    with torch.no_grad():
        encoder.block.to_out.weight.copy_(torch.tensor([1e30, -1e30, 1e30]).expand(3, 3))
    with pytest.raises(setfold.NonFiniteError, match="layers overflow"):
        encoder(1e15 * draw(2, 5, 3).float())


def test_whole_sets_that_overflow_raise():
    encoder = setfold.FSPool(1, num_pieces=1)
    with pytest.raises(setfold.NonFiniteError, match="layers overflow"):
        encoder(torch.full((1, 1000, 1), 3e38))


@pytest.mark.parametrize("over", ["feature", "set"])
def test_set_norms_of_the_largest_numbers(over):
    layer, wide = setfold.SetNorm(2, over), setfold.SetNorm(2, over).double()
    elements = torch.full((1, 7, 2), -LARGEST)
    elements[:, 0] = LARGEST
    assert_close(layer(elements).double(), wide(elements.double()), rtol=1e-5, atol=1e-6)


def test_slots_must_be_small_enough_to_be_normalized():
    encoder = setfold.SlotSetEncoder(3, 2, 4, 5)
    with pytest.raises(setfold.InputError, match=r"squares do not overflow.*1e\+20"):
        encoder.initial_state(1, slots=torch.full((2, 4), 1e20))
    encoder.initial_state(1, slots=torch.full((2, 4), 1e18))


def test_huge_queries_have_unit_length():
    encoder = setfold.SlotSetEncoder(3, 2, 4, 5, similarity="cosine").eval()
    elements = draw(2, 9, 3).float()
    with torch.no_grad():
        encoder.to_query.weight.mul_(1e10)
        expected = encoder(elements)
        encoder.to_query.weight.mul_(1e15)
        encoder.to_query.bias.mul_(1e15)
        assert_close(encoder(elements), expected)
