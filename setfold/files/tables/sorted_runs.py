"""Sorted runs: files of states sorted by set id, and a k-way merge of such files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from setfold.files.tables.arrow import combined
from setfold.files.tables.frames import START_OVER, append_frame, read_frames
from setfold.files.tables.stream import reading
from setfold.files.tables.table import StateTable

# Copies of a window that `merge_sorted_runs` needs in memory: as read, concatenated, sorted, the
# next window, and one in reserve.
COPIES = 5


def write_sorted_run(path: Path, tables: Iterable[StateTable], rows: int) -> None:
    """Write tables to a file.

    Args:
        path: The file. It is overwritten.
        tables: Together they must be sorted by set id.
        rows: How many sets to read at a time later.
    """
    path.unlink(missing_ok=True)
    for table in tables:
        arrow = table.to_arrow()
        for start in range(0, len(arrow), rows):
            append_frame(path, arrow.slice(start, rows))
    append_frame(path, None)


def read_sorted_run(path: Path) -> Iterator[pa.Table]:
    """Yield what `write_sorted_run` has written, some sets at a time.

    Raises:
        FileError: The file is missing or corrupt.
    """
    for window in read_frames(path):
        StateTable.from_arrow(window.slice(0, 0))  # checks the columns
        yield window


def merge_sorted_runs(runs: Sequence[Iterator[pa.Table]]) -> Iterator[StateTable]:
    """Yield the sets of all runs, sorted by set id.

    Each step yields all sets up to the first id at which the next window of some run must be read.

    Args:
        runs: Sorted runs. No set may be in two of them.
    """
    heads = [(window, run) for run in runs if (window := next(run, None)) is not None]
    while heads:
        with reading("a sorted run", START_OVER):
            ends = pa.concat_arrays([combined(w["set"].slice(len(w) - 1)) for w, _ in heads])
            last = ends[pc.array_sort_indices(ends)[0].as_py()]
            ready, remaining = [], []
            for window, run in heads:
                cut = pc.sum(pc.less_equal(window["set"], last)).as_py()
                ready.append(window.slice(0, cut))
                rest = window.slice(cut) if cut < len(window) else next(run, None)
                if rest is not None:
                    remaining.append((rest, run))
            heads, table = remaining, pa.concat_tables(ready)
        yield StateTable.from_arrow(table).sorted()
