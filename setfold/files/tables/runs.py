"""Runs: tables of states that are each sorted, read as one that is sorted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from setfold.files.tables.table import StateTable, combined

COPIES = 5  # that `in_order` has of what it reads at once: as read, joined, sorted, read next, and one to spare


def write_run(path: Path, tables: Iterable[StateTable], rows: int) -> None:
    """Write tables that are sorted, and follow each other, to a file.

    Args:
        path: the file.
        tables: at least one.
        rows: sets that will be read at once.
    """
    writer = None
    try:
        for table in tables:
            arrow = table.to_arrow()
            writer = writer or pa.ipc.new_file(str(path), arrow.schema)
            writer.write_table(arrow, max_chunksize=rows)
    finally:
        if writer is not None:
            writer.close()


def read_run(path: Path) -> Iterator[pa.Table]:
    """What `write_run` wrote, some sets at a time."""
    number = 0
    while True:
        # Opened each time: there may be more runs than files that may be open. Not mapped: what
        # was read should not stay in memory.
        with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
            if number == file.num_record_batches:
                return
            window = pa.Table.from_batches([file.get_batch(number)])
        yield window
        number += 1


def in_order(runs: Sequence[Iterator[pa.Table]]) -> Iterator[StateTable]:
    """The sets of all runs in the order of their names.

    Args:
        runs: each sorted; no set stands in two of them.

    In each step everything goes out up to the first name at which the next piece of some run
    must be read.
    """
    heads = [(window, run) for run in runs if (window := next(run, None)) is not None]
    while heads:
        ends = pa.concat_arrays([combined(w["set"].slice(len(w) - 1)) for w, _ in heads])
        last = ends[pc.array_sort_indices(ends)[0].as_py()]
        going, staying = [], []
        for window, run in heads:
            cut = pc.sum(pc.less_equal(window["set"], last)).as_py()
            going.append(window.slice(0, cut))
            rest = window.slice(cut) if cut < len(window) else next(run, None)
            if rest is not None:
                staying.append((rest, run))
        heads = staying
        yield StateTable.from_arrow(pa.concat_tables(going)).sorted()
