"""The rows of a request: parsed, and bundled with those of others that have the same columns.

JSON says neither the order of columns nor whether 1 is an integer or a text is a time. So features
are named, in the order that the model expects, their numbers are float64, and texts are times where
times belong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

import orjson
import pyarrow as pa

from setfold.errors import InputError
from setfold.files.request import make_columns
from setfold.live.batches import Identity
from setfold.live.service.streams import read_stream
from setfold.live.together import Bundle
from setfold.preprocessing.columns import Column

KEYS = ("batch", "set", "features", "time", "rows")
INTEGER, NUMBER, TEXT, FLAG, LIST, NONE = "integer", "number", "text", "boolean", "list", "null"
KINDS = {int: INTEGER, float: NUMBER, str: TEXT, bool: FLAG, list: LIST, type(None): NONE}
TYPES = {
    INTEGER: pa.int64(),
    NUMBER: pa.float64(),
    TEXT: pa.string(),
    FLAG: pa.bool_(),
    LIST: pa.list_(pa.float64()),
    NONE: pa.null(),
}
TIME = pa.timestamp("us", "UTC")

Names = str | tuple[str, ...]
Own = Mapping[str, Column]  # the columns that a model reads by itself


@dataclass(frozen=True)
class Columns:
    """Which columns of a request are what.

    Args:
        set: The column of the set id, or several.
        features: The columns to encode; None if the model reads its own, or if there is one.
        time: The column of the time; None if the store has no buckets.
    """

    set: Names
    features: Names | None
    time: str | None


@dataclass(frozen=True)
class Update:
    """The rows of one batch.

    Args:
        batch: The identity of the batch.
        columns: Which columns are what.
        types: The columns and their types.
        values: The values of each column, if they came as JSON.
        table: The rows, if they came as an Arrow stream.
        length: The number of rows.
    """

    batch: Sequence[str | int]
    columns: Columns
    types: tuple[tuple[str, pa.DataType], ...]
    length: int
    values: tuple[list[Any], ...] = ()
    table: pa.RecordBatch | None = None

    def names(self) -> list[Any]:
        """Return the ids of the sets that it changes; lists if they have several columns."""
        own = (self.columns.set,) if isinstance(self.columns.set, str) else self.columns.set
        places = [[name for name, _ in self.types].index(name) for name in own]
        if self.table is None:
            found = [self.values[place] for place in places]
        else:
            found = [self.table.column(place).to_pylist() for place in places]
        if len(found) == 1:
            return list(dict.fromkeys(found[0]))
        return [list(name) for name in dict.fromkeys(zip(*found, strict=True))]


# ---- JSON --------------------------------------------------------------------------------------


def parse_json(body: bytes, own: Own | None) -> Update:
    """Return the update in a body of JSON.

    Args:
        body: {"batch": ["orders", 17], "set": "user", "features": ["x"], "rows": [...]}.
        own: The columns that the models read by themselves; None if one takes any features.

    Raises:
        InputError: It is something else.

    >>> body = b'{"batch": ["a", 1], "set": "user", "rows": [{"user": "ann", "x": 1}]}'
    >>> parse_json(body, None).types
    (('user', DataType(string)), ('x', DataType(double)))
    """
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InputError(f"the body is not JSON: {error}.") from error
    if not isinstance(found, dict) or not {*found} <= {*KEYS} or "rows" not in found:
        got = ", ".join(map(repr, found)) if isinstance(found, dict) else type(found).__name__
        raise InputError(f"expected an object with {', '.join(KEYS)}; got {got:.200}.")
    rows = found["rows"]
    if not isinstance(rows, list) or not rows or not all(type(row) is dict for row in rows):
        raise InputError(f"rows must be a list of objects, at least one; got {rows!r:.80}.")
    columns = _columns_of(found)
    names = _names_of(columns, own, rows)
    values = tuple([row.get(name) for row in rows] for name in names)
    types = tuple(
        (name, _type_of(name, column, columns, own or {}))
        for name, column in zip(names, values, strict=True)
    )
    return Update(_batch_of(found), columns, types, len(rows), values)


def _batch_of(found: Mapping[str, Any]) -> list[str | int]:
    batch = found.get("batch")
    Identity.of(batch)  # raises InputError
    assert isinstance(batch, list)
    return batch


def _columns_of(found: Mapping[str, Any]) -> Columns:
    set_, features, time = (found.get(name) for name in ("set", "features", "time"))
    if not isinstance(time, str | None):
        raise InputError(f"time must be the name of a column; got {time!r:.80}.")
    given = None if features is None else _checked("features", features)
    return Columns(_checked("set", set_), given, time)


def _checked(name: str, given: object) -> Names:
    if isinstance(given, str) and given:
        return given
    if isinstance(given, list) and given and all(isinstance(each, str) for each in given):
        return tuple(given)
    raise InputError(f"{name} must be the name of a column, or a list of names; got {given!r:.80}.")


def _plain(names: Names | None) -> str | list[str] | None:
    return list(names) if isinstance(names, tuple) else names


@lru_cache(maxsize=256)
def _named(columns: Columns) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns of the set id, and those of the features if they are named."""
    spec = make_columns(_plain(columns.set), _plain(columns.features), False, None)
    return spec.set_names, tuple(spec.named)


