"""Plain statistics of a set against plain loops, and where a square root has no gradient."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import setfold
from tests import reference
from tests.small import assert_loops_agree, draw
from tests.strategies import DIM_IN, cases


@given(case=cases(), masked=st.booleans())
def test_statistics_are_what_the_loops_say(case, masked):
    encoder, mask = setfold.SummaryStatistics(DIM_IN).double(), case.mask if masked else None
    assert_loops_agree(encoder, reference.summary_statistics, case.elements, mask)


def test_equal_elements_have_finite_gradients():
    elements = torch.ones(2, 5, 3, dtype=torch.float64, requires_grad=True)
    setfold.SummaryStatistics(3).double()(elements).sum().backward()
    assert bool(elements.grad.isfinite().all())


def test_far_from_zero_nothing_cancels():
    elements = 1e8 + draw(1, 1000, 3)
    found = setfold.SummaryStatistics(3).double()(elements)
    assert_close(found[0, 4:7], elements[0].std(0, correction=0), rtol=1e-7, atol=0.0)
