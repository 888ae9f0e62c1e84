"""Encodings as JSON, or as an Arrow stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson
import pyarrow as pa

from setfold.errors import InputError
from setfold.files.tables.arrow import as_lists
from setfold.live.scan import scan, with_shape
from setfold.live.service.messages import RefusedError
from setfold.live.sets import LiveSets

MAX_SETS = 10_000  # of one read
READ_BYTES = 1 << 28  # of states, of one read


def ids_in_path(raw: bytes, prefix: str) -> list[Any]:
    """Return the set id in the path of a request: a text, or one for each of its columns.

    >>> ids_in_path(b"/v1/sets/a%2Fb", "/v1/sets/"), ids_in_path(b"/v1/sets/12/7", "/v1/sets/")
    (['a/b'], [('12', '7')])

    Raises:
        InputError: It is not UTF-8.
    """
    try:
        parts = tuple(unquote_to_bytes(part).decode() for part in raw[len(prefix) :].split(b"/"))
    except UnicodeDecodeError as error:
        raise InputError(f"the set id in the path is not UTF-8: {error}.") from error
    return [parts[0] if len(parts) == 1 else parts]


def check_query(names: Sequence[str]) -> None:
    """Raise InputError if the query of a read has other names than last and head."""
    if not {*names} <= {"last", "head"}:
        raise InputError(f"expected last and head in the query; got {', '.join(names):.200}.")


def parse_read(body: bytes) -> tuple[list[Any], str | None, bool]:
    """Return what a bulk read asks for: names, last, head.

    Raises:
        InputError: It asks for something else.
    """
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InputError(f"the body is not JSON: {error}.") from error
    if not isinstance(found, dict) or not {*found} <= {"sets", "last", "head"}:
        raise InputError("expected an object with sets, last and head.")
    names, last, head = found.get("sets"), found.get("last"), found.get("head", False)
    if not isinstance(names, list) or not isinstance(last, str | None) or type(head) is not bool:
        raise InputError('expected {"sets": ["ann", "bob"], "last": "7d", "head": true}.')
    return [tuple(name) if isinstance(name, list) else name for name in names], last, head


def check_size(sets: LiveSets, number: int) -> None:
    """Raise RefusedError if a read takes too much memory."""
    most = max(1, min(MAX_SETS, READ_BYTES // sets.model.state_nbytes))
    if number > most:
        raise RefusedError(413, f"at most {most:,} sets can be read at once; got {number:,}.")


def read_one(sets: LiveSets, names: Sequence[Any], last: str | None, head: bool) -> dict[str, Any]:
    """Return count and encoding of a set, for JSON."""
    counts, encodings = sets.look_up(names, last=last, head=head)
    shown = list(names[0]) if isinstance(names[0], tuple) else names[0]
    return {"set": shown, "count": counts[0], "encoding": encodings[0].numpy()}


def read_many(sets: LiveSets, names: Sequence[Any], last: str | None, head: bool) -> dict[str, Any]:
    """Return counts and encodings of sets, for JSON."""
    check_size(sets, len(names))
    counts, encodings = sets.look_up(names, last=last, head=head)
    return {"sets": names, "counts": counts, "encodings": encodings.numpy()}


def read_table(sets: LiveSets, names: Sequence[Any], last: str | None, head: bool) -> bytes:
    """Return counts and encodings of sets, as an Arrow stream, in the order of the names."""
    check_size(sets, len(names))
    counts, encodings = sets.look_up(names, last=last, head=head)
    columns = {"count": pa.array(counts, pa.int64()), "encoding": as_lists(encodings)}
    sink = pa.BufferOutputStream()
    table = with_shape(pa.table(columns), encodings.shape[1:])
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def stream_all(sets: LiveSets, last: str | None, head: bool) -> Iterator[bytes]:
    """Yield the parts of an Arrow stream with the encodings of all sets, sorted by set id."""
    written, writer = _Parts(), None
    for table in scan(sets, last=last, head=head):
        if writer is None:
            writer = pa.ipc.new_stream(pa.PythonFile(written, "w"), table.schema)
        writer.write_table(table)
        yield written.take()
    assert writer is not None  # there is one table at least
    writer.close()
    yield written.take()


class _Parts:
    """A file whose content can be taken away part by part."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, part: bytes) -> int:
        self.parts.append(bytes(part))
        return len(part)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def take(self) -> bytes:
        content = b"".join(self.parts)
        self.parts.clear()
        return content
