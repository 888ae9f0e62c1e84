"""Data frames of several libraries as Arrow record batches, and results in kind.

No library is imported: an object of pandas, polars or DuckDB can only come from a module that is
already imported.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from setfold.errors import InputError

DUCKDB_ROWS = 1 << 16  # DuckDB reuses the memory of batches of this size, but not of larger ones
KNOWN = (
    "a pandas or polars DataFrame, a DuckDB relation, an Arrow table or reader, or another object "
    "with the Arrow PyCapsule interface (__arrow_c_stream__)"
)


class Frame(ABC):
    """A data frame.

    Args:
        frame: The object of a library.
        rows: The maximum number of rows of a batch.

    Attributes:
        schema: The columns.
    """

    schema: pa.Schema

    def __init__(self, frame: Any, rows: int) -> None:
        self.frame, self.rows = frame, rows
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Set `schema`."""

    @abstractmethod
    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield some columns of all rows, in order. The batches of a reader can be read once."""

    def check(self, names: Sequence[str]) -> None:  # noqa: B027 - most frames have columns only
        """Raise InputError if some columns are in a part of the frame that is not read."""

    def convert(self, result: pa.Table, names: Sequence[str], shape: tuple[int, ...]) -> Any:
        """Return a table as an object of the same library.

        Args:
            result: The table.
            names: Its columns that are columns of the frame, too. They get the same types.
            shape: The shape of an encoding.
        """
        for name in names:
            place, kind = result.schema.get_field_index(name), self.schema.field(name).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            result = result.set_column(place, name, result[name].cast(kind))
        return self._convert(result, names, shape)

    def _convert(self, result: pa.Table, names: Sequence[str], shape: tuple[int, ...]) -> Any:
        return result


class ArrowFrame(Frame):
    """A table, a record batch, a reader, or any object with the Arrow PyCapsule interface."""

    def _open(self) -> None:
        self._stream: Any = self.frame
        if isinstance(self.frame, pa.RecordBatch):
            self._stream = pa.Table.from_batches([self.frame])
        elif not isinstance(self.frame, pa.Table | pa.RecordBatchReader):
            self._stream = self._reader()
        self.schema = self._stream.schema

    def _reader(self) -> Any:
        try:
            return pa.RecordBatchReader.from_stream(self.frame)
        except pa.ArrowException as error:  # it is a single column, or has types of its own
            raise InputError(
                f"Arrow cannot read this {type(self.frame).__name__} as a table ({error}). Pass a "
                "frame whose columns have types of Arrow."
            ) from error

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        is_table = isinstance(self._stream, pa.Table)
        source = self._stream.to_batches() if is_table else self._stream
        yield from regrouped((batch.select(list(names)) for batch in source), self.rows)


class PolarsFrame(ArrowFrame):
    """A polars DataFrame."""

    def _convert(self, result: pa.Table, names: Sequence[str], shape: tuple[int, ...]) -> Any:
        polars = sys.modules["polars"]
        converted = polars.DataFrame(result)
        return converted.with_columns(polars.col(n).cast(self.frame.schema[n]) for n in names)


class DuckDBFrame(ArrowFrame):
    """A DuckDB relation. The result belongs to the same connection."""

    def _reader(self) -> Any:
        return self.frame.to_arrow_reader(min(self.rows, DUCKDB_ROWS))

    def _convert(self, result: pa.Table, names: Sequence[str], shape: tuple[int, ...]) -> Any:
        setfold_result = result  # noqa: F841 - DuckDB finds the table by the name of the variable
        return self.frame.query("setfold_rows", "SELECT * FROM setfold_result")


class PandasFrame(Frame):
    """A pandas DataFrame. Its index is ignored."""

    def _open(self) -> None:
        names = [str(name) for name in self.frame.columns]
        self.schema = pa.schema(
            [(name, self._type(place)) for place, name in enumerate(names)],
        )
        self._places = {name: place for place, name in enumerate(names)}

    def check(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._places and name in self.frame.index.names:
                raise InputError(
                    f"{name!r} is in the index, which is ignored. Call frame.reset_index() first."
                )

    def _type(self, place: int) -> pa.DataType:
        column = self.frame.iloc[:, place]
        # The first objects determine the type, as the first rows of a text file do.
        column = column.dropna().head(1000) if column.dtype == object else column.head(0)
        try:
            return pa.array(column, from_pandas=True).type
        except (pa.ArrowException, TypeError, ValueError):  # no type of Arrow holds it
            return pa.struct([])  # neither a feature nor a set id

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for start in range(0, len(self.frame), self.rows):
            part = self.frame.iloc[start : start + self.rows]
            arrays = [self._array(part, name, start) for name in names]
            yield pa.RecordBatch.from_arrays(arrays, names=list(names))

    def _array(self, part: Any, name: str, start: int) -> pa.Array:
        column, kind = part.iloc[:, self._places[name]], self.schema.field(name).type
        if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iufb":
            return pa.array(column.to_numpy())  # NaN stays NaN, which is found later
        try:
            found = pa.array(column, kind, from_pandas=True)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InputError(
                f"column {name!r}, rows {start} to {start + len(part) - 1}: expected {kind}, as in "
                f"the first rows ({error}). Convert the column to one type."
            ) from error
        return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found

    def _convert(self, result: pa.Table, names: Sequence[str], shape: tuple[int, ...]) -> Any:
        pandas = sys.modules["pandas"]
        converted = result.drop_columns("encoding").to_pandas()
        for name in names:
            dtype = self.frame.dtypes.iloc[self._places[name]]
            converted[name] = converted[name].astype(dtype)
        flat = result["encoding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        encodings = list(flat.reshape(len(result), *shape))
        converted["encoding"] = pandas.Series(encodings, dtype=object)
        return converted


def open_frame(frame: object, rows: int, what: str = "frame") -> Frame:
    """Open a data frame.

    Args:
        frame: An object of pandas, polars, DuckDB, Arrow or another library.
        rows: The maximum number of rows of a batch.
        what: The name of the argument, for error messages.

    Raises:
        InputError: It is of no known kind.

    >>> opened = open_frame(pa.table({"x": [1.0, 2.0, 3.0]}), rows=2)
    >>> [batch.num_rows for batch in opened.batches(["x"])]
    [2, 1]
    """
    for module, name, kind in (
        ("pandas", "DataFrame", PandasFrame),
        ("polars", "DataFrame", PolarsFrame),
        ("duckdb", "DuckDBPyRelation", DuckDBFrame),
    ):
        imported = sys.modules.get(module)
        if imported is not None and isinstance(frame, getattr(imported, name, ())):
            return kind(frame, rows)
    if hasattr(frame, "__arrow_c_stream__") or isinstance(frame, pa.RecordBatch):
        return ArrowFrame(frame, rows)
    advice = " Collect it first." if hasattr(frame, "collect") else ""
    raise InputError(f"{what} must be {KNOWN}; got {type(frame).__name__}.{advice}")


def regrouped(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the same rows, `rows` at a time; fewer at the end, or where the types change.

    >>> parts = [pa.record_batch({"x": [1, 2, 3]}), pa.record_batch({"x": [4]})]
    >>> [batch.num_rows for batch in regrouped(parts, 2)]
    [2, 2]
    """
    pending: list[pa.RecordBatch] = []
    size = 0
    for some in batches:
        if pending and pending[0].schema != some.schema:
            yield _joined(pending)
            pending, size = [], 0
        while size + some.num_rows >= rows:
            rest = rows - size
            yield _joined([*pending, some.slice(0, rest)])
            some, pending, size = some.slice(rest), [], 0
        if some.num_rows:
            pending.append(some)
            size += some.num_rows
    if pending:
        yield _joined(pending)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Return several batches as one."""
    if len(batches) == 1:
        return batches[0]
    arrays = [
        pa.concat_arrays([batch.column(place) for batch in batches])
        for place in range(batches[0].num_columns)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=batches[0].schema)
