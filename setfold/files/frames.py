"""Encode the sets of a data frame, without a file."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

from setfold.core.arguments import checked
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.passes import MultiPassSetEncoder
from setfold.errors import FileError, InputError
from setfold.files.columns import ColumnSpec, stored_type
from setfold.files.engines.frames import frame_task
from setfold.files.ids import unpack
from setfold.files.kinds import Frame, open_frame
from setfold.files.partials import check_finite
from setfold.files.passes import find_places, take_readouts
from setfold.files.request import (
    cast_encoder,
    check_result_names,
    make_columns,
    prepare_encoder,
    read_by,
)
from setfold.files.tables.absorb import find_finite, find_marks
from setfold.files.tables.arrow import combined, header_of, shape_of
from setfold.files.tables.stage import Stage
from setfold.files.tables.store import Store
from setfold.files.tables.table import StateTable, read_out

STORE_BYTES = 1 << 30  # states in memory; more are spilled to a temporary folder
SEEN = ["set", "count"]  # the same in all passes
ROW = "row"  # column of the result, where each row is a set


@checked
def encode_frame(
    model: nn.Module,
    frame: object,
    *,
    set: str | Sequence[str] | None = None,
    features: str | Sequence[str] | None = None,
    explode: bool = False,
    dtype: str | None = None,
    head: bool = False,
) -> Any:
    """Encode the sets of a data frame, and return a frame of the same kind with one row per set.

    The rows are read batch by batch, so that a reader or a DuckDB relation may be larger than
    memory.

    Args:
        model: A set encoder that folds. It is switched to evaluation mode. If it needs several
            passes, the frame is read several times, and must not be a reader.
        frame: A pandas or polars DataFrame, a DuckDB relation, an Arrow table, record batch or
            reader, or another object with the Arrow PyCapsule interface (`__arrow_c_stream__`).
            The index of a pandas DataFrame is ignored.
        set: The column that holds the set id of each row, or several: "run,event" or a list.
        features: The columns to encode, as for `encode_sets`. Defaults to all numeric columns
            except the set column.
        explode: Whether each row holds many elements, stored as lists. If `set` is None, each row
            is one set.
        dtype: Compute in "float32" or "float64". If None, in the dtype of the model.
        head: Whether to apply the head of the model, as for `encode_sets`.

    Returns:
        One row per set, sorted by set id: the set id under the name of its column (the number of
        the row as `row`, if `set` is None), `count`, `prediction` if the head predicts a target,
        and `encoding`. Encodings are fixed-size lists; in pandas they are arrays of the shape that
        the model returns. A pyarrow.Table for objects of other libraries.

    Raises:
        InputError: A column is missing, or a row is bad; the message names the row and the column.

    >>> import pandas, setfold
    >>> frame = pandas.DataFrame({"user": ["b", "a", "b"], "x": [1.0, 2.0, 3.0]})
    >>> setfold.encode_frame(setfold.Pool(1, "mean"), frame, set="user")
      user  count encoding
    0    a      1    [2.0]
    1    b      2    [2.0]
    """
    if set is None and not explode:
        raise InputError(
            "encode_frame needs the column with the set id of each row. Pass its name as set, or "
            "explode=True if each row is a set."
        )
    columns = make_columns(set, features, explode, None)
    check_result_names(columns.set_names)
    if not isinstance(model, MultiPassSetEncoder):
        encoder = read_by(cast_encoder(prepare_encoder(model), dtype), head)
        return _in_kind(*_fold_frame(encoder, frame, columns))
    several = read_by(cast_encoder(model.eval(), dtype), head)
    found: list[pa.Table] = []
    for number in range(several.passes):
        stage = Stage(several, number, partial(_look_up, found))
        opened, table, read = _fold_frame(stage, frame, columns)
        if found and not table.select(SEEN).equals(found[0].select(SEEN)):
            raise _changed_error()
        found.append(table)
    return _in_kind(opened, found[-1], read)


def _fold_frame(
    encoder: StreamingSetEncoder, frame: object, columns: ColumnSpec
) -> tuple[Frame, pa.Table, ColumnSpec]:
    """Read all rows; return the frame, the encodings sorted by set id, and the columns."""
    task = frame_task(encoder, columns)
    opened = open_frame(frame, task.batch_rows, "encode_frame: frame")
    with torch.no_grad(), tempfile.TemporaryDirectory(prefix="setfold-") as folder:
        store = Store(encoder, Path(folder), STORE_BYTES)
        for step in task.frame_steps(opened):
            for table in step.tables:
                store.add(table)
        parts = [_read_out(encoder, table) for table in store.drain()]
    if not parts:
        named = columns.set is not None
        kind = stored_type(task.columns.set_type(opened.schema, {})) if named else pa.int64()
        empty = StateTable.of_state(pa.array([], kind), encoder.initial_state(0).to("cpu"))
        parts = [_read_out(encoder, empty)]
    found = pa.concat_tables(parts)
    return opened, found.take(pc.sort_indices(found["set"])), task.columns


def _look_up(found: Sequence[pa.Table], names: pa.Array) -> tuple[torch.Tensor, ...]:
    """Return what earlier passes found about some sets."""
    if not found:
        return ()
    try:
        places = find_places(names, combined(found[0]["set"]))
    except FileError as error:
        raise _changed_error() from error
    return tuple(take_readouts(table, places) for table in found)


def _changed_error() -> InputError:
    return InputError(
        "the model reads the frame several times, and the frame gave other rows than before, as a "
        "reader does that can be read once. Pass a table."
    )


def _read_out(encoder: StreamingSetEncoder, table: StateTable) -> pa.Table:
    """Return the encodings of a table of states.

    Raises:
        NonFiniteError: A state or an encoding is not finite.
    """
    check_finite(table.sets, ~find_marks(table), "state")
    found = pa.concat_tables(read_out(encoder, table))
    check_finite(found["set"], find_finite(found), "encoding")
    return found


def _in_kind(frame: Frame, found: pa.Table, columns: ColumnSpec) -> Any:
    """Return encodings as an object of the frame's library."""
    shape = shape_of(header_of(found.schema, "encodings"))
    names, ids = columns.set_names or (ROW,), [found["set"]]
    if len(names) > 1:
        types = [columns.column_type(name, frame.schema) for name in names]
        ids = unpack(combined(found["set"]), types)
    others = found.drop_columns("set").replace_schema_metadata(None)
    result = pa.table([*ids, *others.columns], [*names, *others.column_names])
    return frame.convert(result, columns.set_names, shape)
