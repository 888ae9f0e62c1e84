"""Files that are tables: Parquet, Arrow, CSV."""

from __future__ import annotations

import mmap
import re
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from setfold.errors import FileError
from setfold.io.readers.reader import BadLine, Reader

READ_AHEAD = 16 << 20  # bytes of a file, shared by the columns that are read
SHARES = (16 << 10, 1 << 20)  # what a column gets of them at least and at most
CSV_BLOCK = 4 << 20  # bytes of text that are parsed at a time; a row must not be longer
CONVERSION = re.compile(
    r"CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error to (.+?): (.*)", re.DOTALL
)
ABOVE = 2  # Arrow counts the lines of a CSV from 1, and the header is one
SHOWN = 80  # characters of a cell that a message shows
MAGIC = b"ARROW1"
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # without it, a stream cut between batches would pass


class ParquetReader(Reader):
    """Parquet, column by column and page by page; a row group is never in memory as a whole."""

    suffixes: ClassVar = (".parquet", ".pq")

    def _open(self) -> None:
        with pq.ParquetFile(self.path) as file:
            self.schema = file.schema_arrow
            self._metadata = metadata = file.metadata
        self.num_rows = metadata.num_rows
        sizes = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        self._starts = list(accumulate(sizes, initial=0))

    def cuts(self, rows: int) -> list[tuple[int, int | None]]:
        return merged(self._starts, rows)

    def _batches(
        self, columns: list[str], start: int, stop: int | None, rows: int
    ) -> Iterator[pa.RecordBatch]:
        last = self._starts[-1] if stop is None else stop
        groups = [
            group
            for group, (begin, end) in enumerate(pairwise(self._starts))
            if begin < last and end > start
        ]
        if not groups:
            return
        with pq.ParquetFile(
            self.path,
            metadata=self._metadata,
            buffer_size=share(len(columns)),
            pre_buffer=False,
        ) as file:
            batches = file.iter_batches(rows, row_groups=groups, columns=columns, use_threads=False)
            for piece in pieces(batches, self._starts[groups[0]], start, stop, rows):
                yield piece.select(columns)


class ArrowReader(Reader):
    """Arrow's own files and streams, mapped; pages that were read are let go after each batch."""

    suffixes: ClassVar = (".arrow", ".feather", ".ipc")

    def _open(self) -> None:
        with self.path.open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._is_file = self._mapped[: len(MAGIC)] == MAGIC
        if not self._is_file and self._mapped[-8:] != STREAM_END:
            raise FileError(
                f"{self.path} is no Arrow file, or a stream without its end. It is truncated or "
                "corrupt; write it anew."
            )
        self.num_rows = None
        self._is_packed = False
        opened = self._reader()
        self.schema = opened.schema
        if self._is_file:
            self._is_packed = opened.num_record_batches > 0 and self._is_copied(opened.get_batch(0))
            narrow = self._reader([0] if len(self.schema) else None)  # one column tells the lengths
            sizes = (narrow.get_batch(i).num_rows for i in range(narrow.num_record_batches))
            self._starts = list(accumulate(sizes, initial=0))
            self.num_rows = self._starts[-1]

    def _reader(self, fields: list[int] | None = None) -> Any:
        # Arrow copies what it is asked to pick from a file. That pays only if it must unpack it, too.
        picked = fields if self._is_packed or not self._is_file else None
        options = pa.ipc.IpcReadOptions(included_fields=picked, use_threads=False)
        opened = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        return opened(pa.BufferReader(pa.py_buffer(self._mapped)), options=options)

    def _is_copied(self, batch: pa.RecordBatch) -> bool:
        """Whether a batch lies elsewhere than in the mapped file, since it was compressed."""
        start = pa.py_buffer(self._mapped).address
        addresses = [
            b.address for column in batch.columns for b in column.buffers() if b and b.size
        ]
        return not all(start <= address < start + len(self._mapped) for address in addresses)

    def cuts(self, rows: int) -> list[tuple[int, int | None]]:
        return super().cuts(rows) if self.num_rows is None else merged(self._starts, rows)

    def _batches(
        self, columns: list[str], start: int, stop: int | None, rows: int
    ) -> Iterator[pa.RecordBatch]:
        row = 0
        reader = self._reader(sorted(self.schema.get_field_index(name) for name in columns))
        if self._is_file:
            first = max(bisect_right(self._starts, start) - 1, 0)
            row = self._starts[first]
            batches = (reader.get_batch(i) for i in range(first, reader.num_record_batches))
        else:
            batches = iter(reader)
        for piece in pieces(batches, row, start, stop, rows):
            piece.validate(full=True)  # Arrow trusts what it maps, and would crash on wrong offsets
            yield piece.select(columns)
            self._mapped.madvise(mmap.MADV_DONTNEED)


