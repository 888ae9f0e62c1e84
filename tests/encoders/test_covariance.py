"""Mean and covariance against plain loops; layers in closed form against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.covariance import OAS
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch.testing import assert_close

import setfold
from tests import reference
from tests.small import assert_loops_agree, draw
from tests.strategies import DIM_IN, cases


@given(case=cases(), masked=st.booleans())
def test_covariances_are_what_the_loops_say(case, masked):
    encoder, mask = setfold.Covariance(DIM_IN).double(), case.mask if masked else None
    assert_loops_agree(encoder, reference.covariance, case.elements, mask)


@pytest.mark.parametrize("lengths", [[1000], [300, 0, 700], [1] * 300 + [700]])
def test_far_from_zero_nothing_cancels(lengths):
    elements = 1e8 + draw(2, 1000, 3)
    encoder = setfold.Covariance(3).double()
    state = encoder.initial_state(2)
    for chunk in elements.split(lengths, 1):
        state = encoder.update(state, chunk)
    for found, rows in zip(encoder.readout(state), elements, strict=True):
        wanted = torch.cov((rows - 1e8).T, correction=0)
        assert_close(found[1:], wanted, rtol=1e-7, atol=1e-8)


# ---- layers in closed form ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def classes():
    """Rows, their classes, and the state of all classes, from chunks and another machine."""
    index = torch.arange(4).repeat_interleave(torch.tensor([30, 50, 20, 40]))
    index = index[torch.randperm(140, generator=torch.Generator().manual_seed(0))]
    mixing, centers = draw(5, 5, seed=1), 2 * draw(4, 5, seed=2)
    rows = draw(140, 5) @ mixing + centers[index] + 100
    encoder = setfold.Covariance(5).double()
    here = there = encoder.initial_state(4)
    here = encoder.update(here, rows[:30], index=index[:30])
    there = encoder.update(there, rows[30:], index=index[30:])
    return rows, index, here.merge(there)


def within(rows, index):
    """The rows, each relative to the mean of its class."""
    return torch.cat([rows[index == c] - rows[index == c].mean(0) for c in range(4)]).numpy()


@pytest.mark.parametrize("shrinkage", [0.0, 0.3, None])
def test_the_discriminant_is_its_formula(classes, shrinkage):
    rows, index, state = classes
    inside = within(rows, index)
    share = OAS(assume_centered=True).fit(inside).shrinkage_ if shrinkage is None else shrinkage
    covariance = inside.T @ inside / len(inside)
    shrunk = (1 - share) * covariance + share * np.trace(covariance) / 5 * np.eye(5)
    inverse = np.linalg.inv(shrunk)
    means = np.stack([rows[index == c].numpy().mean(0) for c in range(4)])
    constants = [
        np.log(np.mean(index.numpy() == c)) - means[c] @ inverse @ means[c] / 2 for c in range(4)
    ]
    found = setfold.linear_discriminant(state, shrinkage)(rows).detach().numpy()
    np.testing.assert_allclose(found, rows.numpy() @ inverse @ means.T + constants, rtol=1e-8)


def test_the_discriminant_predicts_what_scikit_learn_does(classes):
    rows, index, state = classes
    peer = LinearDiscriminantAnalysis(solver="lsqr").fit(rows.numpy(), index.numpy())
    found = setfold.linear_discriminant(state, shrinkage=0.0)(rows).argmax(1)
    np.testing.assert_array_equal(found, peer.predict(rows.numpy()))


def test_after_whitening_the_covariance_within_classes_is_the_identity(classes):
    rows, index, state = classes
    white = setfold.whitening(state, shrinkage=0.0)(rows).detach()
    found = within(white, index)
    np.testing.assert_allclose(found.T @ found / len(found), np.eye(5), atol=1e-9)
    assert_close(white.mean(0), torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-9)


def test_nearest_whitened_means_are_the_discriminant_with_equal_classes(classes):
    rows, index, state = classes
    layer, count = setfold.whitening(state, 0.2), torch.bincount(index)
    white = layer(rows)
    means = torch.stack([white[index == c].mean(0) for c in range(4)])
    logits = setfold.linear_discriminant(state, 0.2)(rows) - (count / count.sum()).log()
    assert torch.equal(torch.cdist(white, means).argmin(1), logits.argmax(1))


def test_few_elements_of_many_columns_have_a_discriminant():
    encoder = setfold.Covariance(50).double()
    state = encoder.update(encoder.initial_state(2), draw(2, 5, 50))
    assert bool(setfold.linear_discriminant(state).weight.isfinite().all())
    with pytest.raises(setfold.InputError, match="larger shrinkage"):
        setfold.whitening(state, shrinkage=0.0)
    with pytest.raises(setfold.InputError, match="larger shrinkage"):
        setfold.linear_discriminant(state, shrinkage=0.0)


def test_what_cannot_be_classified_is_an_error():
    encoder = setfold.Covariance(3).double()
    empty, pool = encoder.initial_state(2), setfold.Pool(3).initial_state(2)
    one = encoder.update(empty, draw(2, 1, 3))
    for state, words in ((empty, "at least one element"), (pool, "state of Covariance")):
        with pytest.raises(setfold.InputError, match=words):
            setfold.linear_discriminant(state)
    with pytest.raises(setfold.InputError, match="no covariance"):
        setfold.whitening(one)
    with pytest.raises(setfold.InputError, match="from 0 to 1"):
        setfold.whitening(one, shrinkage=2)
