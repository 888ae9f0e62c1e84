"""Sets with labels, in memory or in a file that is mapped into memory."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from setfold.errors import FileError
from setfold.learning.processes import Processes
from setfold.learning.sources import Source
from setfold.preprocessing.columns import Columns

SHARED = "elements.part"  # for the processes of one machine; removed when all have opened it
RELEASE_BYTES = 1 << 26  # of a mapped file that are written before its pages are released


@dataclass(frozen=True)
class SetDataset:
    """Sets of elements, one after the other.

    Args:
        ids: The set ids.
        elements: `(N, width)`, float32: all elements of the first set, then those of the second.
        offsets: `(number of sets + 1,)`: where each set begins.
        targets: The label of each set: class numbers or quantities.
        order: If the data set is a choice of the sets that the offsets delimit: their numbers.
    """

    ids: Sequence[str]
    elements: np.ndarray
    offsets: np.ndarray
    targets: np.ndarray
    order: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> tuple[np.ndarray, Any]:
        place = number if self.order is None else self.order[number]
        first, last = self.offsets[place : place + 2]
        return self.elements[first:last], self.targets[number]

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of elements of each set."""
        lengths = np.diff(self.offsets)
        return lengths if self.order is None else lengths[self.order]

    def chosen(self, numbers: np.ndarray) -> SetDataset:
        """Some of the sets, in the order of `numbers`; no element is copied."""
        order = numbers if self.order is None else self.order[numbers]
        ids = [self.ids[number] for number in numbers.tolist()]
        return SetDataset(ids, self.elements, self.offsets, self.targets[numbers], order)

    def without_empty(self) -> SetDataset:
        """The data set without sets that have no element; nothing is copied."""
        kept = self.lengths > 0
        return self if kept.all() else self.chosen(np.flatnonzero(kept))

    def release(self) -> None:
        """Let the system drop the pages of a mapped file from memory."""
        if isinstance(self.elements, np.memmap):
            _release(self.elements)


def count_elements(
    source: Source,
    columns: Sequence[str] = (),
    chosen: Collection[str] = (),
    see: Callable[[dict[str, pa.Array]], None] = lambda table: None,
    every: Callable[[dict[str, pa.Array]], None] = lambda table: None,
) -> dict[str, int]:
    """Read all rows once; return the number of elements of each set, also of empty ones.

    Args:
        source: The rows.
        columns: The columns to read.
        chosen: The sets whose rows are passed to `see`.
        see: Called with the columns of these rows, batch by batch.
        every: Called with the columns of all rows.
    """
    counts: dict[str, int] = {}
    for sets, table in source.tables(columns):
        encoded = sets.dictionary_encode()
        names, indices = encoded.dictionary.to_pylist(), encoded.indices.drop_null()
        sizes = np.bincount(indices.to_numpy(zero_copy_only=False), minlength=len(names))
        for name, size in zip(names, sizes.tolist(), strict=True):
            counts[name] = counts.get(name, 0) + size
        if columns:
            every(table)
            wanted = pa.array([name in chosen for name in names], pa.bool_())
            mask = wanted.take(encoded.indices)  # null where the set id is null
            see({name: array.filter(mask) for name, array in table.items()})
    return source.empty | counts


def collect(
    source: Source,
    columns: Columns,
    ids: Sequence[str],
    counts: dict[str, int],
    targets: np.ndarray,
    *,
    folder: Path,
    memory: int,
    processes: Processes | None = None,
) -> SetDataset:
    """Read all elements of some sets, grouped by set.

    Processes of one machine share a file of elements, which the first one fills.

    Args:
        source: The rows.
        columns: How to parse them.
        ids: The sets.
        counts: The number of rows of each set.
        targets: The label of each set.
        folder: Where to keep the elements in a temporary file, if they do not fit in memory.
        memory: How many bytes of elements to keep in memory.
        processes: Those that read the same sets; None for this one.
    """
    offsets = np.concatenate([[0], np.cumsum([counts[name] for name in ids])]).astype(np.int64)
    shape = (int(offsets[-1]), columns.width)
    if processes is not None and processes.on_one_machine and shape[0]:
        return _collect_once(source, columns, offsets, (ids, targets), folder / SHARED, processes)
    if 4 * shape[0] * shape[1] <= memory:
        elements = np.empty(shape, np.float32)
    else:
        elements = _temporary(folder, shape)
    data = SetDataset(ids, elements, offsets, targets)
    return _without_gaps(data, _fill(source, columns, data))


def _collect_once(
    source: Source,
    columns: Columns,
    offsets: np.ndarray,
    named: tuple[Sequence[str], np.ndarray],
    path: Path,
    processes: Processes,
) -> SetDataset:
    """Read all elements in the first process, into a file that the others open."""
    (ids, targets), shape = named, (int(offsets[-1]), columns.width)
    data = None
    if processes.first:
        data = SetDataset(ids, _mapped(path, "w+", shape), offsets, targets)
        data = _without_gaps(data, _fill(source, columns, data))
    processes.from_first()  # the file is complete
    elements = _mapped(path, "c", shape) if data is None else data.elements
    processes.from_first()  # all have opened it
    if processes.first:
        path.unlink()
    lengths = torch.from_numpy(np.diff(offsets) if data is None else data.lengths.copy())
    processes.share([lengths])  # without rows that were skipped
    source.skipped = processes.from_first(source.skipped)
    offsets = np.concatenate([[0], np.cumsum(lengths.numpy())]).astype(np.int64)
    return SetDataset(ids, elements[: offsets[-1]], offsets, targets)


def _fill(source: Source, columns: Columns, data: SetDataset) -> np.ndarray:
    """Write all elements to their places; return where the elements of each set end."""
    places = {name: place for place, name in enumerate(data.ids)}
    elements, filled, written = data.elements, data.offsets[:-1].copy(), 0
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
    return filled


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
    return SetDataset(data.ids, elements, offsets, data.targets)


def _temporary(folder: Path, shape: tuple[int, int]) -> np.ndarray:
    """An array in a file without a name, which the system removes when nobody uses it."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _allocate(file.fileno(), shape)
            return np.memmap(file, np.float32, "w+", shape=shape)
    except OSError as error:
        raise FileError(f"cannot write to {folder}: {error}. Free some space.") from error


def _allocate(file: int, shape: tuple[int, int]) -> None:
    """Take the space on disk now: if there is none later, writing to a map ends the process."""
    size = 4 * math.prod(shape)
    if size and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)


def _mapped(path: Path, mode: Literal["w+", "c"], shape: tuple[int, int]) -> np.ndarray:
    try:
        if mode == "w+":
            with path.open("wb") as file:
                _allocate(file.fileno(), shape)
        return np.memmap(path, np.float32, "r+" if mode == "w+" else mode, shape=shape)
    except OSError as error:
        raise FileError(f"cannot open {path}: {error}. Free some space.") from error


def _release(elements: np.memmap) -> None:
    base: Any = elements
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.base
    if base is not None and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)
