"""Tables on disk: one after the other in files that only grow.

A file is a row of Arrow streams. Growing is all that happens to it, so a run that was killed in the
middle goes on from a length that it noted earlier: what stands behind it is cut off.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from setfold.errors import FileError
from setfold.files.tables.table import Table, from_arrow

BUCKET_BITS = 6
BUCKETS = 1 << BUCKET_BITS
LEVELS = 32 // BUCKET_BITS  # how often a bucket can be divided again


def bucket_of(sets: pa.Array, level: int) -> np.ndarray:
    """The bucket (N,) of each set: a hash of its name, other bits of it at each level.

    >>> bool((bucket_of(pa.array([7, 8, 7]), 0) == bucket_of(pa.array([7, 8, 7]), 0)).all())
    True
    """
    if pa.types.is_integer(sets.type):
        mixed = sets.to_numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        hashes = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes >>= np.uint64(32)
    else:
        hashes = np.fromiter(map(zlib.crc32, _as_bytes(sets)), np.uint64, len(sets))
    return (hashes >> np.uint64(level * BUCKET_BITS)).astype(np.int64) % BUCKETS


def _as_bytes(sets: pa.Array) -> Iterator[bytes]:
    """The names of sets as bytes, a few at a time: they may be long."""
    for start in range(0, len(sets), 1024):
        some = sets.slice(start, 1024)
        text = some if pa.types.is_large_binary(some.type) else some.cast(pa.large_string())
        yield from text.cast(pa.large_binary()).to_pylist()


def divided(table: Table, level: int) -> Iterator[tuple[int, Table]]:
    """The parts of a table that belong to each bucket, those with nothing left out."""
    codes = table.sets.dictionary_encode()
    buckets = bucket_of(codes.dictionary, level)[codes.indices.to_numpy()]
    order = np.argsort(buckets, kind="stable")
    present, starts = np.unique(buckets[order], return_index=True)
    for bucket, places in zip(present.tolist(), np.split(order, starts[1:]), strict=True):
        yield bucket, table.take(places)


def append(path: Path, table: Table) -> int:
    """Add a table to a file; gives the number of bytes."""
    with path.open("ab") as file:
        before = file.tell()
        arrow = table.to_arrow()
        with pa.ipc.new_stream(file, arrow.schema) as stream:
            stream.write_table(arrow)
        return file.tell() - before


def tables_in(path: Path) -> Iterator[Table]:
    """The tables of a file, from the first to the last."""
    size = path.stat().st_size
    with pa.OSFile(str(path)) as file:
        while file.tell() < size:
            try:
                table = pa.ipc.open_stream(file).read_all()
            except (pa.ArrowException, OSError) as error:
                raise FileError(
                    f"{path} is damaged ({error}). Begin the run anew, without --resume."
                ) from error
            yield from_arrow(table)


def shorten(path: Path, length: int) -> None:
    """Cut off what was added after a file had some length.

    Raises:
        FileError: it is shorter than that.
    """
    size = path.stat().st_size if path.exists() else 0
    if size < length:
        raise FileError(
            f"{path} has {size} bytes, and had {length}: it was damaged. Begin the run anew, without --resume."
        )
    if length:
        os.truncate(path, length)
    else:
        path.unlink(missing_ok=True)