class CsvReader(Reader):
    """CSV and TSV, as text or compressed by gzip.

    Types are what the first megabytes suggest, but for the column `text`, whose empty cells are
    nulls. Where whole numbers turn out to have fractions further on, the batches from there on hold
    float64. A line with too few or too many cells is left out, and told by `take_bad`; if it is no
    UTF-8 either, its whole block cannot be read.
    """

    suffixes: ClassVar = (".csv", ".tsv", ".csv.gz", ".tsv.gz")

    def _open(self) -> None:
        self._bad: list[BadLine] = []
        ahead: deque[BadLine] = deque()
        types = {} if self.text is None else {self.text: pa.large_string()}
        with self._stream(ahead, None, types) as stream:
            self.schema = stream.schema
            is_empty = next(iter(stream), None) is None and not ahead
        if all(map(is_number, self.schema.names)):
            raise FileError(
                f"{self.path} has no header: its first line should name the columns, but holds "
                f"numbers only ({', '.join(self.schema.names)[:SHOWN]}). Put a line of names before "
                "it; if these are the names, put a letter before each."
            )
        self.num_rows = 0 if is_empty else None

    def _stream(
        self, ahead: deque[BadLine], columns: list[str] | None, types: dict[str, pa.DataType]
    ) -> pacsv.CSVStreamingReader:
        name = self.path.name.lower()
        return pacsv.open_csv(
            pa.input_stream(self.path, compression="gzip" if name.endswith(".gz") else None),
            read_options=pacsv.ReadOptions(use_threads=False, block_size=CSV_BLOCK),
            parse_options=pacsv.ParseOptions(
                delimiter="\t" if ".tsv" in name[-7:] else ",", invalid_row_handler=noting(ahead)
            ),
            convert_options=pacsv.ConvertOptions(include_columns=columns, column_types=types),
        )

    def _batches(
        self, columns: list[str], start: int, stop: int | None, rows: int
    ) -> Iterator[pa.RecordBatch]:
        types = {name: self.schema.field(name).type for name in columns}
        last = sys.maxsize if stop is None else stop
        self._bad.clear()
        while True:
            try:
                for row, run in self._runs(columns, types, range(start, last)):
                    start = max(start, row)
                    for piece in pieces([run], row, start, stop, rows):
                        yield self._with_nulls(piece)
                        start += piece.num_rows
                if self._bad and self._bad[-1][0] >= start:
                    # Nobody would ask for what stands at the end, were there not one more batch.
                    yield pa.RecordBatch.from_pylist([], pa.schema(types.items()))
                return
            except pa.ArrowInvalid as error:
                found = CONVERSION.search(str(error))
                if found is None:
                    raise
                if not self._widen(types, found):
                    raise self._mismatch(found, start) from error

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

    def _widen(self, types: dict[str, pa.DataType], found: re.Match[str]) -> bool:
        """Give a column the next wider type of number, if that could be what an error asks for."""
        wider = {"null": pa.int64(), "int64": pa.float64()}.get(found[3])
        if wider is not None:
            types[self.schema.names[int(found[1])]] = wider
        return wider is not None

    def _mismatch(self, found: re.Match[str], start: int) -> FileError:
        """What is wrong with a cell whose block, which begins with row `start`, cannot be read."""
        place = f"column {self.schema.names[int(found[1])]!r}"
        if found[2] is not None:
            place += f" of row {int(found[2]) - ABOVE} (the first is row 0)"
        kind = "a number" if found[3] == "double" else found[3]
        return FileError(
            f"{self.path} cannot be read from row {start} on: {place} should hold {kind}, as in the "
            f"rows before it ({found[4][:SHOWN]}). Mend it; with --on-error skip, everything from row "
            f"{start} on is left out."
        )

    def take_bad(self) -> list[BadLine]:
        taken, self._bad = self._bad, []
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


def share(columns: int) -> int:
    """How many bytes are read ahead of each column, so that many columns need no more than a few.

    Args:
        columns: how many are read.

    >>> share(3) >> 10, share(64) >> 10, share(100_000) >> 10
    (1024, 256, 16)
    """
    least, most = SHARES
    return max(least, min(most, READ_AHEAD // max(columns, 1)))


def merged(starts: list[int], rows: int) -> list[tuple[int, int | None]]:
    """Neighbouring groups of rows put together until they have about `rows` rows.

    Args:
        starts: where groups begin, and the end of the last.
        rows: how many rows are wanted.

    >>> merged([0, 40, 80, 120, 500, 510], 100)
    [(0, 120), (120, 500), (500, 510)]
    """
    cuts: list[tuple[int, int | None]] = []
    begin = 0
    for end in starts[1:]:
        if end - begin >= rows or (end == starts[-1] and end > begin):
            cuts.append((begin, end))
            begin = end
    return cuts


def pieces(
    batches: Iterable[pa.RecordBatch], row: int, start: int, stop: int | None, rows: int
) -> Iterator[pa.RecordBatch]:
    """What batches have of a range of rows, cut into pieces.

    Args:
        batches: consecutive ones.
        row: where the first of them begins.
        start: the first row that is wanted.
        stop: the row after the last; None for all.
        rows: how many rows a piece has at most.
    """
    for batch in batches:
        if stop is not None and row >= stop:
            return
        end = batch.num_rows if stop is None else min(batch.num_rows, stop - row)
        for begin in range(max(start - row, 0), end, rows):
            yield batch.slice(begin, min(rows, end - begin))
        row += batch.num_rows
