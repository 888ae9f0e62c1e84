from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import setfold.encoders.covariance  # noqa: F401  (defines no statistic that pieces do not know)
from setfold.core.statistic import (
    DEFINED,
    CentralMoments,
    Field,
    Max,
    Min,
    Scatter,
    Softmax,
    Sum,
    join,
)
from setfold.errors import InputError
from setfold.exporting.pieces import check_gathers, cut, cut_rows, gather
from tests.small import TIGHT, draw

LONGEST = 1024  # elements that are added up in float32
SHAPES = {Sum(): (2, 3), Max(): (3,), Min(): (3,), Softmax(): (2, 3)}
SHAPES |= {CentralMoments(): (3,), Scatter(): (3,)}


def test_every_statistic_of_setfold_is_known():
    ours = [kind for kind in DEFINED.values() if kind.__module__.startswith("setfold.")]
    for statistic in ours:
        if not inspect.isabstract(statistic):
            check_gathers(statistic())


def test_a_statistic_that_joins_in_its_own_way_is_refused():
    class Product(Sum):
        def join(self, left, right):
            return (left[0] * right[0],)

    try:
        with pytest.raises(InputError, match="keeps Product"):
            check_gathers(Product())
    finally:
        DEFINED.pop(next(name for name in DEFINED if name.endswith("Product")))


def parts_of(statistic, shape, seed):
    """The statistics of one piece of three elements, or of none."""
    values = draw(1, 3, *shape, seed=seed)
    if isinstance(statistic, Softmax):
        if seed % 4 == 0:
            return Field(statistic, shape).identity(1, values.device)
        return 5 * values[:, 0, :, 0], values[:, 1]
    mask = torch.full((1, 3), seed % 4 != 0)
    return statistic.absorb(values, mask)


@pytest.mark.parametrize("statistic", SHAPES, ids=str)
@given(owners=st.lists(st.integers(0, 3), max_size=12))
def test_gathered_pieces_are_those_joined_one_by_one(statistic, owners):
    fields = {"field": Field(statistic, SHAPES[statistic])}
    empty = fields["field"].identity(5, torch.device("cpu"))  # set 4 never has a piece
    pieces = [parts_of(statistic, SHAPES[statistic], seed) for seed, _ in enumerate(owners)]
    expected = [tuple(part[i : i + 1] for part in empty) for i in range(5)]
    for owner, piece in zip(owners, pieces, strict=True):
        expected[owner] = join(fields, {"field": expected[owner]}, {"field": piece})["field"]
    given = [torch.cat([e[:0], *ps]) for e, *ps in zip(empty, *pieces, strict=True)]
    found = gather(statistic, empty, tuple(given), torch.tensor(owners, dtype=torch.long))
    for part, wanted in zip(found, zip(*expected, strict=True), strict=True):
        assert_close(part, torch.cat(wanted), **TIGHT)


def rows_of(pieces, batch):
    """The elements of each set, sorted."""
    return [pieces.elements[pieces.sets == n][pieces.mask[pieces.sets == n]] for n in range(batch)]


@given(
    index=st.lists(st.integers(0, 4), max_size=40),
    large=st.sampled_from([0, 0, 0, LONGEST - 1, 8 * LONGEST]),
)
def test_rows_are_cut_so_that_each_is_in_one_piece_of_its_set(index, large):
    owners = torch.tensor([*index, *[2] * large], dtype=torch.long)
    rows = torch.arange(1.0, len(owners) + 1).unsqueeze(1)
    pieces = cut_rows(rows, owners, 5)
    assert pieces.counts.tolist() == torch.bincount(owners, minlength=5).tolist()
    assert pieces.mask.shape[1] <= LONGEST + 2
    assert pieces.mask.numel() <= 2 * (len(rows) + len(rows) // LONGEST + 2 * 5 + 1)
    for number, found in enumerate(rows_of(pieces, 5)):
        assert found.sort(0).values.tolist() == rows[owners == number].tolist()
    assert not pieces.elements[~pieces.mask].any()


@pytest.mark.parametrize("length", [0, 1, LONGEST - 1, LONGEST, 2 * LONGEST + 1])
def test_a_dense_chunk_is_cut_in_order(length):
    elements = torch.arange(1.0, 2 * length + 1).view(2, length, 1)
    mask = torch.arange(2 * length).view(2, length) % 3 != 0
    pieces = cut(elements.masked_fill(~mask.unsqueeze(2), torch.nan), mask)
    assert pieces.counts.tolist() == mask.sum(1).tolist()
    assert pieces.mask.shape[1] <= LONGEST + 2
    for found, whole, shown in zip(rows_of(pieces, 2), elements, mask, strict=True):
        assert torch.equal(found, whole[shown])
    assert not pieces.elements[~pieces.mask].any()
