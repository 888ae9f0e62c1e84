"""Files of encodings: what is in them, and whether it is intact.

`outputs.py` writes them. setfold itself reads them only to describe and to verify them.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib import format as npy

from setfold.files.sealed import ARROW, SealedFile
from setfold.files.tables.arrow import (
    RESULT,
    as_counts,
    as_ids,
    as_tensor,
    check_names,
    check_sorted,
    header_of,
    result_of,
    shape_of,
)
from setfold.files.tables.stream import open_arrow, reading

COLUMNS = ("set", "count", "encoding")
ADVICE = "Write it again."
ROWS = 1 << 14  # to read at once from a Parquet file
ZIP = b"PK\3\4"  # at the beginning of an archive


class Encodings(NamedTuple):
    """What is in a file of encodings.

    Args:
        sets: The number of sets.
        set_type: The type of their ids.
        shape: The shape of an encoding.
    """

    sets: int
    set_type: str
    shape: tuple[int, ...]


def describe_encodings(path: Path) -> Encodings:
    """Return what is in a file, without reading the encodings.

    Raises:
        FileError: The file is truncated or corrupt, or contains something else.
    """
    with reading(path, ADVICE):
        if is_archive(path):
            with zipfile.ZipFile(path) as archive:
                (shape, dtype), _, (encoding, _) = (_header(archive, name) for name in COLUMNS)
                return Encodings(shape[0], str(dtype), encoding[1:])
        with open_table(path) as (schema, sets, _):
            shape = shape_of(header_of(schema, "encodings", path))
            return Encodings(sets, str(schema.field("set").type), shape)


def verify_encodings(path: Path) -> Encodings:
    """Read a whole file, and return what is in it.

    Raises:
        FileError: A byte has changed since the file was written, or the file contains something
            that `encode` does not write.
    """
    found = describe_encodings(path)
    with reading(path, ADVICE):
        if is_archive(path):
            _verify_arrays(path)
            return found
        with open_table(path) as (_, _, batches):
            sets, last = 0, None
            for batch in batches:
                table = pa.Table.from_batches([batch])
                check_names(table, COLUMNS)
                last = check_sorted(as_ids(table["set"]), last)
                if bool((as_counts(table["count"]) < 0).any()):
                    raise ValueError("a count is negative")
                as_tensor(table["encoding"], found.shape)
                sets += len(table)
        if sets != found.sets:
            raise ValueError(f"expected {found.sets} sets; got {sets}")
    return found


def is_archive(path: Path) -> bool:
    """Whether a file begins like a NumPy archive."""
    with path.open("rb") as file:
        return file.read(len(ZIP)) == ZIP


@contextmanager
def open_table(path: Path) -> Iterator[tuple[pa.Schema, int, Iterable[pa.RecordBatch]]]:
    """Yield the schema of an Arrow or Parquet file, the number of rows, and the rows."""
    with SealedFile(path) as file:
        if file.format == ARROW:
            stream = open_arrow(file)
            yield stream.schema, file.seal.rows, stream
        else:
            with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
                batches = map(_validated, parquet.iter_batches(ROWS, use_threads=False))
                yield parquet.schema_arrow, file.seal.rows, batches


def _validated(batch: pa.RecordBatch) -> pa.RecordBatch:
    batch.validate(full=True)
    return batch


# ---- NumPy archives ----------------------------------------------------------------------------


def result_in(archive: zipfile.ZipFile) -> str:
    """Return the digest of what an archive is the result of. It is in the comment.

    Raises:
        ValueError: There is none.
    """
    name, _, digest = archive.comment.partition(b"=")
    return result_of(digest if name == RESULT else None)


def _verify_arrays(path: Path) -> None:
    """Raise an error if an array of an archive is damaged or not what `NpzSink` writes."""
    with zipfile.ZipFile(path) as archive:
        result_in(archive)
        if archive.namelist() != [f"{name}.npy" for name in COLUMNS]:
            raise ValueError(f"expected the arrays {', '.join(COLUMNS)}")
        lengths = {_header(archive, name)[0][0] for name in COLUMNS}
        if len(lengths) != 1:
            raise ValueError("its arrays have different lengths")
        if (damaged := archive.testzip()) is not None:  # compares checksums
            raise ValueError(f"the checksum of {damaged} does not match its content")
    with np.load(path, allow_pickle=False) as arrays:
        names, counts = arrays["set"], arrays["count"]
    if names.ndim != 1 or not bool((names[:-1] < names[1:]).all()):
        raise ValueError("the sets are not sorted, or one is listed twice")
    if counts.dtype != np.int64 or counts.ndim != 1 or bool((counts < 0).any()):
        raise ValueError("a count is negative or not int64")


def _header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of an array in an archive.

    Raises:
        ValueError: It is compressed, or has another size than its header says.
    """
    member = archive.getinfo(f"{name}.npy")
    with archive.open(member) as file:
        if npy.read_magic(file) != (2, 0):
            raise ValueError(f"{name} has another version of NumPy's format")
        shape, in_columns, dtype = npy.read_array_header_2_0(file)
        size = file.tell() + math.prod(shape) * dtype.itemsize
    if member.compress_type != zipfile.ZIP_STORED or member.file_size != size or not shape:
        raise ValueError(f"{name} has another size than its header says")
    if in_columns or dtype.hasobject:
        raise ValueError(f"{name} is not an array of plain values")
    return shape, dtype
