"""A logit that is not finite makes weights and peaks NaN, in every implementation."""

from __future__ import annotations

import math

import pytest
import torch

from setfold.kernels.extrema import _transposed_weights
from setfold.kernels.scores import FoldedScores, GatedScores, weigh, weigh_, weigh_few_
from setfold.kernels.softmax import one_tile_log_weights, softmax_sums

WEIGHTS = {
    "weigh": weigh,
    "weigh_": lambda logits, attention: weigh_(logits, attention, logits.new_ones(logits.shape[1])),
    "weigh_few_": weigh_few_,
    "weigh_few_, means": lambda logits, attention: weigh_few_(logits, attention, 7),
}


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("attention", ["sigmoid", "softmax"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_a_logit_that_is_not_finite_are_nan(name, attention, bad):
    logits = torch.randn(7, 5)
    logits[3, 2] = bad
    found = WEIGHTS[name](logits, attention)
    assert found[3].isnan().all()
    assert found[[0, 1, 2, 4, 5, 6]].isfinite().all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("attention", ["sigmoid", "softmax"])
def test_transposed_weights_of_a_logit_that_overflows_are_nan(attention, sign):
    matrix, tile = torch.eye(6, 5), torch.randn(1, 5, 7)
    matrix[2, 2], tile[0, 2, 3] = 10, sign * 3e38
    found = _transposed_weights(tile, FoldedScores(matrix), attention)[0].t()
    assert found[3].isnan().all()
    assert found[[0, 1, 2, 4, 5, 6]].isfinite().all()


def hidden(length):
    """A set whose last element has the logits 3e38, but -inf for slot 1, and the matrix."""
    elements, matrix = torch.randn(1, length, 3), torch.randn(4, 4) * 1e-3
    elements[0, -1] = torch.tensor([3e38, 0, 0])
    matrix[0] = torch.tensor([1e-1, -10, 1e-1, 1e-1])
    return elements, matrix


@pytest.mark.parametrize("over_slots", [False, True])
@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("length", [1, 5, 300, 6000])
def test_the_peak_is_nan_if_a_small_logit_overflows(length, tracked, over_slots):
    elements, matrix = hidden(length)
    if length > 1:
        elements[0, 0] = torch.tensor([-1.0, 0, 0])
    with torch.set_grad_enabled(tracked):
        peak, _ = softmax_sums(elements, None, FoldedScores(matrix), over_slots=over_slots)
    assert peak[0, 1].isnan()
    assert peak[0, [0, 2, 3]].isfinite().all()
    if over_slots:
        peak, _ = one_tile_log_weights(elements[0], matrix)
        assert peak[1].isnan()


@pytest.mark.parametrize("length", [5, 6000])
def test_hidden_elements_may_have_any_logits(length):
    elements, matrix = hidden(length)
    mask = torch.ones(1, length, dtype=torch.bool)
    mask[0, -1] = False
    found = softmax_sums(elements, mask, FoldedScores(matrix))
    expected = softmax_sums(elements[:, :-1], None, FoldedScores(matrix))
    torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-4, atol=1e-3)


def test_a_gate_does_not_hide_that_it_overflows():
    one = torch.ones(1, 1)
    for wide in ((1e30 * one, one), (one, 1e30 * one)):
        scores = GatedScores(one, wide[0], None, wide[1], None)
        assert scores.logits(torch.full((1, 1, 1), 1e10)).isnan().all()
