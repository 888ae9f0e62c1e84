"""Batches of ragged sets for a DataLoader: collate them, and choose them by a budget of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler, default_collate

from setfold.core.arguments import check_flags, check_sizes
from setfold.core.inputs import check_kind
from setfold.errors import InputError


class RaggedBatch(NamedTuple):
    """Several sets, as an encoder takes them.

    Attributes:
        elements: `(N, d)`, the rows of all sets.
        index: `(N,)`, the set of each row.
        batch_size: The number of sets B.
        labels: Their labels, collated; None without labels.
    """

    elements: Tensor
    index: Tensor  # type: ignore[assignment]  # a method of tuples, too
    batch_size: int
    labels: Any = None


def collate(sets: Sequence[Any]) -> RaggedBatch:
    """Collate sets of different sizes into one ragged batch, for `DataLoader(collate_fn=...)`.

    Args:
        sets: B tensors or NumPy arrays `(n_i, d)`, or pairs `(set, label)`. A set may be empty.
            Arrays of float64 become tensors of torch's default dtype. Labels are collated as by
            `torch.utils.data.default_collate`: numbers become a tensor `(B,)`.

    Raises:
        InputError: A set is not `(n_i, d)`, or the sets differ in d, dtype or device.

    >>> batch = collate([(torch.ones(2, 3), 0), (torch.zeros(0, 3), 1), (torch.ones(1, 3), 1)])
    >>> batch.elements.shape, batch.index.tolist(), batch.batch_size, batch.labels.tolist()
    (torch.Size([3, 3]), [0, 0, 2], 3, [0, 1, 1])
    """
    items = list(sets)
    if not items:
        raise InputError("collate needs at least one set; got none.")
    labelled = [isinstance(item, tuple | list) and len(item) == 2 for item in items]
    if any(labelled) and not all(labelled):
        raise InputError("collate expects sets, or pairs of a set and a label; got both.")
    elements = [_as_tensor(item[0] if labelled[0] else item, n) for n, item in enumerate(items)]
    for number, part in enumerate(elements):
        _check_alike(elements[0], part, number)
    lengths = torch.tensor([len(part) for part in elements])
    index = torch.arange(len(elements)).repeat_interleave(lengths).to(elements[0].device)
    labels = default_collate([item[1] for item in items]) if labelled[0] else None
    return RaggedBatch(torch.cat(elements), index, len(elements), labels)


def _as_tensor(given: Any, number: int) -> Tensor:
    """Return a set as a tensor (n, d)."""
    if isinstance(given, np.ndarray):
        given = torch.tensor(given)
        given = given.to(torch.get_default_dtype()) if given.dtype == torch.float64 else given
    check_kind(f"set {number}", given)
    if given.dim() != 2:
        raise InputError(
            f"expected sets (n, d), one row for each element; got {tuple(given.shape)} for set "
            f"{number}."
        )
    return given


def _check_alike(first: Tensor, other: Tensor, number: int) -> None:
    """Raise InputError unless two sets can be in one batch."""
    for what, one, two in (
        ("numbers per element", first.shape[1], other.shape[1]),
        ("dtype", first.dtype, other.dtype),
        ("device", first.device, other.device),
    ):
        if one != two:
            raise InputError(
                f"expected sets with the same {what}; got {one} for set 0 and {two} for set "
                f"{number}. Convert them."
            )


class RowBatchSampler(Sampler[list[int]]):
    """Batches of sets by a budget of rows, for `DataLoader(batch_sampler=...)`.

    Sets are taken in order, or in random order, until the next one would exceed the budget. A set
    that is larger than the budget is a batch of its own. So the memory of a step depends on the
    budget and on the largest set, not on how many sets happen to be large.

    Args:
        lengths: The number of rows of each set.
        rows: The budget, a number of rows. An empty set counts as one row.
        shuffle: Whether to draw a new order for each epoch. Call `set_epoch` before each.
        seed: The seed of the order. Processes with the same seed draw the same.

    >>> sampler = RowBatchSampler([3, 4, 2, 50, 1, 5], rows=7)
    >>> list(sampler), len(sampler)
    ([[0, 1], [2], [3], [4, 5]], 4)
    """

    def __init__(
        self, lengths: Sequence[int], *, rows: int, shuffle: bool = False, seed: int = 0
    ) -> None:
        check_sizes(rows=rows)
        check_sizes(0, seed=seed)
        check_flags(shuffle=shuffle)
        self.lengths = _as_lengths(lengths)
        self.rows, self.shuffle, self.seed, self.epoch = rows, shuffle, seed, 0
        self._ends: tuple[int, np.ndarray, list[int]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch. The same epoch has the same batches, also after a restart.

        Args:
            epoch: The number of the epoch, from 0.
        """
        check_sizes(0, epoch=epoch)
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches of the epoch. With `shuffle`, epochs may differ."""
        return len(self._order()[1]) - 1

    def __iter__(self) -> Iterator[list[int]]:
        order, ends = self._order()
        for start, stop in pairwise(ends):
            yield order[start:stop].tolist()

    def _order(self) -> tuple[np.ndarray, list[int]]:
        """Return the order of the sets, and where in it the batches begin and end."""
        if self._ends is None or self._ends[0] != self.epoch:
            order = np.arange(len(self.lengths))
            if self.shuffle:
                order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
            total = np.cumsum(np.maximum(self.lengths, 1)[order])
            ends, before = [0], 0
            while ends[-1] < len(order):
                fitting = int(np.searchsorted(total, before + self.rows, side="right"))
                ends.append(max(fitting, ends[-1] + 1))
                before = int(total[ends[-1] - 1])
            self._ends = (self.epoch, order, ends)
        return self._ends[1:]


def _as_lengths(given: Any) -> np.ndarray:
    """Return the lengths of sets as an array (B,).

    Raises:
        InputError: They are not integers of at least 0.
    """
    try:
        lengths = np.asarray(given)
    except Exception as error:  # any object may be passed
        raise InputError(f"lengths must be integers; got {type(given).__name__}.") from error
    if lengths.size == 0 and lengths.ndim == 1:
        return np.empty(0, np.int64)
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or lengths.min() < 0:
        raise InputError(
            f"lengths must be the number of rows of each set, integers of at least 0; got "
            f"{given!r:.60}."
        )
    return lengths.astype(np.int64)
