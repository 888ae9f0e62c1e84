"""Sets with labels, in memory or in a file that is mapped into memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setfold.errors import FileError
from setfold.learning.sources import Source
from setfold.preprocessing.columns import Columns

RELEASE_BYTES = 1 << 26  # of a mapped file that are written before its pages are released


@dataclass(frozen=True)
class SetDataset:
    """Sets of elements, one after the other.

    Args:
        ids: The set ids.
        elements: `(N, width)`, float32: all elements of the first set, then those of the second.
        offsets: `(number of sets + 1,)`: where each set begins.
        targets: The label of each set: class numbers or quantities.
        groups: The group of each set, or None.
    """

    ids: Sequence[str]
    elements: np.ndarray
    offsets: np.ndarray
    targets: np.ndarray
    groups: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """The number of elements of each set."""
        return np.diff(self.offsets)

    def rows(self, number: int, start: int = 0, stop: int | None = None) -> Tensor:
        """The elements of a set, or some of them, (n, width), copied."""
        first, last = self.offsets[number : number + 2]
        end = last if stop is None else min(last, first + stop)
        return torch.from_numpy(np.array(self.elements[first + start : end]))

    def ragged(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The elements of some sets, (N, width), and the set of each, (N,)."""
        lengths = torch.from_numpy(self.lengths[list(numbers)])
        rows = [self.rows(number) for number in numbers]
        index = torch.arange(len(rows)).repeat_interleave(lengths)
        return torch.cat(rows), index

    def release(self) -> None:
        """Let the system drop the pages of a mapped file from memory."""
        if isinstance(self.elements, np.memmap):
            _release(self.elements)


def of_arrays(
    sets: Sequence[np.ndarray], targets: np.ndarray, columns: Columns | None = None
) -> SetDataset:
    """A data set of arrays (n_i, d).

    Args:
        sets: The elements of each set.
        targets: The label of each set.
        columns: Columns of numbers that scale the elements, or None.
    """
    lengths = [len(one) for one in sets]
    elements = np.concatenate(sets) if sets else np.empty((0, 0))
    elements = np.ascontiguousarray(elements, np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return SetDataset([str(i) for i in range(len(sets))], elements, offsets, np.asarray(targets))


def count_elements(
    source: Source, columns: Sequence[str], see: Callable[[dict[str, Any]], None]
) -> dict[str, int]:
    """Read some columns of all rows once; return the number of rows of each set.

    Args:
        source: The rows.
        columns: The columns to read.
        see: Called with each batch of columns.
    """
    counts: dict[str, int] = {}
    for sets, table in source.tables(columns):
        see(table)
        for entry in sets.value_counts():
            name = entry["values"].as_py()
            if name is not None:
                counts[name] = counts.get(name, 0) + entry["counts"].as_py()
    return counts


def collect(
    source: Source,
    columns: Columns,
    ids: Sequence[str],
    counts: dict[str, int],
    targets: np.ndarray,
    groups: Sequence[str] | None,
    *,
    path: Path,
    memory: int,
    seen: Callable[[int], None] = lambda rows: None,
) -> SetDataset:
    """Read all elements of some sets, grouped by set.

    Args:
        source: The rows.
        columns: How to parse them.
        ids: The sets.
        counts: The number of rows of each set.
        targets: The label of each set.
        groups: The group of each set, or None.
        path: A file for the elements, if they do not fit in memory.
        memory: How many bytes of elements to keep in memory.
        seen: Called with the number of rows of each batch.
    """
    places = {name: place for place, name in enumerate(ids)}
    offsets = np.concatenate([[0], np.cumsum([counts[name] for name in ids])]).astype(np.int64)
    shape = (int(offsets[-1]), columns.width)
    elements: np.ndarray
    if 4 * shape[0] * shape[1] <= memory:
        elements = np.empty(shape, np.float32)
    else:
        elements = _mapped(path, shape)
    filled, written = offsets[:-1].copy(), 0
    for batch in source.elements(columns):
        encoded = batch.sets.dictionary_encode()
        known = np.array([places.get(n, -1) for n in encoded.dictionary.to_pylist()], np.int64)
        numbers = known[encoded.indices.to_numpy(zero_copy_only=False)]
        order = np.argsort(numbers, kind="stable")
        order = order[np.searchsorted(numbers[order], 0) :]  # without sets that have no label
        chosen = numbers[order]
        sets, first, sizes = np.unique(chosen, return_index=True, return_counts=True)
        within = np.arange(len(chosen)) - np.repeat(first, sizes)
        elements[np.repeat(filled[sets], sizes) + within] = batch.values[order]
        filled[sets] += sizes
        written += batch.values.nbytes
        if isinstance(elements, np.memmap) and written > RELEASE_BYTES:
            elements.flush()
            _release(elements)
            written = 0
        seen(batch.rows)
    return _without_gaps(SetDataset(ids, elements, offsets, targets, groups), filled)


def _without_gaps(data: SetDataset, filled: np.ndarray) -> SetDataset:
    """The data set without the room of rows that were skipped."""
    lengths = filled - data.offsets[:-1]
    if (lengths == data.lengths).all():
        return data
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    for number, (start, end) in enumerate(pairwise(offsets)):
        source = data.offsets[number]
        data.elements[start:end] = data.elements[source : source + end - start]
    elements = data.elements[: offsets[-1]]
    return SetDataset(data.ids, elements, offsets, data.targets, data.groups)


def _mapped(path: Path, shape: tuple[int, int]) -> np.ndarray:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return np.memmap(path, np.float32, "w+", shape=shape)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error}. Free some space on the disk.") from error


def _release(elements: np.memmap) -> None:
    base: Any = elements
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.base
    if base is not None and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
