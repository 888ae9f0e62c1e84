"""What comes out: tables of encodings or of states, in the format that the file's name asks for.

A sink writes to a temporary name; whoever opened it renames the file when all is there.
"""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib import format as npy

from setfold.errors import InputError
from setfold.files.tables.table import as_tensor, header_of


class Sink(ABC):
    """Takes tables, all with the same columns.

    Args:
        path: where they go for the time being.
        metadata: entries to be added to the schema's.
    """

    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, path: Path, metadata: Mapping[bytes, bytes] | None = None) -> None:
        self.path = path
        self.metadata = dict(metadata or {})
        self.writer: Any = None

    def write(self, table: pa.Table) -> None:
        """Add a table; the first one decides on the columns."""
        schema = table.schema.with_metadata({**(table.schema.metadata or {}), **self.metadata})
        if self.writer is None:
            self.writer = self._opened(schema)
        self.writer.write_table(table.replace_schema_metadata(schema.metadata))

    @abstractmethod
    def _opened(self, schema: pa.Schema) -> Any:
        """Something to write tables to."""

    def close(self) -> None:
        """Complete the file."""
        if self.writer is not None:
            self.writer.close()


class ParquetSink(Sink):
    """One row for each set; the numbers as fixed-size lists."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")

    def _opened(self, schema: pa.Schema) -> pq.ParquetWriter:
        # Numbers hardly ever repeat, so a dictionary of them costs time and saves nothing.
        return pq.ParquetWriter(self.path, schema, use_dictionary=False, compression="zstd")


class ArrowSink(Sink):
    """The same as an Arrow file, which can be mapped into memory."""

    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc")

    def _opened(self, schema: pa.Schema) -> pa.RecordBatchFileWriter:
        return pa.ipc.new_file(str(self.path), schema)


class NpzSink(ArrowSink):
    """Three arrays for numpy: set (B,), count (B,) and encoding (B, ...)."""

    suffixes: ClassVar[tuple[str, ...]] = (".npz",)

    def close(self) -> None:
        """Turn the Arrow file, in which tables of any number could be collected, into arrays."""
        super().close()
        arrow = self.path.with_name(self.path.name + ".table")
        self.path.rename(arrow)
        with zipfile.ZipFile(self.path, "w") as archive:
            for name in ("set", "count", "encoding"):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    _write_array(file, partial(_blocks, arrow, name))
        arrow.unlink()


def _blocks(path: Path, name: str) -> Iterator[np.ndarray]:
    """A column of an Arrow file as arrays."""
    with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        shape = header_of(file.schema)["shape"]
        batches = (file.get_batch(number) for number in range(file.num_record_batches))
        for batch in batches if file.num_record_batches else [None]:  # without sets too, an array
            table = pa.Table.from_batches([] if batch is None else [batch], file.schema)
            if name == "encoding":
                yield as_tensor(table[name], shape).numpy()
            else:
                yield _plain(table[name])


def _plain(column: pa.ChunkedArray) -> np.ndarray:
    """A column as an array that can be read without pickle."""
    values = column.to_numpy()
    if values.dtype != object:
        return values
    is_binary = pa.types.is_large_binary(column.type)
    items = column.to_pylist()
    if any(item.endswith(b"\0" if is_binary else "\0") for item in items if len(item)):
        raise InputError(
            "numpy cuts off zeros at the end of names, so some of these sets could not be told apart in an .npz file. "
            "Write a .parquet or .arrow file."
        )
    return np.array(items, dtype="S" if is_binary else "U")


def _write_array(file: Any, blocks: Callable[[], Iterator[np.ndarray]]) -> None:
    """An npy file whose parts are read twice: for its shape and type, and for its content."""
    length, dtype, shape = 0, np.dtype("U1"), ()
    for number, block in enumerate(blocks()):
        length, shape = length + len(block), block.shape[1:]
        dtype = np.promote_types(dtype, block.dtype) if number else block.dtype
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (length, *shape)}
    npy.write_array_header_2_0(file, header)
    for block in blocks():
        file.write(block.astype(dtype).tobytes())


SINKS: tuple[type[Sink], ...] = (ParquetSink, ArrowSink, NpzSink)


def sink_for(path: Path) -> type[Sink]:
    """What writes such a file, by its suffix."""
    for sink in SINKS:
        if path.name.lower().endswith(sink.suffixes):
            return sink
    known = ", ".join(suffix for sink in SINKS for suffix in sink.suffixes)
    raise InputError(f"cannot tell the format of {path} by its suffix; known are {known}.")


def refuse_as_target(path: Path) -> None:
    """Raise unless a file can be made there."""
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.parent}; make it first.")
