"""The middle, for whatever runs it: Arrow in, Arrow out.

    partial_states   a batch of rows -> what it adds to its sets
    merge_partials   such tables, from anywhere and in any number -> one
    read_partials    -> set, count, encoding

What all sets share (slots, the digest of the weights) is metadata of a table's schema. Engines that drop it, and that
know no lists of fixed length, as Spark, carry the states as bytes:

    pack_partials    such a table -> set, state
    unpack_partials  and back
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import torch

from setfold.core.encoder import StreamingSetEncoder
from setfold.core.state import SetState
from setfold.errors import InputError, StateMismatchError
from setfold.files.columns import Columns, features_of
from setfold.files.rows import rows_of
from setfold.files.tables.table import (
    FRAME,
    HEADER,
    StateTable,
    combined,
    element_dtypes,
    header_of,
    merged,
    read_out,
)

MARK = hashlib.sha256().digest_size  # bytes before each packed state: a digest of what all share


def partial_states(
    encoder: StreamingSetEncoder,
    rows: pa.RecordBatch | pa.Table,
    *,
    set: str,
    features: str | Sequence[str] | None = None,
) -> pa.Table:
    """What rows add to their sets, as a table with a row for each set.

    Args:
        encoder: in evaluation mode.
        rows: a column that names the set, and columns of features.
        set: the name of that column.
        features: columns in the order in which the encoder takes them; all but the set's if left out.

    >>> import setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=2, num_slots=4, dim_slot=8, dim_out=8).eval()
    >>> rows = pa.table({"event": [7, 8, 7], "x": [0.1, 0.2, 0.3], "y": [1.0, 2.0, 3.0]})
    >>> halves = [partial_states(encoder, part, set="event") for part in (rows[:2], rows[2:])]
    >>> read_partials(encoder, merge_partials(halves))["count"].to_pylist()
    [2, 1]
    """
    dtype, wanted = element_dtypes(encoder)
    columns = Columns(features_of(features), set)
    if isinstance(rows, pa.Table):
        rows = rows.combine_chunks()
        batches = rows.to_batches() or [pa.RecordBatch.from_pylist([], schema=rows.schema)]
        (rows,) = batches
    found = rows_of(rows, columns, first=0, dtype=dtype, width=encoder.dim_in, partition={})
    if found.bad:
        row, reason = found.bad[0]
        raise InputError(f"row {row}: {reason}. Leave such rows out first.")
    elements = torch.tensor(found.elements, dtype=wanted)
    return StateTable.of(encoder, found.sets, elements).to_arrow()


def merge_partials(tables: Iterable[pa.Table]) -> pa.Table:
    """The states of all sets of some tables; a table may name a set several times.

    Args:
        tables: from `partial_states` or from here, or put together from such.

    >>> import setfold
    >>> encoder, rows = setfold.Pool(1, "mean").eval(), pa.table({"event": [7, 8], "x": [1.0, 3.0]})
    >>> table = partial_states(encoder, rows, set="event")
    >>> merge_partials([table, table])["count"].to_pylist()
    [2, 2]
    """
    found: list[StateTable] = []
    for table in tables:
        found += StateTable.all_from_arrow(table)
    return merged(found).sorted().to_arrow()


def read_partials(encoder: StreamingSetEncoder, table: pa.Table) -> pa.Table:
    """Set, count and encoding of each set of a table from `merge_partials`.

    Args:
        encoder: that made the states, perhaps with another head.
        table: the states.

    >>> import setfold
    >>> encoder, rows = setfold.Pool(1, "mean").eval(), pa.table({"event": [7, 7], "x": [1.0, 3.0]})
    >>> read_partials(encoder, partial_states(encoder, rows, set="event")).to_pylist()
    [{'set': 7, 'count': 2, 'encoding': [2.0]}]
    """
    return pa.concat_tables(read_out(encoder, StateTable.from_arrow(table)))


def pack_partials(table: pa.Table) -> pa.Table:
    """The states of a table as bytes: set, state. The bytes know the model that made them, by a digest.

    Args:
        table: from `partial_states` or `merge_partials`.

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
    tensors = StateTable.from_arrow(table).state.tensors()
    mark = np.frombuffer(_mark(table.schema), np.uint8)
    parts = [np.broadcast_to(mark, (len(table), MARK))]
    parts += [_as_bytes(tensors[name]) for name in _packed_names(table.schema)]
    flat = np.concatenate(parts, axis=1)
    buffers = [None, pa.py_buffer(flat)]
    states = pa.Array.from_buffers(pa.binary(flat.shape[1]), len(table), buffers)
    return pa.table({"set": table["set"], "state": states.cast(pa.binary())})


@torch.no_grad()
def unpack_partials(encoder: StreamingSetEncoder, packed: pa.RecordBatch | pa.Table) -> pa.Table:
    """What `pack_partials` was given.

    Args:
        encoder: that made the states, perhaps with another head.
        packed: set, state.

    Raises:
        StateMismatchError: another model made them, or they are damaged.

    >>> import setfold
    >>> encoder, rows = setfold.Pool(1, "mean").eval(), pa.table({"event": [7, 7], "x": [1.0, 3.0]})
    >>> packed = pack_partials(partial_states(encoder, rows, set="event"))
    >>> unpack_partials(encoder, packed)["count"].to_pylist()
    [2]
    """
    if isinstance(packed, pa.RecordBatch):
        packed = pa.Table.from_batches([packed])
    begun = encoder.initial_state(0).to("cpu")
    like = StateTable(packed["set"].slice(0, 0).combine_chunks(), begun).to_arrow()
    tensors, names = begun.tensors(), _packed_names(like.schema)
    widths = [_as_bytes(tensors[name]).shape[1] for name in names]
    flat = _flat(packed["state"], MARK + sum(widths))
    if flat is None or (flat[:, :MARK] != np.frombuffer(_mark(like.schema), np.uint8)).any():
        raise StateMismatchError(
            "these packed states were made by another model, or are damaged: unpack them with the encoder that made "
            "them, in evaluation mode."
        )
    start = MARK
    for name, width in zip(names, widths, strict=True):
        part = flat[:, start : start + width].copy().view(tensors[name].numpy().dtype)
        tensors[name] = torch.from_numpy(part).reshape(len(flat), *tensors[name].shape[1:])
        start += width
    state = SetState.from_tensors(tensors, begun.aggregate, begun.fingerprint)
    return StateTable(combined(packed["set"]), state).to_arrow()


def _mark(schema: pa.Schema) -> bytes:
    """A digest of what all sets of a table share: weights, aggregates, shapes and slots."""
    return hashlib.sha256(schema.metadata[HEADER] + schema.metadata[FRAME]).digest()


def _packed_names(schema: pa.Schema) -> list[str]:
    """The tensors that have a row for each set, in the order in which they are packed."""
    return list(header_of(schema)["shapes"])


def _as_bytes(part: torch.Tensor) -> np.ndarray:
    """(N, ...) as (N, bytes)."""
    return part.unsqueeze(-1).flatten(1).contiguous().numpy().view(np.uint8)


def _flat(states: pa.ChunkedArray, width: int) -> np.ndarray | None:
    """Packed states as (N, width); None if some have another width."""
    if states.null_count:
        return None
    try:
        array = combined(states.cast(pa.binary(width)))
    except pa.ArrowInvalid:
        return None
    values = np.frombuffer(array.buffers()[1] or b"", np.uint8)
    return values[array.offset * width :][: len(array) * width].reshape(-1, width)
