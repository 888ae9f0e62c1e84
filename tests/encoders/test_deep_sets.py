from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.testing import assert_close

import setfold
from tests import peers, reference
from tests.small import TIGHT, draw
from tests.strategies import cases, pools


@given(encoder=pools(), case=cases())
def test_a_pool_is_what_the_loops_say(encoder, case):
    encoder = encoder.double()
    found = encoder(case.elements)
    names = [a.name for a in encoder.aggregates]
    for number in range(case.batch_size):
        expected = reference.pool(case.elements[number], names)
        np.testing.assert_allclose(found[number], expected, rtol=1e-12, atol=1e-13)


def test_deep_sets_is_features_then_pool_then_head():
    torch.manual_seed(0)
    features, head = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(8, 2)
    model = setfold.DeepSets(features, 4, ["mean", "max"], head).double()
    elements = torch.randn(2, 7, 3, dtype=torch.float64)
    made = features(elements)
    expected = head(torch.cat([made.mean(1), made.amax(1)], -1))
    assert_close(model(elements), expected, rtol=1e-12, atol=1e-13)


def test_deep_sets_is_pygs():
    torch.manual_seed(0)
    features, head = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 2)
    model = setfold.DeepSets(features, 4, "sum", head).double()
    theirs = peers.DeepSetsAggregation(features, head)
    rows, index = draw(14, 3), torch.tensor([0] * 3 + [1] * 10 + [3])
    expected = theirs(rows, index, dim_size=4)
    assert_close(model(rows, index=index, batch_size=4), expected, **TIGHT)


def test_a_pool_has_no_mass_and_no_slots():
    with pytest.raises(setfold.InputError, match="aggregate must be one of sum, mean, max, min"):
        setfold.Pool(3, "weighted_mean")
    with pytest.raises(setfold.InputError, match="has no slots"):
        setfold.Pool(3).initial_state(1, num_slots=4)
    assert setfold.Pool(3).initial_state(1).slots is None


def test_elements_of_the_models_dtype_are_wanted():
    with pytest.raises(setfold.InputError, match=r"float64.*float32"):
        setfold.Pool(3)(torch.randn(1, 5, 3, dtype=torch.float64))
    assert (
        setfold.Pool(3).double()(torch.randn(1, 5, 3, dtype=torch.float64)).dtype == torch.float64
    )
