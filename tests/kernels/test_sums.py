"""The fast sums against the formula, in every way that they may be computed."""

from __future__ import annotations

import itertools

import pytest
import torch

from setfold.kernels import ragged, sums, tiles
from setfold.kernels.scores import CosineScores, FoldedScores, KeyScores

WIDTH, SLOTS, OUT = 5, 4, 3


def make_scores(form, seed=0):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()

    if form == "folded":
        return FoldedScores(normal(WIDTH + 1, SLOTS))
    if form == "key":
        return KeyScores(normal(OUT, WIDTH), normal(OUT), normal(SLOTS, OUT))
    return CosineScores(normal(OUT, WIDTH), None, normal(SLOTS, OUT), normal(SLOTS))


def make_projection():
    draw = torch.Generator().manual_seed(7)
    weight = torch.randn(OUT, WIDTH, generator=draw, dtype=torch.float64)
    return weight.requires_grad_(), torch.ones(OUT, dtype=torch.float64).requires_grad_()


def gradients(output, wanted):
    weight = torch.arange(output.numel(), dtype=output.dtype).reshape(output.shape).cos()
    return torch.autograd.grad((output * weight).sum(), wanted)


@pytest.fixture
def tiny_tiles(monkeypatch):
    """Tiles so small that a small input needs many, and no shortcut for small inputs."""
    monkeypatch.setattr(tiles, "MIN_ROWS", 1)
    monkeypatch.setattr(tiles, "TILE_BYTES", 400)
    monkeypatch.setattr(sums, "PLAIN_ROWS", 0)


FORMS = [
    (form, attention, projected)
    for form, attention, projected in itertools.product(
        ["folded", "key", "cosine"], ["sigmoid", "softmax"], [False, True]
    )
]


@pytest.mark.parametrize(("form", "attention", "projected"), FORMS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 29), (3, 4), (2, 17), (7, 1)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("tiny_tiles")
def test_tiles_give_what_the_formula_gives(form, attention, projected, shape, masked):
    draw = torch.Generator().manual_seed(1)
    elements = torch.randn(*shape, WIDTH, generator=draw, dtype=torch.float64).requires_grad_()
    mask = torch.rand(shape, generator=draw) < 0.6 if masked else None
    scores, projection = make_scores(form), make_projection() if projected else None
    wanted = [t for t in (elements, *scores, *(projection or ())) if t is not None]
    expected = sums.plain_sums(elements, mask, attention, scores, projection)
    found = sums.slot_sums(elements, mask, scores, attention, projection)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for f, e in zip(gradients(found, wanted), gradients(expected, wanted), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        again = sums.slot_sums(elements, mask, scores, attention, projection)
    torch.testing.assert_close(again, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("form", "attention", "projected"), FORMS)
@pytest.mark.parametrize("exact", [2, 48], ids=["padded", "exact"])
@pytest.mark.usefixtures("tiny_tiles")
def test_ragged_sums_are_those_of_each_set_alone(monkeypatch, form, attention, projected, exact):
    monkeypatch.setattr(ragged, "MAX_EXACT_LENGTHS", exact)
    monkeypatch.setattr(sums, "PACK_SETS", 3)
    draw = torch.Generator().manual_seed(2)
    lengths = torch.tensor([20, 1, 0, 2, 21, 1, 21, 1, 57, 2, 1, 22, 1])
    index = torch.arange(len(lengths)).repeat_interleave(lengths)
    index = index[torch.randperm(len(index), generator=draw)]
    elements = torch.randn(len(index), WIDTH, generator=draw, dtype=torch.float64)
    scores, projection = make_scores(form), make_projection() if projected else None
    found = torch.zeros(len(lengths), SLOTS, (OUT if projected else WIDTH) + 1).double()
    with torch.no_grad():
        grouped = sums.ragged_sums(elements, index, len(lengths), scores, attention, projection)
        for sets, some in grouped:
            assert len(sets.unique()) == len(sets) <= 3
            found[sets] += some
        for number in range(len(lengths)):
            alone = elements[index == number].unsqueeze(0)
            expected = sums.plain_sums(alone, None, attention, scores, projection)[0]
            torch.testing.assert_close(found[number], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_one_slot_takes_everything(masked):
    elements = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    mask = torch.rand(2, 6) < 0.5 if masked else None
    scores = FoldedScores(torch.randn(WIDTH + 1, 1, dtype=torch.float64))
    for projection in (None, make_projection()):
        expected = sums.plain_sums(elements, mask, "sigmoid", scores, projection)
        found = sums.slot_sums(elements, mask, scores, "sigmoid", projection)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_finite_differences():
    elements = torch.randn(1, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    (matrix,) = make_scores("folded")

    def function(x, a):
        return sums._FoldedSums.apply(x, None, "sigmoid", False, a)

    assert torch.autograd.gradcheck(function, (elements, matrix))


def test_saturated_logits_stay_finite():
    elements = torch.full((1, 5000, WIDTH), 1e4)
    scores = FoldedScores(torch.randn(WIDTH + 1, SLOTS))
    for attention in ("sigmoid", "softmax"):
        with torch.no_grad():
            assert sums.slot_sums(elements, None, scores, attention).isfinite().all()


def test_no_row_is_left_out_and_none_is_taken_twice():
    for batch, length, rows in itertools.product((1, 3), (0, 1, 5, 8), (1, 3, 8, 100)):
        seen = torch.zeros(batch, length)
        for sets, part in tiles.tiles(batch, length, rows):
            seen[sets, part] += 1
            tile = seen[sets, part]
            assert tile.numel() <= max(rows, length if tile.shape[0] > 1 else rows)
        assert (seen == 1).all()
