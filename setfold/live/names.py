"""Set ids as they are in a database: bytes, whose order is that of the ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from setfold.errors import InputError
from setfold.files.ids import TEXT, TYPES, pack, show, unpack
from setfold.files.outputs import split_ids
from setfold.live.batches import Layout
from setfold.live.database import Transaction

Names: TypeAlias = Sequence[Any] | pa.Array | pa.ChunkedArray


class SetIds(NamedTuple):
    """What the set ids of a store are.

    Attributes:
        names: The columns of an id, as they were named by the first batch.
        types: Their types.
    """

    names: tuple[str, ...]
    types: tuple[str, ...]

    @classmethod
    def of(cls, view: Transaction) -> SetIds | None:
        """Return those of a store; None if nothing was ever added."""
        settings = view.settings()
        if "ids" not in settings:
            return None
        return cls(tuple(json.loads(settings["names"])), tuple(json.loads(settings["ids"])))

    @classmethod
    def in_rows(cls, layout: Layout, schema: pa.Schema) -> SetIds:
        """Return those of some rows."""
        columns = layout.columns
        types = (str(columns.column_type(name, schema)) for name in columns.set_names)
        return cls(columns.set_names, tuple(types))

    @property
    def kinds(self) -> list[pa.DataType]:
        """The types as those of Arrow."""
        return [TYPES[kind] for kind in self.types]

    def check(self, transaction: Transaction) -> None:
        """Raise InputError unless the ids of a store are such ids. The first ones are noted."""
        types = transaction.set_once("ids", json.dumps(self.types))
        names = transaction.set_once("names", json.dumps(self.names))
        stored = SetIds(tuple(json.loads(names)), tuple(json.loads(types)))
        if stored.types != self.types:
            raise InputError(
                f"the set ids of this store are {', '.join(stored.types)}; got "
                f"{', '.join(self.types)}. Convert the column of the set id."
            )
        if stored.names != self.names and sorted(stored.names) == sorted(self.names):
            raise InputError(
                f"the set ids of this store are {','.join(stored.names)}, in this order; got "
                f"{','.join(self.names)}."
            )

    def show(self, name: bytes) -> str:
        """Return an id as text, for messages."""
        if len(self.names) > 1:
            return show(name, self.names, self.kinds)
        return str(unpack(pa.array([name], pa.large_binary()), self.kinds)[0][0])

    def columns_of(self, names: pa.Array) -> pa.Array:
        """Return ids as a column of a state file: values, or bytes if an id has several columns."""
        return names if len(self.names) > 1 else unpack(names, self.kinds)[0]

    def put_into(self, table: pa.Table) -> pa.Table:
        """Return encodings with the columns of ids in place of the bytes."""
        if len(self.names) > 1:
            return split_ids(table, list(zip(self.names, self.kinds, strict=True)))
        (values,) = unpack(table["set"].combine_chunks(), self.kinds)
        return table.set_column(0, "set", values)


NO_IDS = SetIds(("set",), (str(TEXT),))  # of a store to which nothing was ever added


def pack_names(names: Names, types: Sequence[pa.DataType]) -> list[bytes]:
    """Return set ids as bytes.

    Raises:
        InputError: They do not have these types.

    >>> pack_names(["ann"], [pa.large_string()]) == pack_names([("ann",)], [pa.large_string()])
    True
    """
    if isinstance(names, str | bytes):
        raise InputError(f"expected a list of set ids; got {names!r:.60}. Put it in a list.")
    several = [name if isinstance(name, tuple) else (name,) for name in _values(names)]
    wrong = next((name for name in several if len(name) != len(types)), None)
    if wrong is not None:
        has, advice = f"{len(types)} columns", "tuples"
        if len(types) == 1:
            has, advice = "one column", "single values, no tuples"
        raise InputError(f"a set id of this store has {has}; got {wrong!r:.60}. Pass {advice}.")
    if not several:
        return []
    try:
        columns = [
            _typed(values, kind)
            for values, kind in zip(zip(*several, strict=True), types, strict=True)
        ]
        if any(column.null_count for column in columns):
            raise ValueError("an id is missing")
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InputError(
            f"set ids of this store are {', '.join(map(str, types))}; got {several[0]!r:.60} "
            f"({error})."
        ) from error
    return pack(columns).to_pylist()


def _typed(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return values of a type, or of one that can be cast to it."""
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError):
        return pa.array(values).cast(kind)


def _values(names: Names) -> list[Any]:
    return names.to_pylist() if isinstance(names, pa.Array | pa.ChunkedArray) else list(names)
