"""Sums over slots and over elements, and their gradients, against plain numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from setfold.kernels.scores import FoldedScores
from setfold.kernels.sums import plain_sums
from setfold.native import dispatch, library
from tests.native.cases import (
    ATTENTIONS,
    MASKS,
    SHAPES,
    assert_close,
    exact,
    logits_of,
    make_case,
    sums_of,
    with_one,
)

attentions = pytest.mark.parametrize("attention", ATTENTIONS)
kernels = pytest.mark.usefixtures("isa")
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


@kernels
@shapes
@attentions
def test_sums(shape, attention):
    for mask in MASKS:
        case = make_case(shape, mask)
        found = dispatch.sums(*case, attention)
        assert found.dtype == torch.float64
        assert_close(found, sums_of(case, attention))


@kernels
@shapes
@attentions
def test_gradients_of_sums(shape, attention):
    for mask in MASKS:
        case = make_case(shape, mask)
        upstream = torch.randn(shape[0], shape[3], shape[2] + 1)
        elements, matrix = (t.double().requires_grad_() for t in (case.elements, case.matrix))
        sums = plain_sums(elements, case.mask, attention, FoldedScores(matrix))
        expected = torch.autograd.grad(sums, [elements, matrix], upstream.double())
        arguments = (case.elements, case.mask, case.matrix, attention, upstream.double())
        of_elements, of_matrix = dispatch.gradients(*arguments, need_elements=True)
        assert_close(of_elements, expected[0])
        assert_close(of_matrix, expected[1], 2e-5, floor=0.1)  # differences that nearly cancel
        nothing, alone = dispatch.gradients(*arguments)
        assert nothing is None
        assert torch.equal(alone, of_matrix)


@kernels
def test_small_sigmoids_keep_their_slopes():
    case = make_case((1, 40, 3, 5))
    case.matrix[-1] -= 30.0
    upstream = torch.randn(1, 5, 4)
    matrix = case.matrix.double().requires_grad_()
    sums = plain_sums(case.elements.double(), None, "sigmoid", FoldedScores(matrix))
    expected = torch.autograd.grad(sums, [matrix], upstream.double())[0]
    assert_close(dispatch.gradients(*case, "sigmoid", upstream)[1], expected, 1e-4)


def peaks_and_sums(case):
    peaks, sums = [], []
    for b, shown in enumerate(case.shown):
        rows = case.elements[b][torch.from_numpy(shown)]
        logits = logits_of(rows, case.matrix)
        peaks.append(logits.max(0, initial=-np.inf))
        weights = np.exp(logits - peaks[-1])
        sums.append(weights.T @ with_one(exact(rows)))
    return np.stack(peaks), np.stack(sums)


@kernels
@shapes
def test_softmax_over_elements(shape):
    for mask in MASKS:
        case = make_case(shape, mask)
        peaks, sums = dispatch.softmax(*case)
        expected = peaks_and_sums(case)
        assert_close(peaks, expected[0])
        assert_close(sums, expected[1], 1e-5)


@kernels
def test_softmax_rescales_when_peaks_rise_and_keeps_them_when_they_fall():
    for order in (1, -1):
        elements = torch.linspace(-40 * order, 40 * order, 3000)[None, :, None].contiguous()
        matrix = torch.tensor([[1.0, -1.0, 0.5], [0.0, 0.0, 3.0]])
        case = make_case((1, 1, 1, 3))._replace(elements=elements, matrix=matrix)
        peaks, sums = dispatch.softmax(*case)
        expected = peaks_and_sums(case)
        assert_close(peaks, expected[0])
        assert_close(sums, expected[1], 2e-5)


@kernels
@shapes
def test_gradients_of_softmax_over_elements(shape):
    for mask in MASKS:
        case = make_case(shape, mask)
        upstream = torch.randn(shape[0], shape[3], shape[2] + 1)
        peaks, _ = dispatch.softmax(*case)
        peaks = peaks.clamp_min(torch.finfo(torch.float64).min)
        elements, matrix = (t.double().requires_grad_() for t in (case.elements, case.matrix))
        padded = torch.cat([elements, elements.new_ones(*shape[:2], 1)], -1)
        logits = padded @ matrix - peaks.unsqueeze(1)
        weights = logits.masked_fill(~torch.from_numpy(case.shown).unsqueeze(-1), -torch.inf).exp()
        sums = weights.transpose(1, 2) @ padded
        expected = torch.autograd.grad(sums, [elements, matrix], upstream.double())
        found = dispatch.gradients(*case, "exponential", upstream, peaks, need_elements=True)
        assert_close(found[0], expected[0], 1e-5)
        assert_close(found[1], expected[1], 2e-5)


@kernels
@shapes
def test_totals(shape):
    for mask in MASKS:
        case = make_case(shape, mask)
        case.elements[~torch.from_numpy(case.shown)] = torch.nan  # left out, not multiplied by 0
        expected = np.where(case.shown[..., None], exact(case.elements), 0).sum(1)
        found = dispatch.totals(case.elements, case.mask)
        assert_close(found, expected, 1e-12)


@kernels
@attentions
def test_sums_of_one_set(attention):
    case = make_case((1, 40, 17, 5))
    found = dispatch.one_set_sums(case.elements, case.matrix, attention)
    assert_close(found, sums_of(case, attention))
    assert (
        dispatch.one_set_sums(case.elements[..., 1:].contiguous(), case.matrix, attention) is None
    )


@kernels
@attentions
@pytest.mark.parametrize("order", ["sorted", "shuffled", "gaps"])
@pytest.mark.parametrize("shape", [(1, 1, 3, 2), (1, 40, 17, 5), (1, 700, 5, 16), (1, 300, 1, 33)])
def test_ragged_sums(shape, attention, order):
    case, sets = make_case(shape), 9
    index = torch.randint(sets, (shape[1],), generator=torch.Generator().manual_seed(1))
    if order != "shuffled":
        index = index.sort().values
    if order == "gaps":
        index = (index // 4) * 4
    rows = case.elements[0]
    found = dispatch.ragged_sums(rows, index, sets, case.matrix, attention)
    for number in range(sets):
        alone = case._replace(elements=rows[index == number].unsqueeze(0))
        assert_close(found[number], sums_of(alone, attention)[0])


@kernels
@pytest.mark.parametrize("dim", [3, 16])
@pytest.mark.parametrize("index", [[], [1], [3, 3, 1], [1, 3, 3], [4] * 600 + [0]])
def test_ragged_sums_are_written_for_every_set(dim, index):
    case = make_case((1, max(len(index), 1), dim, 5))
    rows, numbers = case.elements[0], torch.tensor(index, dtype=torch.long)
    out = torch.full((6, 5, dim + 1), torch.nan, dtype=torch.float64)
    sums = library.choice.kernels.ragged_sums
    data = (rows.data_ptr(), numbers.data_ptr(), len(index), dim, 6)
    assert sums(*data, case.matrix.data_ptr(), 5, 0, out.data_ptr()) == 0
    expected = dispatch.ragged_sums(rows[: len(index)], numbers, 6, case.matrix, "sigmoid")
    assert torch.equal(out, expected)
    empty = torch.bincount(numbers, minlength=6) == 0
    assert not out[empty].any()
    assert bool((out[~empty] != 0).any(2).all())


@kernels
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_ragged_sums_are_written_to_memory_that_was_used_before(order):
    """Also those of sets without rows, and of sets whose rows are in several blocks."""
    case = make_case((1, 2000, 16, 16))
    index = torch.arange(2000) // 900 * 2 + 1  # 1, 3 and 5 of 7
    if order == "shuffled":
        index = index[torch.randperm(2000, generator=torch.Generator().manual_seed(0))]
    arguments = (case.elements[0], index, 7, case.matrix, "sigmoid")
    first = dispatch.ragged_sums(*arguments)
    expected, place = first.clone(), first.data_ptr()
    first.fill_(torch.nan)
    del first
    again = dispatch.ragged_sums(*arguments)
    assert again.data_ptr() == place
    assert torch.equal(again, expected)
    assert not again[::2].any()
    kept = dispatch.ragged_sums(*arguments)
    assert kept.data_ptr() != again.data_ptr(), "it is still used"


@kernels
def test_ragged_sums_of_nothing_and_of_indices_out_of_range():
    case = make_case((1, 6, 3, 4))
    rows, index = case.elements[0], torch.tensor([0, 1, 2, 2, 1, 0])
    empty = dispatch.ragged_sums(rows[:0], index[:0], 3, case.matrix, "sigmoid")
    assert empty.shape == (3, 4, 4)
    assert not empty.any()
    for bad in (3, -1, 1 << 62, -(1 << 63)):
        index[3] = bad
        assert dispatch.ragged_sums(rows, index, 3, case.matrix, "sigmoid") is None
    assert dispatch.ragged_sums(rows, index * 0, 0, case.matrix, "sigmoid") is None
    assert dispatch.ragged_sums(rows, index.float(), 3, case.matrix, "sigmoid") is None


@kernels
@attentions
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] == 1])
@pytest.mark.parametrize("dim_out", [1, 16, 33])
def test_encode(shape, attention, dim_out):
    case = make_case(shape)
    values = torch.randn(shape[2] + 1, dim_out)
    found = dispatch.encode(case.elements[:1], case.matrix, attention, values, 3)
    assert_close(found, sums_of(case, attention) @ exact(values) / 3)


@kernels
@attentions
@pytest.mark.parametrize("power", [10, 40, 99])
def test_huge_logits_give_what_the_formula_gives(attention, power):
    # powers of two, so that logits are exact in float32
    elements = torch.tensor([1.0, -2.0, 4.0, -1.0, 0.5]).view(1, 5, 1)
    case = make_case((1, 5, 1, 4))._replace(
        elements=elements, matrix=torch.tensor([[1.0, -1.0, 2.0, 0.0], [0.0] * 4]) * 2.0**power
    )
    assert_close(dispatch.sums(*case, attention), sums_of(case, attention))
    peaks, sums = dispatch.softmax(*case)
    expected = peaks_and_sums(case)
    assert np.array_equal(peaks, expected[0])
    assert_close(sums, expected[1])


@kernels
def test_weights_become_subnormal_and_then_zero():
    """exp(-100) is subnormal in float32; so is every result that is made of it."""
    logits = torch.tensor([0.0, -80.0, -87.0, -90.0, -95.0, -100.0, -103.0, -110.0, -1e4])
    matrix = torch.stack([torch.zeros_like(logits), logits])
    case = make_case((1, 1, 1, 9))._replace(elements=torch.ones(1, 1, 1), matrix=matrix)
    found = dispatch.sums(*case, "softmax")[0, :, 1]
    expected = sums_of(case, "softmax")[0, :, 1]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1.5e-45)
    assert found[-1] == 0


@kernels
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 5, 36])
def test_a_bad_number_shows_in_every_result(bad, place):
    case = make_case((1, 37, 3, 5))
    case.elements[0, place, 1] = bad
    rows, values = case.elements[0], torch.randn(4, 2)
    index = torch.zeros(37, dtype=torch.long)
    for attention in ATTENTIONS:
        upstream = torch.ones(1, 5, 4)
        found = [
            dispatch.sums(*case, attention),
            dispatch.ragged_sums(rows, index, 1, case.matrix, attention),
            dispatch.encode(case.elements, case.matrix, attention, values, 1),
            dispatch.gradients(*case, attention, upstream),
        ]
        assert found == [None] * 4  # torch must decide
        assert dispatch.extrema(*case, attention, values, True, True) is None
    assert dispatch.softmax(*case) is None


@kernels
def test_a_chunk_of_a_batch_is_read_in_place():
    whole = make_case((4, 50, 5, 6), "some")
    for rows in (slice(0, 20), slice(20, 50), slice(49, 50), slice(7, 7)):
        case = whole._replace(elements=whole.elements[:, rows], mask=whole.mask[:, rows])
        copied = case._replace(elements=case.elements.contiguous(), mask=case.mask.contiguous())
        for function in (
            lambda c: dispatch.sums(*c, "sigmoid"),
            lambda c: dispatch.softmax(*c)[1],
            lambda c: dispatch.gradients(*c, "softmax", torch.ones(4, 6, 6), None, True)[0],
        ):
            assert torch.equal(function(case), function(copied))
    skipping = whole._replace(elements=whole.elements[::2], mask=whole.mask[::2])
    assert_close(dispatch.sums(*skipping, "sigmoid"), sums_of(skipping, "sigmoid"))
    repeated = make_case((1, 9, 3, 4))
    expanded = repeated._replace(elements=repeated.elements.expand(3, -1, -1))
    assert_close(dispatch.sums(*expanded, "sigmoid"), sums_of(expanded, "sigmoid"))
