"""Ragged batches as a few dense batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from setfold.kernels.tiles import tiles
from setfold.native import dispatch as native

MAX_EXACT_LENGTHS = 48  # with more distinct lengths, sets of similar lengths are padded
LADDER = 1.15  # ratio of consecutive padded lengths: at most 15% of the work is padding


class Group(NamedTuple):
    """Sets of the same length after padding."""

    sets: Tensor  # (b,), the numbers of the sets
    rows: Tensor  # (b, length), indices of their rows in the elements (N, d)
    mask: Tensor | None  # (b, length), True where present; None without padding


def group_by_length(index: Tensor, batch_size: int) -> Iterator[Group]:
    """Group the sets of a ragged batch by length.

    Args:
        index: (N,), the set of each row, in any order.
        batch_size: the number of sets. Empty sets are in no group.

    >>> for group in group_by_length(torch.tensor([2, 0, 2, 4]), batch_size=5):
    ...     print(group.sets.tolist(), group.rows.tolist())
    [0, 4] [[1], [3]]
    [2] [[0, 2]]
    """
    counts = torch.bincount(index, minlength=batch_size)
    by_length = stable_order(counts, index.shape[0] + 1)
    lengths = counts[by_length]
    # Sort the rows by the rank of their set, so that the sets of one length are contiguous.
    rank = torch.empty_like(by_length, dtype=_narrowest(batch_size))
    rank[by_length] = torch.arange(batch_size, dtype=rank.dtype, device=index.device)
    order = torch.argsort(rank.index_select(0, index), stable=True)
    starts = lengths.cumsum(0) - lengths
    stops = _runs(lengths).cumsum(0)
    firsts = torch.cat([stops.new_zeros(1), stops[:-1]])
    table = torch.stack([firsts, stops, lengths[firsts], lengths[stops - 1], starts[firsts]])
    for first, stop, shortest, longest, start in table.t().tolist():
        if longest == 0:
            continue
        sets, size = by_length[first:stop], stop - first
        if shortest == longest:
            rows = order[start : start + size * longest].view(size, longest)
            yield Group(sets, rows, None)
        else:  # the last set is the longest, so the window of every set stays in the group
            rows = order.unfold(0, longest, 1).index_select(0, starts[first:stop])
            place = torch.arange(longest, device=index.device)
            yield Group(sets, rows, place < lengths[first:stop, None])


def gather_groups(
    elements: Tensor, index: Tensor, batch_size: int
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """The sets of a ragged batch as dense batches (sets (b,), rows (b, length, ...), mask), by length.

    With a graph, all rows are gathered at once: the gradient of each piece that is gathered on its
    own is as large as all elements. Padding is zero.

    Args:
        elements: (N, ...).
        index: (N,), the set of each row, in any order.
        batch_size: the number of sets. Empty sets are in no group.
    """
    groups: Iterable[Group] = group_by_length(index, batch_size)
    pieces: Iterator[Tensor] | None = None
    if torch.is_grad_enabled() and elements.requires_grad:
        groups = list(groups)
        wanted = [group.rows.reshape(-1) for group in groups]
        gathered = elements.index_select(0, torch.cat(wanted))
        pieces = iter(gathered.split([len(rows) for rows in wanted]))
    for sets, rows, mask in groups:
        some = elements[rows] if pieces is None else next(pieces).unflatten(0, rows.shape)
        if mask is not None:
            some = some.masked_fill(~mask.view(*mask.shape, *[1] * (some.dim() - 2)), 0)
        yield sets, some, mask


def reduce_groups(
    elements: Tensor, index: Tensor, batch_size: int, names: Iterable[str]
) -> dict[str, Tensor] | None:
    """The sums, maxima and minima (S, d) of ragged rows, without a graph; None without a kernel.

    Args:
        elements: (N, d).
        index: (N,), the set of each row, in any order.
        batch_size: the number of sets.
        names: some of "sum", "max" and "min".
    """
    found = {}
    for name in names:
        if name == "sum":
            reduced = native.ragged_totals(elements, index, batch_size)
        else:
            reduced = native.ragged_extremes(elements, index, batch_size, name == "max")
        if reduced is None:
            return None
        found[name] = reduced
    return found


def stable_order(numbers: Tensor, bound: int) -> Tensor:
    """Return the order (N,) that sorts integers (N,) from 0 up to a bound, which is not reached."""
    return torch.argsort(numbers.to(_narrowest(bound)), stable=True)


def _narrowest(bound: int) -> torch.dtype:
    """The smallest dtype for integers below a bound: radix sort is faster with fewer bytes."""
    return torch.int16 if bound <= 1 << 15 else torch.int32 if bound <= 1 << 31 else torch.int64


def _runs(lengths: Tensor) -> Tensor:
    """The number of sets in each group, given the sorted lengths."""
    distinct, sizes = torch.unique_consecutive(lengths, return_counts=True)
    if len(distinct) <= MAX_EXACT_LENGTHS:
        return sizes
    steps = [0, 1]
    longest = int(distinct[-1])
    while steps[-1] < longest:
        steps.append(max(steps[-1] + 1, int(steps[-1] * LADDER)))
    ladder = torch.tensor(steps, device=lengths.device)
    rounded_up = torch.searchsorted(ladder, lengths)
    return torch.unique_consecutive(rounded_up, return_counts=True)[1]


def packs(groups: Iterable[Group], most_rows: int, most_sets: int) -> Iterator[list[Group]]:
    """Split large groups and combine small ones. A set is split only if it is longer than a pack.

    Args:
        groups: from `group_by_length`.
        most_rows: the largest number of rows of a pack, including padding.
        most_sets: the largest number of sets of a pack.

    >>> groups = group_by_length(torch.tensor([0, 1, 2, 2, 3, 3, 3, 3, 3]), batch_size=4)
    >>> for pack in packs(groups, most_rows=4, most_sets=4):
    ...     print([piece.rows.tolist() for piece in pack])
    [[[0], [1]], [[2, 3]]]
    [[[4, 5, 6, 7]]]
    [[[8]]]
    """
    pack: list[Group] = []
    num_rows = num_sets = 0
    for group in groups:
        batch, length = group.rows.shape
        for some, part in tiles(batch, length, min(most_rows, most_sets * length)):
            more_rows, more_sets = _extent(some) * _extent(part), _extent(some)
            if pack and (num_rows + more_rows > most_rows or num_sets + more_sets > most_sets):
                yield pack
                pack, num_rows, num_sets = [], 0, 0
            whole = more_rows == batch * length
            pack.append(group if whole else _slice(group, some, part))
            num_rows, num_sets = num_rows + more_rows, num_sets + more_sets
    if pack:
        yield pack


def _extent(part: slice) -> int:
    return int(part.stop - part.start)


def _slice(group: Group, some: slice, part: slice) -> Group:
    """Some sets of a group, or some rows of one set."""
    sets, rows, mask = group
    return Group(sets[some], rows[some, part], None if mask is None else mask[some, part])


def gather(elements: Tensor, pack: list[Group], out: Tensor) -> None:
    """Copy the rows of a pack to `out`, group by group, without a graph.

    Args:
        elements: (N, d) on the CPU, float32 or float64.
        pack: groups with as many rows as `out`, including padding.
        out: (r, d), contiguous.
    """
    wanted = torch.cat([piece.rows.view(-1) for piece in pack])
    # Twice as fast as index_select; mode="clip" skips the bounds check of all rows. The elements are
    # not ours: `numpy()` would mark their memory as shared.
    rows = np.from_dlpack(elements.detach())
    np.take(rows, wanted.numpy(), axis=0, out=out.numpy(), mode="clip")
