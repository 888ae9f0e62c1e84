"""Featurewise sort pooling against plain loops, and what is its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import setfold
from setfold.encoders.fspool import FSPool
from setfold.kernels.ragged import MAX_EXACT_LENGTHS
from tests.small import TIGHT, assert_compiles_and_exports, assert_ragged_is_dense, draw
from tests.strategies import cases, seeded


@st.composite
def encoders(draw):
    seeded(draw)
    return FSPool(3, draw(st.sampled_from([1, 2, 3, 7, 20]))).double()


def make(num_pieces=4, seed=0):
    torch.manual_seed(seed)
    return FSPool(3, num_pieces).double()


def interpolated(values, ratio):
    """A function given by its values at equal distances in [0, 1], at one ratio."""
    pieces = len(values) - 1
    left = min(int(ratio * pieces), pieces - 1)
    way = ratio * pieces - left
    return (1 - way) * values[left] + way * values[left + 1]


def by_loops(elements, values):
    """(n, d) elements to (d,), one number after another."""
    size, dim = elements.shape
    found = np.zeros(dim)
    for feature in range(dim):
        descending = sorted((float(x) for x in elements[:, feature]), reverse=True)
        for rank, number in enumerate(descending):
            ratio = rank / (size - 1) if size > 1 else 0.0
            found[feature] += interpolated(values[:, feature].tolist(), ratio) * number
    return found


def by_the_paper(elements, values):
    """The same with a graph, f as the paper's sum of hats."""
    size, pieces = len(elements), len(values) - 1
    features = []
    for feature in range(elements.shape[1]):
        order = sorted(range(size), key=lambda i: -elements[i, feature].item())
        total = 0
        for rank, place in enumerate(order):
            at = pieces * rank / max(size - 1, 1)
            hats = [max(0.0, 1 - abs(at - j)) for j in range(pieces + 1)]
            weight = sum(hat * values[j, feature] for j, hat in enumerate(hats))
            total = total + weight * elements[place, feature]
        features.append(total)
    return torch.stack(features)


@settings(max_examples=60)
@given(encoder=encoders(), case=cases())
def test_it_is_what_the_loops_say(encoder, case):
    found = encoder(case.elements).detach()
    masked = encoder(case.elements, case.mask).detach()
    values = encoder.values.detach()
    for number, elements in enumerate(case.elements):
        np.testing.assert_allclose(
            found[number], by_loops(elements, values), rtol=1e-10, atol=1e-11
        )
        present = by_loops(elements[case.mask[number]], values)
        np.testing.assert_allclose(masked[number], present, rtol=1e-10, atol=1e-11)


@given(encoder=encoders(), case=cases())
def test_order_does_not_matter(encoder, case):
    found = encoder(case.elements[:, case.permutation], case.mask[:, case.permutation])
    assert torch.equal(found, encoder(case.elements, case.mask))


@given(encoder=encoders(), case=cases(), content=st.sampled_from([float("nan"), -1e300, 1e300]))
def test_what_is_hidden_is_absent(encoder, case, content):
    hidden = case.elements.masked_fill(~case.mask.unsqueeze(-1), content)
    found = encoder(hidden, case.mask)
    for number, elements in enumerate(case.elements):
        alone = encoder(elements[case.mask[number]].unsqueeze(0))
        assert_close(found[number : number + 1], alone, rtol=1e-12, atol=1e-11)


def test_what_is_hidden_comes_after_numbers_that_are_far_below_zero():
    encoder = make()
    elements = draw(1, 5, 3) - 1e9
    padded = torch.cat([elements, torch.zeros(1, 4, 3, dtype=torch.float64)], 1)
    mask = torch.arange(9)[None] < 5
    assert_close(encoder(padded, mask), encoder(elements), **TIGHT)


@pytest.mark.parametrize("sets", [5, 2 * MAX_EXACT_LENGTHS])  # of exact lengths, and padded
def test_ragged_is_dense(sets):
    assert_ragged_is_dense(make(), sets)