def _names_of(columns: Columns, own: Own | None, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns to read.

    Raises:
        InputError: A column is missing, or the order of the features is not known.
    """
    ids, features = _named(columns)
    apart = (*ids,) if columns.time is None else (*ids, columns.time)
    if own is not None:
        features = tuple(own)
    elif not features:
        features = tuple(name for name in rows[0] if name not in apart)
        if len(features) != 1:
            raise InputError(
                "objects of JSON have no order: pass the names of the features, in the order that "
                f"the model expects. The first row has {', '.join(map(repr, features)) or 'none'}."
            )
    names = list(dict.fromkeys([*ids, *features, *apart]))
    for name in names:
        if not any(name in row for row in rows):
            raise InputError(f"no row has the column {name!r}; they have {[*rows[0]]!r:.200}.")
    return names


def _type_of(name: str, values: Sequence[Any], columns: Columns, own: Own) -> pa.DataType:
    """Return the type of a column.

    Raises:
        InputError: It holds values of several types, or objects.
    """
    try:
        kinds = {KINDS[type(value)] for value in values}
    except KeyError as error:
        raise InputError(f"the column {name!r} holds an object; expected plain values.") from error
    if len(kinds) > 1:
        kinds -= {NONE}
    if kinds == {INTEGER, NUMBER}:
        kinds = {NUMBER}
    if len(kinds) > 1:
        raise InputError(
            f"the column {name!r} holds {' and '.join(sorted(kinds))} values; expected one type."
        )
    (kind,) = kinds
    column, is_id = own.get(name), name in _named(columns)[0]
    if kind == TEXT and not is_id and (name == columns.time or _takes_only(column, TIME)):
        return TIME
    is_feature = not is_id and name != columns.time
    if kind == INTEGER and is_feature and (column is None or column.fits(pa.float64())):
        return TYPES[NUMBER]
    return TYPES[kind]


def _takes_only(column: Column | None, kind: pa.DataType) -> bool:
    """Whether a column of the model takes a type, and no text."""
    return column is not None and column.fits(kind) and not column.fits(pa.string())


# ---- Arrow -------------------------------------------------------------------------------------


def parse_arrow(body: bytes, query: Sequence[tuple[str, str]], own: Sequence[str] | None) -> Update:
    """Return the update in a body that is an Arrow stream.

    Args:
        body: The stream.
        query: What JSON has beside the rows. A name may occur several times: the parts of the
            batch, columns of the set id, features.
        own: As for `parse_json`; the schema of a stream says as much.

    Raises:
        InputError: The stream or the query is something else.
    """
    found: dict[str, list[str]] = {}
    for name, value in query:
        found.setdefault(name, []).append(value)
    if not {*found} <= {*KEYS[:-1]} or len(found.get("time", ())) > 1:
        raise InputError(f"expected {', '.join(KEYS[:-1])} in the query; got {found!r:.200}.")
    single = {name: values[0] if len(values) == 1 else values for name, values in found.items()}
    columns = _columns_of(single)
    batch = _batch_of({"batch": found.get("batch")})
    table = read_stream(body)
    types = tuple(zip(table.schema.names, table.schema.types, strict=True))
    for name in _named(columns)[0]:
        if name not in table.schema.names:
            raise InputError(f"the stream has no column {name!r}; it has {table.schema.names}.")
    return Update(batch, columns, types, table.num_rows, table=table)


# ---- bundles -----------------------------------------------------------------------------------


def bundled(updates: Sequence[Update]) -> Iterator[tuple[Bundle, list[int]]]:
    """Yield the rows of updates with the same columns, and the numbers of these updates."""
    groups: dict[Any, list[int]] = {}
    for number, update in enumerate(updates):
        alone = number if update.table is not None else None
        groups.setdefault((update.columns, update.types, alone), []).append(number)
    for (columns, types, _), numbers in groups.items():
        several = [updates[number] for number in numbers]
        yield (
            Bundle(
                _rows_of(several, types),
                [update.length for update in several],
                [update.batch for update in several],
                _plain(columns.set) or "",
                _plain(columns.features),
                columns.time,
            ),
            numbers,
        )


def _rows_of(updates: Sequence[Update], types: Sequence[tuple[str, pa.DataType]]) -> pa.RecordBatch:
    if updates[0].table is not None:
        return updates[0].table
    arrays = []
    for place, (name, kind) in enumerate(types):
        values = [value for update in updates for value in update.values[place]]
        make = _times_of if kind == TIME else _array_of
        arrays.append(make(name, values, kind))
    return pa.record_batch(arrays, [name for name, _ in types])


def _array_of(name: str, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise InputError(f"the column {name!r} cannot be read: {error}.") from error


def _times_of(name: str, values: Sequence[str | None], kind: pa.DataType) -> pa.Array:
    """Return times that are written as text, such as 2026-11-18T16:05:43Z; UTC without a zone."""
    try:
        return pa.array([value and datetime.fromisoformat(value) for value in values], kind)
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise InputError(
            f"the time {name!r} must be seconds since 1970, or text such as "
            f"2026-11-18T16:05:43Z: {error}."
        ) from error
