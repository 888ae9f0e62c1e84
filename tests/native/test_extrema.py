"""Maxima and minima and where they are attained, against plain numpy in float64."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from setfold.native import dispatch
from tests.native.cases import (
    ATTENTIONS,
    MASKS,
    SHAPES,
    assert_close,
    exact,
    make_case,
    weights_of,
    with_one,
)

pytestmark = pytest.mark.usefixtures("isa")


def contributions(case, values, attention):
    """W_ij v_ic (B, n, K, d_out)."""
    rows = case.elements.reshape(-1, case.elements.shape[2])
    weights = weights_of(rows, case.matrix, attention)
    found = weights[:, :, None] * (with_one(exact(rows)) @ exact(values))[:, None, :]
    return found.reshape(*case.elements.shape[:2], *found.shape[1:])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize(("largest", "dim_out"), [(True, 1), (False, 17), (True, 40)])
def test_extrema_and_winners(shape, largest, dim_out):
    for mask, attention in itertools.product(MASKS, ATTENTIONS):
        case = make_case(shape, mask)
        values = torch.randn(shape[2] + 1, dim_out)
        best, winners = dispatch.extrema(*case, attention, values, largest, True)
        alone, nothing = dispatch.extrema(*case, attention, values, largest, False)
        assert nothing is None
        assert torch.equal(alone, best)
        worst = -np.inf if largest else np.inf
        products = contributions(case, values, attention)
        scale = np.abs(products).max()  # the rounding of values that nearly cancel
        products[~case.shown] = worst
        pick = np.max if largest else np.min
        expected = pick(products, axis=1)
        hidden = ~case.shown.any(1)
        assert (best.numpy()[hidden] == worst).all()
        assert not winners.numpy()[hidden].any()
        assert_close(best.numpy()[~hidden], expected[~hidden], floor=scale)
        attained = np.take_along_axis(products, winners.numpy()[:, None], 1)[:, 0]
        assert_close(attained[~hidden], expected[~hidden], floor=scale)


def test_the_first_of_equal_elements_wins():
    case = make_case((1, 200, 3, 4))
    case.elements[:, 5:] = case.elements[:, 5:6]
    values = torch.randn(4, 3)
    _, winners = dispatch.extrema(*case, "sigmoid", values, True, True)
    assert winners.max() <= 5


def test_no_element_at_all():
    case = make_case((2, 4, 3, 5))
    values = torch.randn(4, 6)
    empty = (case.elements[:, :0], None, case.matrix)
    best, winners = dispatch.extrema(*empty, "sigmoid", values, False, True)
    assert bool((best == torch.inf).all())
    assert not winners.any()


def test_no_column_at_all():
    elements, matrix = torch.empty(2, 5, 0), torch.randn(1, 3)
    values = torch.randn(1, 4)
    best, _ = dispatch.extrema(elements, None, matrix, "softmax", values, True, True)
    weights = torch.softmax(matrix[0].double(), 0)
    assert_close(best[0], weights[:, None] * values.double())


@pytest.mark.parametrize("place", [0, 63, 64, 130])
def test_bad_numbers_are_refused_unless_they_are_hidden(place):
    case = make_case((1, 131, 3, 4))
    case.elements[0, place, 0] = torch.nan
    arguments = (case.matrix, "sigmoid", torch.randn(4, 2), True, True)
    assert dispatch.extrema(case.elements, None, *arguments) is None
    mask = torch.ones(1, 131, dtype=torch.bool)
    mask[0, place] = False
    best, _ = dispatch.extrema(case.elements, mask, *arguments)
    assert best.isfinite().all()


@pytest.mark.parametrize("overflowing", ["scores", "values"])
def test_numbers_that_overflow_on_the_way_are_refused(overflowing):
    case = make_case((1, 20, 3, 4))
    values = torch.randn(4, 2)
    (case.matrix if overflowing == "scores" else values).mul_(1e38)
    case.elements.mul_(100)
    assert dispatch.extrema(*case, "softmax", values, True, True) is None
