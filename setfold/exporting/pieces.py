"""Rows of sets of any lengths as one dense batch, in shapes that depend on no value.

Sets are cut into pieces of the mean length, so that one large set among many small ones does not
pad them all: at most twice the rows and four times the sets are computed. Statistics of pieces
join to those of sets, as those of chunks do.
"""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor

from setfold.core.statistic import (
    CentralMoments,
    Max,
    Min,
    Parts,
    Scatter,
    Softmax,
    Statistic,
    Sum,
    spread,
)
from setfold.kernels.softmax import finite


class Pieces(NamedTuple):
    """Sets in pieces of one length. Pieces without elements belong to one more set, the last."""

    elements: Tensor  # (P, L, d)
    mask: Tensor  # (P, L)
    sets: Tensor  # (P,), in 0..B
    count: Tensor  # (B,), elements of each set


def cut_rows(elements: Tensor, index: Tensor, batch_size: int) -> Pieces:
    """Cut the sets of a ragged batch into pieces.

    Args:
        elements: (N, ...), the rows of all sets.
        index: (N,), the set of each row, from 0 to `batch_size` - 1.
        batch_size: the number B of sets.

    >>> pieces = cut_rows(torch.arange(5.0).view(5, 1), torch.tensor([1, 0, 1, 1, 1]), 2)
    >>> pieces.sets, pieces.count
    (tensor([0, 1, 1, 2, 2]), tensor([1, 4]))
    >>> pieces.elements.squeeze(2)
    tensor([[1., 0., 0.],
            [0., 2., 3.],
            [4., 0., 0.],
            [0., 0., 0.],
            [0., 0., 0.]])
    """
    rows = index.shape[0]
    length = rows // (batch_size + 1) + 2  # so that ceil(c / length) add up to at most the number
    number = 2 * batch_size + 1
    sets, order = torch.sort(index)
    ones = torch.ones_like(index)
    count = index.new_zeros(batch_size).index_add(0, index, ones)
    pieces = (count + length - 1) // length
    starts, firsts = count.cumsum(0) - count, pieces.cumsum(0) - pieces
    places = firsts[sets] * length + torch.arange(rows, device=index.device) - starts[sets]
    filled = elements.new_zeros(number * length, *elements.shape[1:])
    mask = torch.zeros(number * length, dtype=torch.bool, device=index.device)
    owners = index.new_full((number,), batch_size)
    return Pieces(
        filled.index_put((places,), elements[order]).unflatten(0, (number, length)),
        mask.index_put((places,), torch.ones_like(index, dtype=torch.bool)).view(number, length),
        owners.index_put((places // length,), sets),
        count,
    )


# ---- the union of any number of pieces -----------------------------------------------------------


@singledispatch
def gather(statistic: Statistic, empty: Parts, parts: Parts, sets: Tensor) -> Parts:
    """The statistics of sets from those of their pieces: `join`, for any number at once.

    Args:
        statistic: what is joined.
        empty: its parts for the sets, without elements.
        parts: those of the pieces.
        sets: (P,), the set of each piece.

    >>> gather(Sum(), (torch.zeros(2),), (torch.tensor([1.0, 2.0, 4.0]),), torch.tensor([1, 0, 1]))
    (tensor([2., 5.]),)
    """
    raise NotImplementedError(type(statistic).__name__)


def can_gather(statistic: Statistic) -> bool:
    """Whether `gather` knows a statistic."""
    return gather.dispatch(type(statistic)) is not gather.dispatch(Statistic)


@gather.register
def _(statistic: Sum, empty: Parts, parts: Parts, sets: Tensor) -> Parts:
    return (_add(empty[0], parts[0], sets),)


@gather.register
def _(statistic: Max, empty: Parts, parts: Parts, sets: Tensor) -> Parts:
    return (_largest(empty[0], parts[0], sets),)


@gather.register
def _(statistic: Min, empty: Parts, parts: Parts, sets: Tensor) -> Parts:
    return (-_largest(-empty[0], -parts[0], sets),)


@gather.register
def _(statistic: Softmax, empty: Parts, parts: Parts, sets: Tensor) -> Parts:
    peak = _largest(empty[0], parts[0], sets)
    scale = torch.exp(parts[0] - finite(peak)[sets]).unsqueeze(-1)
    return peak, _add(empty[1], parts[1] * scale, sets)


@gather.register
def _(statistic: CentralMoments, empty: Parts, parts: Parts, sets: Tensor) -> Parts:
    count, mean, apart = _centred(empty, parts, sets)
    return count, mean, _add(empty[2], parts[2] + parts[0] * apart.square(), sets)


@gather.register
def _(statistic: Scatter, empty: Parts, parts: Parts, sets: Tensor) -> Parts:
    count, mean, apart = _centred(empty, parts, sets)
    between = (apart * spread(parts[0], apart)).unsqueeze(-1) * apart.unsqueeze(-2)
    return count, mean, _add(empty[2], parts[2] + between, sets)


def _centred(empty: Parts, parts: Parts, sets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count and mean of the sets, and the distances of the means of their pieces from them."""
    count = _add(empty[0], parts[0], sets)
    total = _add(empty[1], parts[1] * spread(parts[0], parts[1]), sets)
    mean = total / spread(torch.where(count > 0, count, 1), total)
    return count, mean, parts[1] - mean[sets]


def _add(empty: Tensor, parts: Tensor, sets: Tensor) -> Tensor:
    return empty.index_add(0, sets, parts)


def _largest(empty: Tensor, parts: Tensor, sets: Tensor) -> Tensor:
    return empty.scatter_reduce(0, spread(sets, parts).expand_as(parts), parts, "amax")
