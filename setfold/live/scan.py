"""The encodings of all sets of a store, some at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pyarrow as pa
import torch

from setfold.files.ids import TYPES, unpack
from setfold.files.tables.arrow import combined, header_of, shape_of
from setfold.files.tables.table import StateTable, read_out
from setfold.live.database import StateRow
from setfold.live.models import LiveModel
from setfold.live.sets import AT_ONCE, LiveSets, table_of_sets

SCAN_BYTES = 1 << 25  # of states, in memory at once


@torch.no_grad()
def scan(sets: LiveSets, *, last: str | None = None, head: bool = False) -> Iterator[pa.Table]:
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
        model = sets._refresh(view)[0]
        stored = view.settings().get("ids")
        types = [TYPES[kind] for kind in json.loads(stored)] if stored else [pa.large_string()]
        size = max(1, min(AT_ONCE, SCAN_BYTES // model.encoder.state_nbytes))
        held: list[StateRow] = []
        for rows in view.scan(model.number, sets._since(last), size):
            if len(held) >= size:
                # Not the last set: some of its buckets may be among the rows that follow.
                end = next(place for place, row in enumerate(held) if row.name == held[-1].name)
                if end:
                    yield from _encoded(model, held[:end], types, head)
                held = held[end:]
            held += rows
        yield from _encoded(model, held, types, head)


def _encoded(
    model: LiveModel, rows: list[StateRow], types: list[pa.DataType], head: bool
) -> Iterator[pa.Table]:
    """Yield the encodings of some sets; the rows of a set are consecutive."""
    encoder = model.readers[head]
    if rows:
        table = table_of_sets(model, rows)
    else:
        state = encoder.initial_state(0).to("cpu")
        table = StateTable.of_state(pa.array([], pa.large_binary()), state)
    for found in read_out(encoder, table):
        ids = unpack(combined(found["set"]), types)
        names = ["set"] if len(ids) == 1 else [f"set_{place}" for place in range(len(ids))]
        others = found.drop_columns("set")
        shape = shape_of(header_of(found.schema, "encodings"))
        yield with_shape(pa.table([*ids, *others.columns], [*names, *others.column_names]), shape)


def with_shape(table: pa.Table, shape: Sequence[int]) -> pa.Table:
    """Return a table whose metadata says the shape of an encoding, such as [4, 16]."""
    return table.replace_schema_metadata({"shape": json.dumps([*shape])})
