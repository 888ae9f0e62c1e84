"""Tables on disk, in append-only files.

A file is a sequence of frames. Data is only ever appended, so a checkpoint needs to record nothing
but the length of the file. A resumed run truncates the file to that length.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from setfold.errors import FileError
from setfold.files.tables.frames import START_OVER, append_frame, read_frame
from setfold.files.tables.table import Table, from_arrow

BUCKET_BITS = 6
BUCKETS = 1 << BUCKET_BITS
LEVELS = 32 // BUCKET_BITS  # how often a bucket can be split again


def bucket_of(sets: pa.Array, level: int) -> np.ndarray:
    """Return the bucket (N,) of each set: a hash of its id. Each level uses other bits of the hash.

    >>> bool((bucket_of(pa.array([7, 8, 7]), 0) == bucket_of(pa.array([7, 8, 7]), 0)).all())
    True
    """
    if pa.types.is_integer(sets.type):
        mixed = sets.to_numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        hashes = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes >>= np.uint64(32)
    else:
        hashes = np.fromiter(map(zlib.crc32, _iter_bytes(sets)), np.uint64, len(sets))
    return (hashes >> np.uint64(level * BUCKET_BITS)).astype(np.int64) % BUCKETS


def _iter_bytes(sets: pa.Array) -> Iterator[bytes]:
    """Yield set ids as bytes. They may be long, so they are converted a few at a time."""
    for start in range(0, len(sets), 1024):
        part = sets.slice(start, 1024)
        text = part if pa.types.is_large_binary(part.type) else part.cast(pa.large_string())
        yield from text.cast(pa.large_binary()).to_pylist()


def split_by_bucket(table: Table, level: int) -> Iterator[tuple[int, Table]]:
    """Yield the part of a table for each bucket that is not empty."""
    codes = table.sets.dictionary_encode()
    buckets = bucket_of(codes.dictionary, level)[codes.indices.to_numpy()]
    order = np.argsort(buckets, kind="stable")
    present, starts = np.unique(buckets[order], return_index=True)
    for bucket, places in zip(present.tolist(), np.split(order, starts[1:]), strict=True):
        yield bucket, table.take(places)


def append(path: Path, table: Table) -> int:
    """Append a table to a file, and return the number of bytes written."""
    return append_frame(path, table.to_arrow())


def read_tables(path: Path, length: int) -> Iterator[Table]:
    """Yield the tables of a file in the order in which they were appended.

    Args:
        path: The file.
        length: The length up to which it is read.

    Raises:
        FileError: The file is missing, too short or corrupt.
    """
    check_length(path, length)
    position = 0
    while position < length:
        table, position = read_frame(path, position)
        if table is None or position > length:
            raise FileError(f"{path} is corrupt: expected more tables. {START_OVER}")
        yield from_arrow(table)


def truncate(path: Path, length: int) -> None:
    """Truncate a file to a length that it had before. Remove it if the length is 0.

    Raises:
        FileError: The file is shorter than that.
    """
    check_length(path, length)
    if length:
        os.truncate(path, length)
    else:
        path.unlink(missing_ok=True)


def check_length(path: Path, length: int) -> None:
    """Raise FileError if a file is shorter than it was before."""
    size = path.stat().st_size if path.exists() else 0
    if size < length:
        raise FileError(
            f"{path} is corrupt: expected at least {length} bytes, got {size}. {START_OVER}"
        )
