"""Partial states as Arrow tables, for engines other than setfold's own.

    partial_states   a batch of rows -> a table of partial states
    merge_partials   any number of such tables -> one table
    read_partials    a table of states -> set, count, encoding

The schema's metadata holds what all sets share: the slots and the digest of the weights. Some
engines, such as Spark, drop this metadata and do not support fixed-size lists. For them the states
can be packed as bytes:

    pack_partials    a table of states -> set, state
    unpack_partials  the reverse
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch

from setfold.core.arguments import checked
from setfold.core.encoder import StreamingSetEncoder
from setfold.errors import FileError, NonFiniteError, StateMismatchError
from setfold.files.columns import ColumnSpec
from setfold.files.engines.frames import frame_task
from setfold.files.kinds import open_frame
from setfold.files.tables.absorb import find_finite, find_marks, mark_overflows, states_of
from setfold.files.tables.arrow import FRAME, HEADER, combined
from setfold.files.tables.packing import pack, unpack
from setfold.files.tables.table import RowTable, StateTable, merged, read_out

# Each packed state starts with a digest of what all sets share.
DIGEST_BYTES = hashlib.sha256().digest_size


@checked
def partial_states(
    encoder: StreamingSetEncoder,
    rows: object,
    *,
    set: str,
    features: str | Sequence[str] | None = None,
) -> pa.Table:
    """Compute the partial states of a batch of rows: a table with one row per set.

    Args:
        encoder: The encoder, in evaluation mode.
        rows: The rows, with a set column and feature columns: an Arrow table or record batch, a
            pandas or polars DataFrame, or anything else that `encode_frame` takes.
        set: The column that holds the set id of each row.
        features: The columns to encode, in the order the encoder expects. Defaults to all numeric
            columns except the set column.

    Raises:
        InputError: A row is bad, or a column is missing.

    >>> import setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=2, num_slots=4, dim_slot=8, dim_out=8).eval()
    >>> rows = pa.table({"event": [7, 8, 7], "x": [0.1, 0.2, 0.3], "y": [1.0, 2.0, 3.0]})
    >>> halves = [partial_states(encoder, part, set="event") for part in (rows[:2], rows[2:])]
    >>> read_partials(encoder, merge_partials(halves))["count"].to_pylist()
    [2, 1]
    """
    columns = replace(ColumnSpec.parse(features, None), set=set)
    task = frame_task(encoder, columns)
    frame = open_frame(rows, task.batch_rows, "partial_states: rows")
    found: list[StateTable] = []
    for step in task.frame_steps(frame):
        for table in step.tables:
            if isinstance(table, RowTable):
                found += states_of(encoder, table, str(task.device))
            else:
                found.append(table)
    if not found:
        kind = task.columns.set_type(frame.schema, {})
        found = [StateTable.of_state(pa.array([], kind), encoder.initial_state(0).to("cpu"))]
    return mark_overflows(merged(found)).to_arrow()


@checked
def merge_partials(tables: Iterable[pa.Table]) -> pa.Table:
    """Merge tables of partial states into one, sorted by set id.

    Args:
        tables: Results of `partial_states` or `merge_partials`, or concatenations of them. A table
            may contain a set several times.

    Raises:
        NonFiniteError: The states of a set overflow when they are merged.

    >>> import setfold
    >>> encoder, rows = setfold.Pool(1, "mean").eval(), pa.table({"event": [7, 8], "x": [1.0, 3.0]})
    >>> table = partial_states(encoder, rows, set="event")
    >>> merge_partials([table, table])["count"].to_pylist()
    [2, 2]
    """
    found: list[StateTable] = []
    for table in tables:
        found += StateTable.all_from_arrow(table)
    table = mark_overflows(merged(found))
    check_finite(table.sets, ~find_marks(table), "state")
    return table.sorted().to_arrow()


@checked
def read_partials(encoder: StreamingSetEncoder, table: pa.Table) -> pa.Table:
    """Compute set, count and encoding of each set in a table of states.

    Args:
        encoder: The encoder that computed the states; its head may differ.
        table: The result of `merge_partials`.

    Raises:
        NonFiniteError: The encoding of a set is not finite.

    >>> import setfold
    >>> encoder, rows = setfold.Pool(1, "mean").eval(), pa.table({"event": [7, 7], "x": [1.0, 3.0]})
    >>> read_partials(encoder, partial_states(encoder, rows, set="event")).to_pylist()
    [{'set': 7, 'count': 2, 'encoding': [2.0]}]
    """
    found = pa.concat_tables(read_out(encoder, StateTable.from_arrow(table)))
    check_finite(found["set"], find_finite(found), "encoding")
    return found


def check_finite(sets: pa.Array | pa.ChunkedArray, finite: np.ndarray, what: str) -> None:
    """Raise NonFiniteError for the first set whose state or encoding is not finite.

    Args:
        sets: Their ids, (B,).
        finite: Which are finite, (B,).
        what: "state" or "encoding".
    """
    if not finite.all():
        raise NonFiniteError(
            f"the {what} of the set {sets[int(np.argmin(finite))]} is not finite: its elements are "
            "too large together. Scale the features, or leave out the set."
        )


@checked
def pack_partials(table: pa.Table) -> pa.Table:
    """Pack the states of a table as bytes, into the columns set and state.

    Each packed state includes a digest of the model that computed it.

    Args:
        table: The result of `partial_states` or `merge_partials`.

    >>> import setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=2, num_slots=4, dim_slot=8, dim_out=8).eval()
    >>> rows = pa.table({"event": [7, 8, 7], "x": [0.1, 0.2, 0.3], "y": [1.0, 2.0, 3.0]})
    >>> table = partial_states(encoder, rows, set="event")
    >>> packed = pack_partials(table)
    >>> packed.column_names
    ['set', 'state']
    >>> unpack_partials(encoder, packed).equals(table, check_metadata=True)
    True
    """
    StateTable.from_arrow(table)  # validates it
    digest = digest_of_schema(table.schema)
    states = [digest + row for row in pack(table.columns[1:])]
    return pa.table({"set": table["set"], "state": pa.array(states, pa.binary())})


@checked
@torch.no_grad()
def unpack_partials(encoder: StreamingSetEncoder, packed: pa.RecordBatch | pa.Table) -> pa.Table:
    """Return the table that was given to `pack_partials`.

    Args:
        encoder: The encoder that computed the states; its head may differ.
        packed: The columns set and state.

    Raises:
        StateMismatchError: Another model computed the states, or they are corrupt.

    >>> import setfold
    >>> encoder, rows = setfold.Pool(1, "mean").eval(), pa.table({"event": [7, 7], "x": [1.0, 3.0]})
    >>> packed = pack_partials(partial_states(encoder, rows, set="event"))
    >>> unpack_partials(encoder, packed)["count"].to_pylist()
    [2]
    """
    if isinstance(packed, pa.RecordBatch):
        packed = pa.Table.from_batches([packed])
    sets = combined(packed["set"])
    empty = encoder.initial_state(0).to("cpu")
    schema = StateTable.of_state(sets.slice(0, 0), empty).to_arrow().schema
    digest, states = digest_of_schema(schema), packed["state"].to_pylist()
    try:
        if not all(isinstance(s, bytes) and s.startswith(digest) for s in states):
            raise ValueError("they have another digest")
        columns = unpack([state[DIGEST_BYTES:] for state in states], schema.types[1:])
        table = pa.table([sets, *columns], schema=schema)
        StateTable.from_arrow(table)  # validates it
    except (ValueError, FileError, pa.ArrowException) as error:
        raise StateMismatchError(
            "the packed states were computed by another model, or they are corrupt. Unpack them "
            "with the encoder that computed them, in evaluation mode."
        ) from error
    return table


def digest_of_schema(schema: pa.Schema) -> bytes:
    """Return a digest of what all sets of a table share: weights, aggregates, shapes and slots."""
    return hashlib.sha256(schema.metadata[HEADER] + schema.metadata[FRAME]).digest()
