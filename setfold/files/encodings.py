"""Files of encodings: what is in them, and whether it is intact.

`outputs.py` writes them. setfold itself reads them only to describe and to verify them.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib import format as npy

from setfold.files.ids import pack
from setfold.files.sealed import ARROW, SealedFile
from setfold.files.tables.arrow import (
    COLUMNS,
    IDS,
    RESULT,
    as_counts,
    as_ids,
    as_tensor,
    check_names,
    check_sorted,
    combined,
    header_of,
    result_of,
    shape_of,
)
from setfold.files.tables.stream import open_arrow, reading

PREDICTION = "prediction"  # column between count and encoding, if the model predicts a target
TARGET = "target"  # entry of the header: its name
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
                names = _names(archive)
                ids = [_header(archive, name) for name in _ids_in(names)]
                (shape, _), (encoding, _) = (_header(archive, n) for n in COLUMNS[1:])
                kinds = ", ".join(str(dtype) for _, dtype in ids)
                return Encodings(shape[0], kinds, encoding[1:])
        with open_table(path) as (schema, sets, _):
            header = header_of(schema, "encodings", path)
            kinds = ", ".join(str(schema.field(name).type) for name in _ids_of(header))
            return Encodings(sets, kinds, shape_of(header))


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
        with open_table(path) as (schema, _, batches):
            header = header_of(schema, "encodings", path)
            ids, more = _ids_of(header), [PREDICTION] if TARGET in header else []
            sets, last = 0, None
            for batch in batches:
                table = pa.Table.from_batches([batch])
                check_names(table, [*ids, "count", *more, "encoding"])
                last = check_sorted(_joined([as_ids(table[name]) for name in ids]), last)
                if bool((as_counts(table["count"]) < 0).any()):
                    raise ValueError("a count is negative")
                as_tensor(table["encoding"], found.shape)
                sets += len(table)
        if sets != found.sets:
            raise ValueError(f"expected {found.sets} sets; got {sets}")
    return found


def ids_in(table: pa.Table) -> pa.Array:
    """Return the set ids of encodings as one column, the inverse of `outputs.split_ids`."""
    names = _ids_of(header_of(table.schema, "encodings"))
    return _joined([combined(table[name]) for name in names])


def _ids_of(header: dict[str, Any]) -> list[str]:
    """Return the columns of the set ids."""
    ids = header.get(IDS, [COLUMNS[0]])
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        raise ValueError(f"expected the columns of the set ids; got {ids!r:.60}")
    return ids


def _joined(columns: list[pa.Array]) -> pa.Array:
    """Return set ids as one column that can be compared."""
    return columns[0] if len(columns) == 1 else pack(columns)


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
        known = _names(archive)
        lengths = {_header(archive, name)[0][0] for name in known}
        if len(lengths) != 1:
            raise ValueError("its arrays have different lengths")
        if (damaged := archive.testzip()) is not None:  # compares checksums
            raise ValueError(f"the checksum of {damaged} does not match its content")
    with np.load(path, allow_pickle=False) as arrays:
        ids, counts = [arrays[name] for name in _ids_in(known)], arrays["count"]
    if any(column.ndim != 1 for column in ids):
        raise ValueError("the set ids are not plain values")
    if len(ids) > 1:
        check_sorted(pack([_packable(column) for column in ids]), None)
    elif not bool((ids[0][:-1] < ids[0][1:]).all()):
        raise ValueError("the sets are not sorted, or one is listed twice")
    if counts.dtype != np.int64 or counts.ndim != 1 or bool((counts < 0).any()):
        raise ValueError("a count is negative or not int64")


def _names(archive: zipfile.ZipFile) -> list[str]:
    """Return the arrays of an archive: the set ids, counts, predictions if any, and encodings.

    Raises:
        ValueError: There are others.
    """
    names = [name.removesuffix(".npy") for name in archive.namelist()]
    ids = _ids_in(names)
    ends = ["count", "encoding"], ["count", PREDICTION, "encoding"]
    if not ids or names[len(ids) :] not in ends or (len(ids) == 1 and ids[0] != COLUMNS[0]):
        raise ValueError(f"expected the arrays {', '.join(COLUMNS)}")
    return names


def _ids_in(names: Sequence[str]) -> list[str]:
    """Return the arrays of the set ids."""
    return list(names[: names.index("count")]) if "count" in names else []


def _packable(column: np.ndarray) -> pa.Array:
    """Return an array of an archive with a type that `pack` takes."""
    array = pa.array(column)
    return array.cast(pa.large_string()) if column.dtype.kind == "U" else array


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
