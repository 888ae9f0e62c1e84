"""Columnar formats with typed columns: Parquet and Arrow."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from setfold.errors import FileError
from setfold.files.readers.messages import (
    buffers_of,
    declared_sizes,
    is_compressed,
    messages_of,
    num_rows,
)
from setfold.files.readers.reader import Reader

MAGIC = b"ARROW1"
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"  # detects streams that are truncated between batches


class ParquetReader(Reader):
    """Parquet, memory-mapped and read page by page. A row group is never in memory as a whole."""

    suffixes: ClassVar = (".parquet", ".pq")

    def _open(self) -> None:
        with self.path.open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._file = pq.ParquetFile(
            pa.BufferReader(pa.py_buffer(self._mapped)),
            pre_buffer=False,
            page_checksum_verification=True,  # of pages that have a checksum
        )
        self.schema, metadata = self._file.schema_arrow, self._file.metadata
        self.num_rows = metadata.num_rows
        sizes = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        self._starts = list(accumulate(sizes, initial=0))

    def close(self) -> None:
        self._file.close()

    def cuts(self, rows: int) -> list[tuple[int, int | None]]:
        return group_ranges(self._starts, rows)

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
        for batch in slice_batches(batches, self._starts[groups[0]], start, stop, rows):
            yield batch.select(columns)
            release_pages(self._mapped)


class ArrowReader(Reader):
    """Arrow files and streams, memory-mapped. Pages are released after each batch."""

    suffixes: ClassVar = (".arrow", ".feather", ".ipc")

    def _open(self) -> None:
        with self.path.open("rb") as file:
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._is_file = self._mapped[: len(MAGIC)] == MAGIC
        if not self._is_file and self._mapped[-8:] != STREAM_END:
            raise FileError(
                f"{self.path} is not an Arrow file, or a stream without its end marker. It is "
                "truncated or corrupt. Write it again."
            )
        self.num_rows = None
        self._is_compressed = False  # until it is known
        self.schema = self._reader().schema
        self._scan()

    def _scan(self) -> None:
        """Find the rows of each record batch, and what it takes to decompress a column of it."""
        self._largest = dict.fromkeys(self.schema.names, 0)  # bytes of a column in a batch
        self._shared = 0  # bytes of dictionaries, and of batches that are not as expected
        counts = [buffers_of(field.type) for field in self.schema]
        starts = [0]
        try:
            for message in messages_of(pa.py_buffer(self._mapped), self._is_file):
                sizes = declared_sizes(message)
                self._is_compressed |= is_compressed(message)
                if message.type != "record batch":
                    self._shared += sum(sizes)
                    continue
                starts.append(starts[-1] + num_rows(message))
                if len(sizes) != sum(counts):
                    self._shared = max(self._shared, sum(sizes))
                    continue
                left = iter(sizes)
                for name, count in zip(self.schema.names, counts, strict=True):
                    self._largest[name] = max(self._largest[name], sum(islice(left, count)))
        except (pa.ArrowException, OSError):
            if self._is_file:
                raise
            # The rows before what is damaged can be read.
        if self._is_file:
            self._starts, self.num_rows = starts, starts[-1]

    def _reader(self, fields: list[int] | None = None) -> Any:
        # Arrow copies selected columns. That pays off only if it must decompress them anyway.
        selected = fields if self._is_compressed or not self._is_file else None
        options = pa.ipc.IpcReadOptions(included_fields=selected, use_threads=False)
        open_source = pa.ipc.open_file if self._is_file else pa.ipc.open_stream
        return open_source(pa.BufferReader(pa.py_buffer(self._mapped)), options=options)

    def block_bytes(self, columns: Sequence[str]) -> int:
        return self._shared + sum(self._largest[name] for name in columns)

    def cuts(self, rows: int) -> list[tuple[int, int | None]]:
        return super().cuts(rows) if self.num_rows is None else group_ranges(self._starts, rows)

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
        for batch in slice_batches(batches, row, start, stop, rows):
            batch.validate(full=True)  # Arrow does not check mapped data; wrong offsets would crash
            yield batch.select(columns)
            release_pages(self._mapped)


def release_pages(mapped: mmap.mmap) -> None:
    """Let go of what was read: pages of a mapped file count as memory of the process."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def group_ranges(starts: list[int], rows: int) -> list[tuple[int, int | None]]:
    """Combine adjacent row groups into ranges of about `rows` rows.

    Args:
        starts: The first row of each group, and the end of the last group.
        rows: The approximate number of rows of a range.

    >>> group_ranges([0, 40, 80, 120, 500, 510], 100)
    [(0, 120), (120, 500), (500, 510)]
    """
    cuts: list[tuple[int, int | None]] = []
    begin = 0
    for end in starts[1:]:
        if end - begin >= rows or (end == starts[-1] and end > begin):
            cuts.append((begin, end))
            begin = end
    return cuts


def slice_batches(
    batches: Iterable[pa.RecordBatch], row: int, start: int, stop: int | None, rows: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows [start, stop) of some batches, in smaller batches.

    Args:
        batches: Consecutive batches.
        row: The row number of the first row of the first batch.
        start: The first row to yield.
        stop: The row after the last; None for all.
        rows: The maximum number of rows of a batch in the result.
    """
    for batch in batches:
        if stop is not None and row >= stop:
            return
        end = batch.num_rows if stop is None else min(batch.num_rows, stop - row)
        for begin in range(max(start - row, 0), end, rows):
            yield batch.slice(begin, min(rows, end - begin))
        row += batch.num_rows
