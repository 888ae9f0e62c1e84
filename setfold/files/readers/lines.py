"""JSON lines: one object per line. Arrow parses whole blocks; bad lines are found one by one."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.json as pajson

from setfold.errors import FileError
from setfold.files.readers.columnar import slice_batches
from setfold.files.readers.reader import BadRow, Reader

BLOCK_BYTES = 4 << 20  # text that is parsed at a time
MAX_LINE_BYTES = 64 << 20
MAX_SHOWN = 80  # characters of a value in an error message
NULL_LINE = re.compile(rb"^\s*null\s*$", re.MULTILINE)


class JsonReader(Reader):
    """JSON lines, plain or compressed by gzip.

    Types are inferred from the first megabytes. If integers are followed by fractions later in the
    file, the batches from there on are float64, except for `text_columns`, such as set ids. A line that is not a JSON object is skipped, and
    returned by `take_bad_rows`. A value of another type is null, and `take_reasons` returns why.
    Blank lines are no rows.
    """

    suffixes: ClassVar = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")

    def _open(self) -> None:
        self._bad: list[BadRow] = []
        self._reasons: dict[int, str] = {}
        self.schema, self.num_rows = pa.schema([]), 0
        for block in self._blocks():
            self.num_rows = None
            self.schema = infer_schema(block)
            if self.schema.names:
                return
        if self.num_rows is None:
            raise FileError(
                f"{self.path} has no column: expected a JSON object with names and values in each "
                "line. Write it again."
            )

    def _blocks(self) -> Iterator[bytes]:
        """Yield whole lines, some at a time."""
        is_compressed = self.path.name.lower().endswith(".gz")
        if is_compressed and not self.path.stat().st_size:
            raise EOFError("it is empty")  # gzip would not notice
        with gzip.open(self.path) if is_compressed else self.path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                if not block.endswith(b"\n"):
                    block += self._rest_of_line(file)
                if block.strip():
                    yield block

    def _rest_of_line(self, file: Any) -> bytes:
        rest: bytes = file.readline(MAX_LINE_BYTES)
        if len(rest) == MAX_LINE_BYTES and not rest.endswith(b"\n"):
            raise FileError(
                f"{self.path} has a line of more than {MAX_LINE_BYTES:,} bytes. Write one JSON "
                "object per line."
            )
        return rest

    def _batches(
        self, columns: list[str], start: int, stop: int | None, rows: int
    ) -> Iterator[pa.RecordBatch]:
        self._bad.clear()
        schema, row = pa.schema([self.schema.field(name) for name in columns]), 0
        for block in self._blocks():
            for found in self._parse(block, schema, row, rows):
                if isinstance(found, BadRow):
                    self._bad += [found] if found.row >= start else []
                    row += 1
                    continue
                yield from slice_batches([found], row, start, stop, rows)
                row += found.num_rows
            if stop is not None and row >= stop:
                return
        if self._bad:  # an empty batch makes the caller ask for the bad rows at the end of the file
            yield pa.RecordBatch.from_pylist([], schema)

    def _parse(
        self, block: bytes, schema: pa.Schema, row: int, rows: int
    ) -> Iterator[pa.RecordBatch | BadRow]:
        """Yield the rows of a block that begins at a row, split at bad lines.

        If there is one, at most `rows` at a time, so that `take_reasons` is about one batch.
        """
        wide = pa.schema(
            [
                field if field.name in self.text_columns else field.with_type(_widened(field.type))
                for field in schema
            ]
        )
        for types in (schema, wide):
            try:
                yield _read_block(block, types)
                return
            except (pa.ArrowException, ValueError):
                continue
        pending: list[dict[str, Any]] = []
        for number, line in enumerate(filter(None, map(bytes.strip, block.split(b"\n"))), row):
            try:
                item = json.loads(line)
                reason = "" if isinstance(item, dict) else "the line is not a JSON object"
            except (ValueError, RecursionError) as error:
                reason = f"the line is not valid JSON ({error})"
            if not reason and len(pending) < rows:
                pending.append(item)
                continue
            if pending:
                yield self._convert(pending, wide, number - len(pending))
            pending = [] if reason else [item]
            if reason:
                yield BadRow(number, reason)
        if pending:
            yield self._convert(pending, wide, number + 1 - len(pending))

    def _convert(self, items: list[dict[str, Any]], schema: pa.Schema, row: int) -> pa.RecordBatch:
        """Return objects as a batch that begins at a row. Values of another type become null."""
        arrays = []
        for field in schema:
            values = [item.get(field.name) for item in items]
            try:
                arrays.append(_array(values, field.type))
                continue
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                pass
            for place, value in enumerate(values):
                try:
                    _array([value], field.type)
                except (pa.ArrowException, TypeError, ValueError, OverflowError):
                    shown = json.dumps(value)[:MAX_SHOWN]
                    reason = f"column {field.name!r}: expected {field.type}; got {shown}"
                    self._reasons.setdefault(row + place, reason)
                    values[place] = None
            arrays.append(pa.array(values, field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def take_bad_rows(self) -> list[BadRow]:
        taken, self._bad = self._bad, []
        return taken

    def take_reasons(self) -> dict[int, str]:
        taken, self._reasons = self._reasons, {}
        return taken


def _read_block(block: bytes, schema: pa.Schema | None) -> pa.RecordBatch:
    """Parse lines with Arrow, all or nothing."""
    if b"null" in block and NULL_LINE.search(block):
        raise ValueError("a line is null")  # Arrow crashes if the first one is
    table = pajson.read_json(
        io.BytesIO(block),
        pajson.ReadOptions(use_threads=False, block_size=len(block) + 1),
        pajson.ParseOptions(
            explicit_schema=schema,
            unexpected_field_behavior="infer" if schema is None else "ignore",
        ),
    ).combine_chunks()
    table.validate(full=True)  # of text that is not UTF-8
    if schema is not None:
        table = table.select(schema.names)
    (batch,) = table.to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]
    return batch


def infer_schema(block: bytes) -> pa.Schema:
    """Return the columns of some lines. If a line is bad, a value that is not null decides each."""
    try:
        found = _read_block(block, None).schema
        return pa.schema([field.with_type(_plain(field.type)) for field in found])
    except (pa.ArrowException, ValueError):
        pass
    kinds: dict[str, pa.DataType] = {}
    for line in block.split(b"\n"):
        try:
            item = json.loads(line)
            named = item.items() if isinstance(item, dict) else ()
            new = {name: pa.array([value]).type for name, value in named}
        except (ValueError, RecursionError, TypeError, OverflowError, pa.ArrowException):
            continue
        for name, kind in new.items():
            known = kinds.setdefault(name, kind)
            if pa.types.is_null(known) or kind == _widened(known):
                kinds[name] = kind
    return pa.schema(list(kinds.items()))


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return values as a column. Arrow itself would round fractions down to integers."""
    if pa.types.is_integer(kind) and any(isinstance(value, float) for value in values):
        raise ValueError("a value is a fraction")
    return pa.array(values, kind)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return a type with text instead of times, which Arrow recognizes in text."""
    return pa.string() if pa.types.is_timestamp(kind) else kind


def _widened(kind: pa.DataType) -> pa.DataType:
    """Return a type with float64 instead of integers, also in lists, and instead of nothing."""
    if pa.types.is_list(kind):
        return pa.list_(_widened(kind.value_type))
    return pa.float64() if kind in (pa.int64(), pa.null()) else kind