def test_empty_sets_are_zeros():
    encoder = make()
    assert torch.equal(encoder(draw(2, 0, 3)), torch.zeros(2, 3, dtype=torch.float64))
    mask = torch.tensor([[False, False], [True, True]])
    found = encoder(draw(2, 2, 3), mask)
    assert torch.equal(found[0], torch.zeros(3, dtype=torch.float64))
    assert found[1].abs().min() > 0


def test_the_only_element_has_the_weight_of_the_largest():
    encoder, elements = make(), draw(2, 1, 3)
    assert_close(encoder(elements), encoder.values[0] * elements[:, 0], **TIGHT)


def test_the_sum_and_the_maximum_are_special_cases():
    encoder, elements = make(num_pieces=6), draw(2, 7, 3)
    with torch.no_grad():
        encoder.values.fill_(1)
        assert_close(encoder(elements), elements.sum(1), **TIGHT)
        encoder.values[1:] = 0
        assert_close(encoder(elements), elements.amax(1), **TIGHT)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 11])
def test_gradients_are_those_of_the_formula(size):
    encoder, elements = make(), draw(2, size, 3).requires_grad_()
    mask = torch.ones(2, size, dtype=torch.bool)
    mask[1, size // 2 + 1 :] = False
    slope = draw(2, 3, seed=1)
    wanted = (elements, encoder.values)
    found = torch.autograd.grad((encoder(elements, mask) * slope).sum(), wanted)
    formula = [by_the_paper(e[m], encoder.values) for e, m in zip(elements, mask, strict=True)]
    expected = torch.autograd.grad((torch.stack(formula) * slope).sum(), wanted)
    for gradient, by_hand in zip(found, expected, strict=True):
        assert_close(gradient, by_hand, **TIGHT)


def test_gradients_are_finite_where_elements_tie_or_are_hidden():
    encoder, elements = make(), torch.ones(2, 6, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] + 5 * [False], 4 * [True] + 2 * [False]])
    encoder(elements, mask).sum().backward()
    assert torch.isfinite(elements.grad).all()
    assert torch.isfinite(encoder.values.grad).all()
    assert torch.equal(elements.grad[~mask], torch.zeros(7, 3, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_knows_the_ranks_of_large_sets(dtype):
    encoder, size = make(num_pieces=20), 70_001  # more than float16 can count
    with torch.no_grad():
        ranks = torch.arange(size)
        weights = encoder.to(dtype)._weights(ranks, torch.tensor([size])).double()
        knots = weights[:: (size - 1) // 20]
    assert torch.equal(knots, encoder.values.double())
    assert torch.isfinite(weights).all()


def test_weights_begin_standard_normal():
    torch.manual_seed(0)
    values = FSPool(1000, 20).values.detach()
    assert values.shape == (21, 1000)
    assert abs(float(values.mean())) < 0.03
    assert abs(float(values.std()) - 1) < 0.03


def test_it_is_saved_and_loaded(tmp_path):
    encoder, elements = make(num_pieces=7), draw(2, 9, 3)
    setfold.save(encoder, tmp_path / "encoder.safetensors")
    copy = setfold.load(tmp_path / "encoder.safetensors", allow=["setfold.encoders.fspool.FSPool"])
    assert copy.num_pieces == 7
    assert torch.equal(copy(elements), encoder(elements))


def test_compiled_and_exported_forwards_agree():
    assert_compiles_and_exports(make())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim_in": 0}, "dim_in must be an integer of at least 1; got 0"),
        ({"dim_in": 3, "num_pieces": 0}, "num_pieces must be an integer of at least 1"),
        ({"dim_in": 3, "num_pieces": 2.5}, r"num_pieces must be .*got 2\.5"),
    ],
)
def test_bad_settings_say_what_is_allowed(arguments, message):
    with pytest.raises(setfold.InputError, match=message):
        FSPool(**arguments)


def test_bad_elements_say_what_is_expected():
    with pytest.raises(setfold.InputError, match=r"elements must be \(B, n, 3\)"):
        make()(draw(2, 5, 4))
    with pytest.raises(setfold.NonFiniteError):
        make()(torch.full((1, 2, 3), float("-inf"), dtype=torch.float64))
