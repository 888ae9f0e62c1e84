"""Chunks cut into short pieces, in shapes that depend on no value.

Rows of sets of any lengths become one dense batch: sets are cut into pieces of the mean length, so
that one large set among many small ones does not pad them all. And no sum of float32 runs over more
than about a thousand elements before it is added to float64 ones, as in the compiled kernels.
Statistics of pieces join to those of sets, as those of chunks do.
"""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

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
from setfold.errors import InputError
from setfold.kernels.softmax import finite

LONGEST = 1024  # elements of a piece, or a few more


class Pieces(NamedTuple):
    """Sets in P pieces of one length L. Absent elements are zeros."""

    elements: Tensor  # (P, L, ...)
    mask: Tensor  # (P, L)
    sets: Tensor  # (P,), in 0..B; pieces of no set belong to B
    counts: Tensor  # (B,), elements of each set


def cut(elements: Tensor, mask: Tensor) -> Pieces:
    """Cut a dense chunk into pieces.

    Args:
        elements: (B, n, ...).
        mask: (B, n), True where present.

    >>> pieces = cut(torch.ones(2, 3000, 1), torch.ones(2, 3000, dtype=torch.bool))
    >>> pieces.elements.shape, pieces.sets, pieces.counts
    (torch.Size([6, 1002, 1]), tensor([0, 0, 0, 1, 1, 1]), tensor([3000, 3000]))
    """
    batch, rows = mask.shape
    number = rows // LONGEST + 1
    length = rows // number + 2  # not 0 or 1, for which torch.export would make cases
    pieces = torch.arange(batch * number, device=mask.device)
    sets = pieces // number
    firsts = (pieces - sets * number) * length
    places = firsts.unsqueeze(1) + torch.arange(length, device=mask.device)
    places = places.clamp_max(rows)  # (P, L); one more element, which is absent
    owners = sets.unsqueeze(1)
    present = pad(mask, (0, 1))[owners, places]
    filled = pad(elements, (*(0, 0) * (elements.dim() - 2), 0, 1))[owners, places]
    filled = torch.where(spread(present, filled), filled, 0)  # padding may hold anything, even NaN
    return Pieces(filled, present, sets, mask.sum(1))


def cut_rows(elements: Tensor, index: Tensor, batch_size: int) -> Pieces:
    """Cut the sets of a ragged chunk into pieces: about 2 N + 4 B elements, at most.

    Args:
        elements: (N, ...), the rows of all sets.
        index: (N,), the set of each row, from 0 to `batch_size` - 1.
        batch_size: the number B of sets.

    >>> pieces = cut_rows(torch.arange(5.0).view(5, 1), torch.tensor([1, 0, 1, 1, 1]), 2)
    >>> pieces.sets, pieces.counts
    (tensor([0, 1, 1, 2, 2]), tensor([1, 4]))
    >>> pieces.elements.squeeze(2)
    tensor([[1., 0., 0.],
            [0., 2., 3.],
            [4., 0., 0.],
            [0., 0., 0.],
            [0., 0., 0.]])
    """
    rows = index.shape[0]
    index = torch.where(index < 0, batch_size, index)  # which no set has, so that adding it fails
    many = batch_size + 1 + rows // LONGEST
    length = rows // many + 2
    number = many + batch_size  # ceil(c / length), added up over the sets, is at most that
    sets, order = torch.sort(index)
    count = index.new_zeros(batch_size).index_add(0, index, torch.ones_like(index))
    pieces = (count + length - 1) // length
    starts, firsts = count.cumsum(0) - count, pieces.cumsum(0) - pieces
    places = firsts[sets] * length + torch.arange(rows, device=index.device) - starts[sets]
    filled = elements.new_zeros(number * length, *elements.shape[1:])
    filled = filled.index_put((places,), elements[order])
    mask = torch.zeros(number * length, dtype=torch.bool, device=index.device)
    mask = mask.index_put((places,), torch.ones_like(index, dtype=torch.bool))
    owners = index.new_full((number,), batch_size).index_put((places // length,), sets)
    filled = filled.reshape(number, length, *elements.shape[1:])
    return Pieces(filled, mask.view(number, length), owners, count)


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


def check_gathers(statistic: Statistic) -> None:
    """Raise InputError unless `gather` knows a statistic."""
    if type(statistic) not in gather.registry:  # a subclass may join in another way
        raise InputError(
            f"cannot export a state that keeps {type(statistic).__name__}: a graph must join any "
            "number of pieces at once, and that is known for the statistics of setfold only."
        )


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
