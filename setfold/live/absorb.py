"""From rows with buckets to the states of their sets, for every model of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from setfold.errors import InputError
from setfold.files.columns import ColumnSpec, check_present, parsed_by
from setfold.files.engines.frames import FrameTask
from setfold.files.ids import pack
from setfold.files.partials import check_finite
from setfold.files.tables.absorb import find_marks, mark_overflows
from setfold.files.tables.store import Store
from setfold.files.tables.table import RowTable, StateTable
from setfold.live.batches import BUCKET, Layout, RowReader
from setfold.live.database import Deletion, Transaction
from setfold.live.models import LiveModel
from setfold.live.times import bucket_of
from setfold.preprocessing.columns import columns_of

STORE_BYTES = 1 << 28  # states in memory, for each model; more are spilled to a temporary folder
FEW_ROWS = 1024  # that are absorbed without a temporary folder, if they are not very wide
NOWHERE = "/dev/null/setfold"  # a folder that cannot be made, for states that are never spilled


class Admitted(NamedTuple):
    """Rows that count, and how many do not."""

    rows: pa.RecordBatch
    late: int = 0
    deleted: int = 0


def needed_columns(models: Sequence[LiveModel], layout: Layout, schema: pa.Schema) -> list[str]:
    """Return the columns of some rows that must be read, by any model.

    Raises:
        InputError: A column is missing or has the wrong type.
    """
    parsers = [columns_of(model.encoder) for model in models]
    if all(parser is not None for parser in parsers):
        parsed_by(parsers[0], layout.columns)  # nobody needs features
    for name in (*layout.columns.set_names, *([] if layout.time is None else [layout.time])):
        check_present(name, schema.names, "the frame")
    if BUCKET in schema.names:
        raise InputError(f"a store uses the name {BUCKET!r} itself. Rename this column.")
    with_bucket = schema.append(pa.field(BUCKET, pa.int64()))
    names: dict[str, None] = dict.fromkeys(layout.columns.set_names)
    for model in models:
        names |= dict.fromkeys(needed_by(model, layout, with_bucket))
    if layout.time is not None:
        names |= {layout.time: None}
    return [name for name in names if name != BUCKET]


def needed_by(model: LiveModel, layout: Layout, schema: pa.Schema) -> list[str]:
    """Return the columns of rows with their buckets that a model needs.

    Raises:
        InputError: A column is missing or has the wrong type.
    """
    # pandas notes the number of rows in the metadata, but columns are the same in every batch.
    return model.needed(_columns_for(model, layout), schema.remove_metadata())


def task_of(model: LiveModel, layout: Layout) -> FrameTask:
    """Return how rows with their buckets become states of a model."""
    return model.task(_columns_for(model, layout))


def _columns_for(model: LiveModel, layout: Layout) -> ColumnSpec:
    return layout.keyed(parsed=columns_of(model.encoder) is not None)


def names_of(rows: pa.RecordBatch, layout: Layout) -> pa.Array:
    """Return the name of each row's set, as bytes."""
    columns = layout.columns
    kinds = [(name, columns.column_type(name, rows.schema)) for name in columns.set_names]
    return pack([_plain(rows[name]).cast(kind) for name, kind in kinds])


