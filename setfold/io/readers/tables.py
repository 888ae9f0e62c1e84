"""Files that are tables: Parquet, Arrow, CSV."""

from __future__ import annotations

import mmap
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from setfold.errors import FileError
from setfold.io.readers.reader import Reader

BUFFER = 1 << 20  # bytes of each column that are read ahead
CSV_BLOCK = 4 << 20  # bytes of text that are parsed at a time; a row must not be longer
MAGIC = b"ARROW1"
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # without it, a stream cut between batches would pass


class ParquetReader(Reader):
    """Parquet, column by column and page by page; a row group is never in memory as a whole."""

    suffixes: ClassVar = (".parquet", ".pq")

    def _open(self) -> None:
        self._file = pq.ParquetFile(self.path, buffer_size=BUFFER, pre_buffer=False)
        self.schema = self._file.schema_arrow
        metadata = self._file.metadata
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
        batches = self._file.iter_batches(
            rows, row_groups=groups, columns=columns, use_threads=False
        )
        for piece in pieces(batches, self._starts[groups[0]], start, stop, rows):
            yield piece.select(columns)

    def close(self) -> None:
        self._file.close()


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

    Types are what the first megabytes suggest. Where whole numbers turn out to have fractions further
    on, the batches from there on hold float64.
    """

    suffixes: ClassVar = (".csv", ".tsv", ".csv.gz", ".tsv.gz")

    def _open(self) -> None:
        with self._stream() as stream:
            self.schema = stream.schema
            is_empty = next(iter(stream), None) is None
        self.num_rows = 0 if is_empty else None

    def _stream(
        self, columns: list[str] | None = None, types: dict[str, pa.DataType] | None = None
    ) -> pacsv.CSVStreamingReader:
        name = self.path.name.lower()
        return pacsv.open_csv(
            pa.input_stream(self.path, compression="gzip" if name.endswith(".gz") else None),
            read_options=pacsv.ReadOptions(use_threads=False, block_size=CSV_BLOCK),
            parse_options=pacsv.ParseOptions(delimiter="\t" if ".tsv" in name[-7:] else ","),
            convert_options=pacsv.ConvertOptions(include_columns=columns, column_types=types),
        )

    def _batches(
        self, columns: list[str], start: int, stop: int | None, rows: int
    ) -> Iterator[pa.RecordBatch]:
        types = {name: self.schema.field(name).type for name in columns}
        while True:
            try:
                with self._stream(columns, types) as stream:
                    for piece in pieces(stream, 0, start, stop, rows):
                        yield piece
                        start += piece.num_rows
                return
            except pa.ArrowInvalid as error:
                if not self._widen(types, str(error)):
                    raise

    def _widen(self, types: dict[str, pa.DataType], error: str) -> bool:
        """Give a column the next wider type of number, if that could be what an error asks for."""
        found = re.search(r"CSV column #(\d+).*conversion error to (null|int64)", error)
        if found is None:
            return False
        name = self.schema.names[int(found[1])]
        types[name] = pa.int64() if found[2] == "null" else pa.float64()
        return True


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
