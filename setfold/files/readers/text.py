"""Files that are tables of text: CSV and TSV. Types are guessed, and cells may be anything."""

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
from setfold.files.readers.reader import BadLine, Reader
from setfold.files.readers.tables import pieces

BLOCK = 4 << 20  # bytes of text that are parsed at a time; a row must not be longer
CONVERSION = re.compile(
    r"CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error to (.+?): (.*)", re.DOTALL
)
NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
MOSTLY = 0.9  # of the cells in which anything stands
NULLS = pa.array(pacsv.ConvertOptions().null_values)
ABOVE = 2  # Arrow counts the lines of a CSV from 1, and the header is one
SHOWN = 80  # characters of a cell that a message shows
# What a column may turn out to hold instead, by Arrow's names; as bytes, all of them.
WIDER = {"null": pa.int64(), "int64": pa.float64(), "double": pa.large_binary()}


class CsvReader(Reader):
    """CSV and TSV, as text or compressed by gzip.

    Types are what the first megabytes suggest, but for the column `text`, whose empty cells are
    nulls. A column nine tenths of whose cells are numbers is one of numbers, and so is one of `numbers`;
    what else stands in it is null, and told by `take_reasons`. Where whole numbers turn out to have
    fractions further on, the batches from there on hold float64. A line with too few or too many cells
    is left out, and told by `take_bad`. Text that is no UTF-8 cannot be read, nor anything after it.
    """

    suffixes: ClassVar = (".csv", ".tsv", ".csv.gz", ".tsv.gz")

    def _open(self) -> None:
        self._bad: list[BadLine] = []
        self._reasons: dict[int, str] = {}
        ahead: deque[BadLine] = deque()
        types = {} if self.text is None else {self.text: pa.large_string()}
        with self._stream(ahead, None, types) as stream:
            first = next(iter(stream), None)
            self.schema = stream.schema if first is None else self._schema_of(first)
            is_empty = first is None and not ahead
        if all(map(is_number, self.schema.names)):
            raise FileError(
                f"{self.path} has no header: its first line should name the columns, but holds "
                f"numbers only ({', '.join(self.schema.names)[:SHOWN]}). Put a line of names before "
                "it; if these are the names, put a letter before each."
            )
        self.num_rows = 0 if is_empty else None

    def _schema_of(self, batch: pa.RecordBatch) -> pa.Schema:
        """The types of the columns, where one wrong cell does not make text of all numbers."""
        schema = batch.schema
        for place, field in enumerate(schema):
            is_text = field.type in (pa.string(), pa.binary()) and field.name != self.text
            if is_text and (field.name in self.numbers or mostly_numbers(batch.column(place))):
                schema = schema.set(place, field.with_type(pa.float64()))
        return schema

    def _stream(
        self, ahead: deque[BadLine], columns: list[str] | None, types: dict[str, pa.DataType]
    ) -> pacsv.CSVStreamingReader:
        name = self.path.name.lower()
        return pacsv.open_csv(
            pa.input_stream(self.path, compression="gzip" if name.endswith(".gz") else None),
            read_options=pacsv.ReadOptions(use_threads=False, block_size=BLOCK),
            parse_options=pacsv.ParseOptions(
                delimiter="\t" if ".tsv" in name[-7:] else ",", invalid_row_handler=noting(ahead)
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
                for row, run in self._runs(columns, types, range(start, last)):
                    start = max(start, row)
                    for piece in pieces([run], row, start, stop, rows):
                        yield self._with_numbers(start, self._with_nulls(piece))
                        start += piece.num_rows
                if self._bad and self._bad[-1][0] >= start:
                    # Nobody would ask for what stands at the end, were there not one more batch.
                    yield pa.RecordBatch.from_pylist([], self._schema(columns))
                return
            except pa.ArrowInvalid as error:
                found = CONVERSION.search(str(error))
                if found is None:
                    raise
                wider = WIDER.get(found[3])
                if wider is None:
                    raise self._mismatch(found, start) from error
                types[self.schema.names[int(found[1])]] = wider
                self._bad = [bad for bad in self._bad if bad[0] < start]  # the others come again

    def _schema(self, columns: list[str]) -> pa.Schema:
        return pa.schema([self.schema.field(name) for name in columns])

    def _runs(
        self, columns: list[str], types: dict[str, pa.DataType], wanted: range
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Batches that are cut where a line was left out, each with the number of its first row."""
        row = 0
        ahead: deque[BadLine] = deque()  # Arrow parses further than it has yielded
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
        """Numbers that were read as text made numbers; nulls where something else stands."""
        for place, field in enumerate(batch.schema):
            if field.type != WIDER["double"]:
                continue
            cells = batch.column(place)
            numbers = numbers_of(cells)
            for wrong in np.flatnonzero(numbers.is_null()).tolist():
                if cell := cells[wrong].as_py().decode(errors="replace"):  # else it is just null
                    reason = f"column {field.name!r} holds {cell[:SHOWN]!r}, which is no number"
                    self._reasons.setdefault(row + wrong, reason)
            batch = batch.set_column(place, field.with_type(numbers.type), numbers)
        return batch

    def _with_nulls(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Empty texts made nulls: Arrow would do so in all columns or in none, and with "NA", too."""
        if self.text not in batch.schema.names:
            return batch
        place = batch.schema.get_field_index(self.text)
        texts = batch.column(place)
        is_empty = pc.equal(texts, pa.scalar("", texts.type))
        if not pc.any(is_empty).as_py():
            return batch
        nulled = pc.if_else(is_empty, pa.scalar(None, texts.type), texts)
        return batch.set_column(place, batch.schema.field(place), nulled)

    def _mismatch(self, found: re.Match[str], start: int) -> FileError:
        """What is wrong with a cell whose block, which begins with row `start`, cannot be read."""
        place = f"column {self.schema.names[int(found[1])]!r}"
        if found[2] is not None:
            place += f" of row {int(found[2]) - ABOVE} (the first is row 0)"
        kind = "text in UTF-8" if "string" in found[3] else found[3]
        return FileError(
            f"{self.path} cannot be read from row {start} on: {place} should hold {kind}, as in the "
            f"rows before it ({found[4][:SHOWN]}). Mend it; with --on-error skip, everything from row "
            f"{start} on is left out."
        )

    def take_bad(self) -> list[BadLine]:
        taken, self._bad = self._bad, []
        return taken

    def take_reasons(self) -> dict[int, str]:
        taken, self._reasons = self._reasons, {}
        return taken


def noting(bad: deque[BadLine]) -> Callable[[pacsv.InvalidRow], str]:
    """What Arrow calls for a line with a wrong number of cells: it is noted, and left out.

    Args:
        bad: where to note it.
    """

    def note(line: pacsv.InvalidRow) -> str:
        reason = f"the line has {line.actual_columns} cells; expected {line.expected_columns}"
        breaks = line.text.count("\n")
        if breaks:
            reason += f". It goes on over {breaks + 1} lines of text, so a quote may be missing"
        bad.append((line.number - ABOVE, reason))
        return "skip"

    return note


def mostly_numbers(cells: pa.Array) -> bool:
    """Whether most cells in which anything stands are numbers.

    >>> mostly_numbers(pa.array(["7"] * 9 + ["oops", "", "NA"])), mostly_numbers(pa.array(["7", "?"]))
    (True, False)
    """
    absent = pc.sum(pc.is_in(cells, NULLS.cast(cells.type)), min_count=0).as_py()
    found = pc.count(numbers_of(cells)).as_py()
    return bool(found >= MOSTLY * max(len(cells) - absent, 1))


def numbers_of(cells: pa.Array) -> pa.Array:
    """Texts or bytes as float64; null where they are no numbers.

    >>> numbers_of(pa.array(["-1.5e3", " 7", "+.5", "oops", "", "1,5", "+-5"])).to_pylist()
    [-1500.0, 7.0, 0.5, None, None, None, None]
    """
    is_number = pc.match_substring_regex(cells, NUMBER)
    texts = pc.if_else(is_number, cells, pa.scalar(None, cells.type)).cast(pa.large_string())
    plain = pc.replace_substring(pc.utf8_trim_whitespace(texts), "+", "", max_replacements=1)
    return plain.cast(pa.float64())


def is_number(text: str) -> bool:
    """Whether a text could be read as a number.

    >>> [is_number(text) for text in ("-1.5e3", "7", "x7", "")]
    [True, True, False, False]
    """
    try:
        float(text)
    except ValueError:
        return False
    return True
