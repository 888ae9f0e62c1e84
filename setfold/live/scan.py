"""The encodings of all sets of a store, some at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain

import pyarrow as pa
import torch

from setfold.core.encoder import StreamingSetEncoder
from setfold.files.ids import unpack
from setfold.files.tables.arrow import combined, header_of, shape_of
from setfold.files.tables.table import StateTable, read_out
from setfold.live.merging import tables_of_all
from setfold.live.names import NO_IDS, SetIds
from setfold.live.opened import OpenStore
from setfold.live.states import KEYS


@torch.no_grad()
def scan(sets: OpenStore, *, last: str | None = None, head: bool = False) -> Iterator[pa.Table]:
    """Yield all sets at one moment, sorted by set id: the id, `count` and `encoding`.

    The id is the column `set`, or `set_0`, `set_1`, ... if it has several. If the head predicts a
    target, the column `prediction` is before the encoding. A store without sets yields one empty
    table. The database keeps the view until the last table was taken.

    Args:
        sets: The store.
        last: As for `LiveSets.encode`; sets without elements in this time are left out.
        head: As for `LiveSets.encode`.

    >>> import setfold, tempfile
    >>> rows = pa.table({"user": ["bob", "ann"], "x": [1.0, 2.0]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with setfold.live.create(f"{folder}/live.db", setfold.Pool(1, "mean")) as store:
    ...         _ = store.update(rows, set="user", batch=("orders", 1))
    ...         [table["set"].to_pylist() for table in scan(store)]
    [['ann', 'bob']]
    """
    with sets.database.reading() as view:
        model, ids = sets._refresh(view)[0], SetIds.of(view) or NO_IDS
        tables = tables_of_all(view, model, sets._since(last))
        none = StateTable.of_state(pa.array([], KEYS), model.codec.shared)
        for table in chain([next(tables, none)], tables):
            yield from _encoded(model.readers[head], table, ids.kinds)


def _encoded(
    encoder: StreamingSetEncoder, table: StateTable, types: list[pa.DataType]
) -> Iterator[pa.Table]:
    """Yield the encodings of some sets."""
    for found in read_out(encoder, table):
        ids = unpack(combined(found["set"]), types)
        names = ["set"] if len(ids) == 1 else [f"set_{place}" for place in range(len(ids))]
        others = found.drop_columns("set")
        shape = shape_of(header_of(found.schema, "encodings"))
        yield with_shape(pa.table([*ids, *others.columns], [*names, *others.column_names]), shape)


def with_shape(table: pa.Table, shape: Sequence[int]) -> pa.Table:
    """Return a table whose metadata says the shape of an encoding, such as [4, 16]."""
    return table.replace_schema_metadata({"shape": json.dumps([*shape])})