def _plain(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def admit(
    rows: pa.RecordBatch,
    layout: Layout,
    view: Transaction,
    horizon: int | None,
    sequence: int | None = None,
) -> Admitted:
    """Drop rows that came too late, and rows of sets that were deleted after them.

    Args:
        rows: Rows with their buckets.
        layout: How they are read.
        view: A view of the store.
        horizon: The first bucket that has not expired; None if none has.
        sequence: The sequence number of their batch, if it is known from before; None if it is new.
    """
    keep, late = judge(rows, layout, view, horizon, sequence)
    if keep.all():
        return Admitted(rows)
    left, dropped = rows.filter(pa.array(keep)), int(late.sum())
    return Admitted(left, dropped, rows.num_rows - left.num_rows - dropped)


def judge(
    rows: pa.RecordBatch,
    layout: Layout,
    view: Transaction,
    horizon: int | None,
    sequence: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows count, and which came too late, (N,) each. The arguments are `admit`'s."""
    keep = np.ones(rows.num_rows, bool)
    if horizon is not None:
        keep &= rows[BUCKET].to_numpy() >= horizon
    late = ~keep
    deletions: dict[bytes, Deletion] = {}
    if view.run("SELECT 1 FROM deletions LIMIT 1"):
        names = names_of(rows, layout)
        deletions = view.deletions(names.unique().to_pylist())
    for name, deletion in deletions.items():
        of_set = pc.equal(names, pa.scalar(name, names.type)).to_numpy(zero_copy_only=False)
        if sequence is not None and sequence < deletion.sequence:
            keep &= ~of_set
        elif layout.bucket is not None:  # rows of the bucket of the deletion may be new
            before = rows[BUCKET].to_numpy() < bucket_of(deletion.at, layout.bucket)
            keep &= ~(of_set & before)
    return keep, late


@contextmanager
def absorbing(
    models: Sequence[LiveModel], rows: Sequence[pa.RecordBatch] | None = None
) -> Iterator[Absorber]:
    """Return a context in which rows are absorbed, with a temporary folder for large batches.

    Args:
        models: The models.
        rows: The rows that will be absorbed, if they are known: a few need no folder.
    """
    if rows is not None and _are_few(rows, models):
        yield Absorber(models, Path(NOWHERE))
        return
    with TemporaryDirectory(prefix="setfold-", ignore_cleanup_errors=True) as folder:
        yield Absorber(models, Path(folder))


def _are_few(rows: Sequence[pa.RecordBatch], models: Sequence[LiveModel]) -> bool:
    """Whether the states of rows are certain to fit in memory."""
    number, nbytes = sum(part.num_rows for part in rows), sum(part.nbytes for part in rows)
    states = number * max((model.state_nbytes for model in models), default=0)
    return number <= FEW_ROWS and 8 * states <= STORE_BYTES and 16 * nbytes <= STORE_BYTES


class Absorber:
    """The states of rows, for every model.

    Args:
        models: The models.
        folder: A folder for states that do not fit in memory.
    """

    def __init__(self, models: Sequence[LiveModel], folder: Path) -> None:
        self.models = models
        self.stores = [
            Store(model.encoder, folder / str(model.number), STORE_BYTES) for model in models
        ]

    @torch.no_grad()
    def add(self, rows: pa.RecordBatch, layout: Layout, first: int = 0) -> pa.RecordBatch:
        """Absorb rows with their buckets, and return those that count.

        If bad rows are skipped, a row that one model cannot absorb counts for none of them.

        Raises:
            InputError: A row is bad, or the elements of a set are too large together.
        """
        try:
            tables = self._tables(rows, layout, first)
        except InputError:
            if not layout.skip:
                raise
            rows = self._without_bad(rows, layout)
            tables = self._tables(rows, layout, first)
        for store, own in zip(self.stores, tables, strict=True):
            for table in own:
                store.add(table)
        return rows

    def _tables(
        self, rows: pa.RecordBatch, layout: Layout, first: int
    ) -> list[tuple[StateTable | RowTable, ...]]:
        """Return the states of some rows, for each model."""
        if not rows.num_rows:
            return [() for _ in self.models]
        found = []
        for model in self.models:
            needed = rows.select(needed_by(model, layout, rows.schema))
            found.append(task_of(model, layout).batch_step(needed, first).tables)
        return found

    def _without_bad(self, rows: pa.RecordBatch, layout: Layout) -> pa.RecordBatch:
        """Return the rows that all models can absorb."""
        good = np.ones(rows.num_rows, bool)
        for model in self.models:
            task = replace(task_of(model, layout), skip=True)
            needed = rows.select(needed_by(model, layout, rows.schema))
            for bad in task.batch_step(needed, 0).skipped:
                good[bad.row] = False
        return rows.filter(pa.array(good))

    def drain(self, model: LiveModel) -> Iterable[StateTable]:
        """Yield the states of all sets and buckets, for a model, as sorted tables.

        Raises:
            NonFiniteError: The elements of a set overflow together.
        """
        for table in self.stores[self.models.index(model)].drain():
            yield check_states(table)


class Totals(NamedTuple):
    """How many rows count, and how many do not."""

    rows: int = 0
    late: int = 0
    deleted: int = 0
    skipped: int = 0


def absorb_pieces(
    absorber: Absorber,
    reader: RowReader,
    pieces: Iterable[tuple[pa.RecordBatch, int]],
    reading: Callable[[], AbstractContextManager[Transaction]],
    sequence: int | None = None,
) -> Totals:
    """Absorb rows, some at a time, and return how many count.

    Args:
        absorber: What absorbs them.
        reader: What has read them.
        pieces: The rows, and the number of the first of each piece.
        reading: Returns a context with a view of the store.
        sequence: As for `admit`.
    """
    totals = Totals()
    for rows, first in pieces:
        with reading() as view:
            found = admit(rows, reader.layout, view, horizon_of(view), sequence)
        left = absorber.add(found.rows, reader.layout, first)
        bad = found.rows.num_rows - left.num_rows
        new = (left.num_rows, found.late, found.deleted, bad)
        totals = Totals(*map(sum, zip(totals, new, strict=True)))
    return totals._replace(skipped=totals.skipped + reader.skipped)


def horizon_of(view: Transaction) -> int | None:
    """Return the first bucket that has not expired; None if none has."""
    found = view.settings().get("horizon")
    return None if found is None else int(found)


def check_states(table: StateTable) -> StateTable:
    """Return a table, or raise NonFiniteError if a state is not finite."""
    table = mark_overflows(table)
    check_finite(table.sets, ~find_marks(table), "state")
    return table
