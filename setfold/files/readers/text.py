"""Text tables: CSV and TSV. Types are inferred, and any cell may be invalid."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from setfold.errors import FileError
from setfold.files.readers.columnar import slice_batches
from setfold.files.readers.reader import BadRow, Reader

BLOCK_BYTES = 4 << 20  # text that is parsed at a time; a row must not be longer
CONVERSION = re.compile(
    r"CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error to (.+?): (.*)", re.DOTALL
)
NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
NUMERIC_SHARE = 0.9  # minimum share of numbers among the non-empty cells of a numeric column
NULLS = pa.array(pacsv.ConvertOptions().null_values)
FIRST_LINE = 2  # line number of row 0 in Arrow: it counts from 1, and the header is one line
MAX_SHOWN = 80  # characters of a cell in an error message
# The next type to try if a cell does not fit, by Arrow's names. Bytes accept every cell.
WIDER = {"null": pa.int64(), "int64": pa.float64(), "double": pa.large_binary()}


class CsvReader(Reader):
    """CSV and TSV, plain or compressed by gzip.

    Types are inferred from the first megabytes. The columns `text_columns` are always text, and
    their empty cells are nulls. A column is numeric if nine tenths of its cells are numbers, or if it is
    one of `number_columns`; its other cells are nulls, and `take_reasons` returns why. If integers
    are followed by fractions later in the file, the batches from there on are float64. A line with
    the wrong number of cells is skipped, and returned by `take_bad_rows`. Text that is not UTF-8
    raises an error, and nothing after it can be read.
    """

    suffixes: ClassVar = (".csv", ".tsv", ".csv.gz", ".tsv.gz")

    def _open(self) -> None:
        self._bad: list[BadRow] = []
        self._reasons: dict[int, str] = {}
        ahead: deque[BadRow] = deque()
        types = dict.fromkeys(self.text_columns, pa.large_string())
        with self._stream(ahead, None, types) as stream:
            first = next(iter(stream), None)
            self.schema = stream.schema if first is None else self._infer_schema(first)
            is_empty = first is None and not ahead
        if all(map(is_number, self.schema.names)):
            raise FileError(
                f"{self.path} has no header: expected column names in the first line; got only "
                f"numbers ({', '.join(self.schema.names)[:MAX_SHOWN]}). Insert a line of column "
                "names. If these are the names, prefix each with a letter."
            )
        self.num_rows = 0 if is_empty else None

    def _infer_schema(self, batch: pa.RecordBatch) -> pa.Schema:
        """Return the schema, with columns that hold mostly numbers as float64 instead of text."""
        schema = batch.schema
        for place, field in enumerate(schema):
            is_text = (
                field.type in (pa.string(), pa.binary()) and field.name not in self.text_columns
            )
            if is_text and (
                field.name in self.number_columns or mostly_numbers(batch.column(place))
            ):
                schema = schema.set(place, field.with_type(pa.float64()))
        return schema

    def _stream(
        self, ahead: deque[BadRow], columns: list[str] | None, types: dict[str, pa.DataType]
    ) -> pacsv.CSVStreamingReader:
        name = self.path.name.lower()
        return pacsv.open_csv(
            pa.input_stream(self.path, compression="gzip" if name.endswith(".gz") else None),
            read_options=pacsv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
            parse_options=pacsv.ParseOptions(
                delimiter="\t" if ".tsv" in name[-7:] else ",", invalid_row_handler=recorder(ahead)
            ),
            convert_options=pacsv.ConvertOptions(include_columns=columns, column_types=types),
        )

    def _batches(
        self, columns: list[str], start: int, stop: int | None, rows: int
    ) -> Iterator[pa.RecordBatch]:
        types = {field.name: field.type for field in self._schema(columns)}
        last = sys.maxsize if stop is None else stop
        self._bad.clear()
        while True:
            try:
                for row, segment in self._segments(columns, types, range(start, last)):
                    start = max(start, row)
                    for batch in slice_batches([segment], row, start, stop, rows):
                        yield self._with_numbers(start, self._with_nulls(batch))
                        start += batch.num_rows
                if self._bad and self._bad[-1][0] >= start:
                    # An empty batch makes the caller ask for the bad rows at the end of the file.
                    yield pa.RecordBatch.from_pylist([], self._schema(columns))
                return
            except pa.ArrowInvalid as error:
                found = CONVERSION.search(str(error))
                if found is None:
                    raise
                wider = WIDER.get(found[3])
                if wider is None:
                    raise self._type_error(found, start) from error
                types[self.schema.names[int(found[1])]] = wider
                self._bad = [
                    bad for bad in self._bad if bad[0] < start
                ]  # the others are read again

    def _schema(self, columns: list[str]) -> pa.Schema:
        return pa.schema([self.schema.field(name) for name in columns])

    def _segments(
        self, columns: list[str], types: dict[str, pa.DataType], wanted: range
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches, split at skipped lines, each with the row number of its first row."""
        row = 0
        ahead: deque[BadRow] = deque()  # Arrow parses ahead of what it yields
        with self._stream(ahead, columns, types) as stream:
            for batch in stream:
                rest = batch
                while rest.num_rows:
                    while ahead and ahead[0][0] == row:
                        bad = ahead.popleft()
                        self._bad += [bad] if row in wanted else []
                        row += 1
                    if row >= wanted.stop:
                        return
                    size = min(rest.num_rows, ahead[0][0] - row) if ahead else rest.num_rows
                    yield row, rest.slice(0, size)
                    row += size
                    rest = rest.slice(size)
        self._bad += [bad for bad in ahead if bad[0] in wanted]

    def _with_numbers(self, row: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Convert numeric columns that were read as bytes. Other cells become null."""
        for place, field in enumerate(batch.schema):
            if field.type != WIDER["double"]:
                continue
            cells = batch.column(place)
            numbers = numbers_of(cells)
            for wrong in np.flatnonzero(numbers.is_null()).tolist():
                if (
                    cell := cells[wrong].as_py().decode(errors="replace")
                ):  # an empty cell is an ordinary null
                    reason = f"column {field.name!r}: expected a number; got {cell[:MAX_SHOWN]!r}"
                    self._reasons.setdefault(row + wrong, reason)
            batch = batch.set_column(place, field.with_type(numbers.type), numbers)
        return batch

    def _with_nulls(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Turn empty cells of the text columns into nulls, but not "NA", as Arrow would."""
        for place, field in enumerate(batch.schema):
            if field.name in self.text_columns:
                texts = batch.column(place)
                is_empty = pc.equal(texts, pa.scalar("", texts.type))
                if pc.any(is_empty).as_py():
                    nulled = pc.if_else(is_empty, pa.scalar(None, texts.type), texts)
                    batch = batch.set_column(place, field, nulled)
        return batch

    def _type_error(self, found: re.Match[str], start: int) -> FileError:
        """Return the error for a cell of the wrong type, in a block that begins at row `start`."""
        place = f"column {self.schema.names[int(found[1])]!r}"
        if found[2] is not None:
            place += f" of row {int(found[2]) - FIRST_LINE} (counting from 0)"
        kind = "text in UTF-8" if "string" in found[3] else found[3]
        return FileError(
            f"cannot read {self.path} from row {start} on: {place} should be {kind}, as in earlier "
            f"rows ({found[4][:MAX_SHOWN]}). Correct the file. With --on-error skip, all rows from "
            f"{start} on are skipped."
        )

    def take_bad_rows(self) -> list[BadRow]:
        taken, self._bad = self._bad, []
        return taken

    def take_reasons(self) -> dict[int, str]:
        taken, self._reasons = self._reasons, {}
        return taken


def recorder(bad: deque[BadRow]) -> Callable[[pacsv.InvalidRow], str]:
    """Return a callback for Arrow that records and skips lines with the wrong number of cells.

    Args:
        bad: The queue to append to.
    """

    def record(line: pacsv.InvalidRow) -> str:
        reason = f"the line has {line.actual_columns} cells; expected {line.expected_columns}"
        breaks = line.text.count("\n")
        if breaks:
            reason += f". It spans {breaks + 1} lines of text, so a quote may be missing"
        bad.append(BadRow(line.number - FIRST_LINE, reason))
        return "skip"

    return record


def mostly_numbers(cells: pa.Array) -> bool:
    """Whether most non-empty cells are numbers.

    >>> mostly_numbers(pa.array(["7"] * 9 + ["oops", "", "NA"]))
    True
    >>> mostly_numbers(pa.array(["7", "?"]))
    False
    """
    absent = pc.sum(pc.is_in(cells, NULLS.cast(cells.type)), min_count=0).as_py()
    found = pc.count(numbers_of(cells)).as_py()
    return bool(found >= NUMERIC_SHARE * max(len(cells) - absent, 1))


def numbers_of(cells: pa.Array) -> pa.Array:
    """Convert text or bytes to float64. Cells that are not numbers become null.

    >>> numbers_of(pa.array(["-1.5e3", " 7", "+.5", "oops", "", "1,5", "+-5"])).to_pylist()
    [-1500.0, 7.0, 0.5, None, None, None, None]
    """
    is_number = pc.match_substring_regex(cells, NUMBER)
    texts = pc.if_else(is_number, cells, pa.scalar(None, cells.type)).cast(pa.large_string())
    plain = pc.replace_substring(pc.utf8_trim_whitespace(texts), "+", "", max_replacements=1)
    return plain.cast(pa.float64())


def is_number(text: str) -> bool:
    """Whether text can be parsed as a number.

    >>> [is_number(text) for text in ("-1.5e3", "7", "x7", "")]
    [True, True, False, False]
    """
    try:
        float(text)
    except ValueError:
        return False
    return True
