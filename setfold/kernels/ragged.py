"""Sets of different lengths as a few dense batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MAX_EXACT_LENGTHS = 48  # with more distinct lengths than this, lengths are rounded up and padded
LADDER = 1.15  # ratio of neighbouring padded lengths: at most 15% of the work is padding


class Group(NamedTuple):
    """Sets of one length: which they are, their rows, and what of it is padding."""

    sets: Tensor  # (b,)
    rows: Tensor  # (b, length), rows of the flat elements
    mask: Tensor | None  # (b, length), True where present; None where nothing is padded


def group_by_length(index: Tensor, batch_size: int) -> Iterator[Group]:
    """Gather the rows of each set, and the sets of each length.

    Args:
        index: (N,), the set of each row, in any order.
        batch_size: the number of sets; those without rows are in no group.

    >>> for group in group_by_length(torch.tensor([2, 0, 2, 4]), batch_size=5):
    ...     print(group.sets.tolist(), group.rows.tolist())
    [0, 4] [[1], [3]]
    [2] [[0, 2]]
    """
    counts = torch.bincount(index, minlength=batch_size)
    starts = counts.cumsum(0) - counts
    order = torch.argsort(index, stable=True)
    lengths, by_length = torch.sort(counts, stable=True)
    padded = lengths
    distinct, sizes = torch.unique_consecutive(lengths, return_counts=True)
    if len(distinct) > MAX_EXACT_LENGTHS:
        padded = _rounded_up(lengths)
        distinct, sizes = torch.unique_consecutive(padded, return_counts=True)
    exact = padded is lengths
    for length, sets in zip(distinct.tolist(), by_length.split(sizes.tolist()), strict=True):
        if length == 0:
            continue
        place = torch.arange(length, device=index.device)
        count = counts[sets][:, None]
        if exact:
            yield Group(sets, order[starts[sets][:, None] + place], None)
        else:
            rows = order[starts[sets][:, None] + torch.minimum(place, count - 1)]
            yield Group(sets, rows, place < count)


def _rounded_up(lengths: Tensor) -> Tensor:
    """Each length rounded up to a ladder of lengths; 0 stays 0."""
    steps = [0, 1]
    longest = int(lengths.max())
    while steps[-1] < longest:
        steps.append(max(steps[-1] + 1, int(steps[-1] * LADDER)))
    ladder = torch.tensor(steps, device=lengths.device)
    return ladder[torch.searchsorted(ladder, lengths)]
