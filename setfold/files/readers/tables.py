"""Files that are tables and say what their columns hold: Parquet, Arrow."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from setfold.errors import FileError
from setfold.files.readers.reader import Reader

READ_AHEAD = 16 << 20  # bytes of a file, shared by the columns that are read
SHARES = (16 << 10, 1 << 20)  # what a column gets of them at least and at most
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
