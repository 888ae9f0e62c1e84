"""The base class of readers for files that hold arrays, one for each column."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from setfold.errors import FileError, InputError
from setfold.files.readers.reader import Reader, width_of

WHOLE = "elements"  # name of the column in a file that is a single array


class Sliceable(Protocol):
    """An array, in memory or on disk, whose slices are NumPy arrays."""

    @property
    def dtype(self) -> Any:
        """As in NumPy."""

    @property
    def shape(self) -> Any:
        """As in NumPy; the first dimension is the rows."""

    def __getitem__(self, part: slice, /) -> Any:
        """Return a range of rows."""


@dataclass(frozen=True)
class Column:
    """A column from which any range of rows can be read.

    Args:
        type: The Arrow type.
        length: The number of rows.
        take: Returns the rows [start, stop) as a NumPy or Arrow array.
        chunk_rows: The number of rows that are stored, and decompressed, together.
        chunk_bytes: The size of a chunk in memory, if it may be larger than its rows.
        seekable: Whether it is cheap to start reading at any row.
        missing: Returns why a part of the column is not stored in the file; empty if all of it is.
    """

    type: pa.DataType
    length: int
    take: Callable[[int, int], Any]
    chunk_rows: int = 1
    chunk_bytes: int = 0
    seekable: bool = True
    missing: Callable[[], str] = str


class ColumnReader(Reader):
    """A file of columns. Columns of different lengths belong to different tables of the file."""

    columns: dict[str, Column]

    @abstractmethod
    def _find(self) -> dict[str, Column]:
        """Open the file and return its columns."""

    def _open(self) -> None:
        self.columns = self._find()
        if not self.columns:
            raise FileError(
                f"{self.path} has no numeric array with at least one dimension. Pass a file that "
                "has one."
            )
        self.schema = pa.schema([(name, column.type) for name, column in self.columns.items()])
        lengths = {column.length for column in self.columns.values()}
        self.num_rows = lengths.pop() if len(lengths) == 1 else None

    def check(self, columns: Sequence[str]) -> None:
        self._end(list(columns))
        for name in columns:
            try:
                reason = self.columns[name].missing()
            except Exception as error:  # of the library
                reason = f"{type(error).__name__}: {error}. Write the file again."
            if reason:
                raise FileError(f"cannot read {name!r} of {self.path}: {reason}")

    def block_bytes(self, columns: Sequence[str]) -> int:
        chosen = [self.columns[name] for name in columns]
        rows = min(_align(chosen, 1), max(column.length for column in chosen))
        largest = max(column.chunk_bytes for column in chosen)
        return max(rows * sum(width_of(column.type) for column in chosen), largest)

    def cuts(self, rows: int) -> list[tuple[int, int | None]]:
        if not all(column.seekable for column in self.columns.values()):
            return [(0, self.num_rows)] if self.num_rows != 0 else []
        return super().cuts(_align(list(self.columns.values()), rows))

    def _end(self, columns: list[str]) -> int | None:
        lengths = {name: self.columns[name].length for name in columns}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
            raise InputError(
                f"columns of {self.path} differ in their number of rows: {counts}. Select columns "
                "of one length with --features and --keep, or write the file again."
            )
        return next(iter(lengths.values()), self.num_rows)

    def _batches(
        self, columns: list[str], start: int, stop: int | None, rows: int
    ) -> Iterator[pa.RecordBatch]:
        chosen = [self.columns[name] for name in columns]
        last = 0 if stop is None else stop  # never None, because `_end` is known
        step = _align(chosen, rows)
        while start < last:
            end = min(start // step * step + step, last)
            arrays = [arrow_of(column.take(start, end)) for column in chosen]
            block = pa.RecordBatch.from_arrays(arrays, names=columns)
            for first in range(0, block.num_rows, rows):
                yield block.slice(first, rows)
            if block.num_rows < end - start:
                return
            start = end


def _align(columns: list[Column], rows: int) -> int:
    """Round `rows` to a multiple of the chunk size, so that no chunk is decompressed twice."""
    chunk_rows = max(column.chunk_rows for column in columns)
    return max(rows // chunk_rows, 1) * chunk_rows


def columns_of(name: str, array: Sliceable, **details: Any) -> dict[str, Column]:
    """Return the columns of an array: one, or one for each field. A scalar has no columns.

    Args:
        name: The name of the column. Fields are named name/field, or field if the name is empty.
        array: The array; its first dimension is the rows.
        details: More arguments of `Column`.
    """
    if len(array.shape) == 0:
        return {}
    return {
        "/".join(filter(None, (name, *fields))) or WHOLE: Column(
            kind, array.shape[0], _taker(array, fields), **details
        )
        for fields, kind in _kinds(np.dtype(array.dtype), tuple(array.shape[1:]), ())
    }


def _taker(array: Sliceable, fields: tuple[str, ...]) -> Callable[[int, int], Any]:
    def take(start: int, stop: int) -> Any:
        rows = array[start:stop]
        for field in fields:
            rows = rows[field]
        return rows

    return take


def _kinds(
    dtype: np.dtype, shape: tuple[int, ...], fields: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], pa.DataType]]:
    """Yield the fields of a dtype, also nested ones, and their Arrow types, if there is one."""
    if dtype.subdtype is not None:
        dtype, shape = dtype.base, shape + dtype.shape
    if dtype.names is not None:
        for name in dtype.names:
            yield from _kinds(dtype[name], shape, (*fields, name))
    elif (kind := type_of(dtype, shape)) is not None:
        yield fields, kind


def type_of(dtype: np.dtype, shape: tuple[int, ...] = ()) -> pa.DataType | None:
    """Return the Arrow type of a column; None if there is none, as for complex numbers.

    Args:
        dtype: The dtype of the array.
        shape: The shape of the array without the rows.

    >>> type_of(np.dtype("<f4"), (3,))
    FixedSizeListType(fixed_size_list<item: float>[3])
    """
    try:
        kind = pa.from_numpy_dtype(dtype.newbyteorder("="))
    except pa.ArrowNotImplementedError:  # not supported by Arrow: complex, long double
        return None
    if dtype.hasobject or 0 in shape:
        return None
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    return kind


def arrow_of(block: Any) -> pa.Array:
    """Convert rows of an array to an Arrow array, without a copy if possible.

    Args:
        block: `(n,)` becomes a plain column, `(n, d)` fixed-size lists, and so on.

    >>> arrow_of(np.zeros((2, 1), "f4")).to_pylist()
    [[0.0], [0.0]]
    """
    if isinstance(block, pa.Array):
        return block
    block = np.ascontiguousarray(block, dtype=block.dtype.newbyteorder("="))
    array = pa.array(block.reshape(-1))
    for size in reversed(block.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array
