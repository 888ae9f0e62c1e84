"""From rows with buckets to the states of their sets, for every model of a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from setfold.files.engines.frames import FrameTask
from setfold.files.ids import pack
from setfold.files.partials import check_finite
from setfold.files.tables.absorb import find_marks, mark_overflows
from setfold.files.tables.store import Store
from setfold.files.tables.table import StateTable
from setfold.live.batches import BUCKET, Layout
from setfold.live.database import Deletion, Transaction
from setfold.live.models import LiveModel
from setfold.live.times import bucket_of
from setfold.preprocessing.columns import columns_of

STORE_BYTES = 1 << 28  # states in memory, for each model; more are spilled to a temporary folder
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
    with_bucket = schema.append(pa.field(BUCKET, pa.int64()))
    names: dict[str, None] = dict.fromkeys(layout.columns.set_names)
    for model in models:
        names |= dict.fromkeys(task_of(model, layout).needed(with_bucket))
    if layout.time is not None:
        names |= {layout.time: None}
    return [name for name in names if name != BUCKET]


def task_of(model: LiveModel, layout: Layout) -> FrameTask:
    """Return how rows with their buckets become states of a model."""
    return model.task(layout.keyed(parsed=columns_of(model.encoder) is not None))


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
def absorbing(models: Sequence[LiveModel], rows: int | None = None) -> Iterator[Absorber]:
    """Return a context in which rows are absorbed, with a temporary folder for large batches.

    Args:
        models: The models.
        rows: How many rows will be absorbed, if that is known: a few need no folder.
    """
    largest = max(model.encoder.state_nbytes for model in models)
    if rows is not None and 8 * rows * largest <= STORE_BYTES:
        yield Absorber(models, Path(NOWHERE))
        return
    with TemporaryDirectory(prefix="setfold-", ignore_cleanup_errors=True) as folder:
        yield Absorber(models, Path(folder))


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
    def add(self, rows: pa.RecordBatch, layout: Layout, first: int = 0) -> None:
        """Absorb rows with their buckets.

        Raises:
            InputError: A row is bad.
        """
        schema = rows.schema
        for model, store in zip(self.models, self.stores, strict=True):
            task = task_of(model, layout)
            needed = rows.select(list(task.needed(schema)))
            for table in task.batch_step(needed, first).tables:
                store.add(table)

    def drain(self, model: LiveModel) -> Iterable[StateTable]:
        """Yield the states of all sets and buckets, for a model, as sorted tables.

        Raises:
            NonFiniteError: The elements of a set overflow together.
        """
        for table in self.stores[self.models.index(model)].drain():
            yield check_states(table)


def check_states(table: StateTable) -> StateTable:
    """Return a table, or raise NonFiniteError if a state is not finite."""
    table = mark_overflows(table)
    check_finite(table.sets, ~find_marks(table), "state")
    return table
