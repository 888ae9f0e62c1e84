"""Files that hold arrays, each of which is a column and can be sliced by rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from setfold.errors import FileError, InputError
from setfold.files.readers.reader import Reader

WHOLE = "elements"  # the column of a file that is one array


class Sliceable(Protocol):
    """An array, in memory or not, whose rows can be had as numpy's."""

    @property
    def dtype(self) -> Any:
        """As in numpy."""

    @property
    def shape(self) -> Any:
        """As in numpy; the first number is that of the rows."""

    def __getitem__(self, part: slice, /) -> Any:
        """Some rows."""


@dataclass(frozen=True)
class Column:
    """A column that gives any range of its rows.

    Args:
        type: as Arrow sees it.
        length: how many rows it has.
        take: gives the rows [start, stop), as a numpy or an Arrow array.
        grain: how many rows are stored together, and unpacked together whenever one is wanted.
        seekable: whether reading may begin anywhere at no cost.
    """

    type: pa.DataType
    length: int
    take: Callable[[int, int], Any]
    grain: int = 1
    seekable: bool = True


class ColumnReader(Reader):
    """A file of columns. Those of another length belong to another table of the same file."""

    columns: dict[str, Column]

    @abstractmethod
    def _find(self) -> dict[str, Column]:
        """Open the file and tell its columns."""

    def _open(self) -> None:
        self.columns = self._find()
        if not self.columns:
            raise FileError(f"{self.path} holds no array of numbers with at least one dimension.")
        self.schema = pa.schema([(name, column.type) for name, column in self.columns.items()])
        lengths = {column.length for column in self.columns.values()}
        self.num_rows = lengths.pop() if len(lengths) == 1 else None

    def cuts(self, rows: int) -> list[tuple[int, int | None]]:
        if not all(column.seekable for column in self.columns.values()):
            return [(0, self.num_rows)] if self.num_rows != 0 else []
        return super().cuts(_step(list(self.columns.values()), rows))

    def _end(self, columns: list[str]) -> int | None:
        lengths = {name: self.columns[name].length for name in columns}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
            raise InputError(
                f"columns of {self.path} differ in their number of rows: {told}. Choose columns of one "
                "length (--features)."
            )
        return next(iter(lengths.values()), self.num_rows)

    def _batches(
        self, columns: list[str], start: int, stop: int | None, rows: int
    ) -> Iterator[pa.RecordBatch]:
        chosen = [self.columns[name] for name in columns]
        last = 0 if stop is None else stop  # never None: `_end` knows
        step = _step(chosen, rows)
        while start < last:
            end = min(start // step * step + step, last)
            arrays = [arrow_of(column.take(start, end)) for column in chosen]
            block = pa.RecordBatch.from_arrays(arrays, names=columns)
            for first in range(0, block.num_rows, rows):
                yield block.slice(first, rows)
            if block.num_rows < end - start:
                return
            start = end


def _step(columns: list[Column], rows: int) -> int:
    """About `rows` rows, but whole grains, so that none is unpacked twice."""
    grain = max(column.grain for column in columns)
    return max(rows // grain, 1) * grain


def columns_of(name: str, array: Sliceable, **details: Any) -> dict[str, Column]:
    """The columns that an array makes: one, or one for each field; none if they are no columns.

    Args:
        name: what the column is called; fields are called name/field, or just field without a name.
        array: its first dimension is the rows.
        details: of `Column`.
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
    """The fields of a dtype, however deep, and their types in Arrow, if they have one."""
    if dtype.subdtype is not None:
        dtype, shape = dtype.base, shape + dtype.shape
    if dtype.names is not None:
        for name in dtype.names:
            yield from _kinds(dtype[name], shape, (*fields, name))
    elif (kind := type_of(dtype, shape)) is not None:
        yield fields, kind


def type_of(dtype: np.dtype, shape: tuple[int, ...] = ()) -> pa.DataType | None:
    """The type of a column in Arrow; None if there is none, as for complex numbers.

    Args:
        dtype: of its numbers.
        shape: without the rows.

    >>> type_of(np.dtype("<f4"), (3,))
    FixedSizeListType(fixed_size_list<item: float>[3])
    """
    try:
        kind = pa.from_numpy_dtype(dtype.newbyteorder("="))
    except pa.ArrowNotImplementedError:  # numbers that Arrow has not: complex, long double
        return None
    if dtype.hasobject or 0 in shape:
        return None
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    return kind


def arrow_of(block: Any) -> pa.Array:
    """Rows of an array as an Arrow array, without a copy where Arrow allows it.

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
