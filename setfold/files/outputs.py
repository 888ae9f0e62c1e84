"""Sinks: write tables of encodings or states, in the format given by the suffix of the output.

A sink writes to a temporary file. The caller renames it when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from numpy.lib import format as npy

from setfold.core.persist import DIGEST_BYTES
from setfold.errors import InputError
from setfold.files.ids import unpack
from setfold.files.sealed import SealedFile, SealedWriter
from setfold.files.tables.arrow import (
    HEADER,
    IDS,
    RESULT,
    as_tensor,
    combined,
    header_of,
    shape_of,
)
from setfold.files.tables.stream import open_arrow

MAX_ID_BYTES = 1 << 14  # of a set id in a NumPy archive; paths are shorter


class Sink(ABC):
    """Writes tables with the same columns to a sealed file.

    Args:
        path: The temporary file.
        metadata: Entries to add to the metadata of the schema.
    """

    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, path: Path, metadata: Mapping[bytes, bytes] | None = None) -> None:
        self.path = path
        self.metadata = dict(metadata or {})
        self.file = SealedWriter(path)
        self.writer: Any = None
        self.rows = 0
        self.names: list[str] = []

    def write(self, table: pa.Table) -> None:
        """Write a table. The first one determines the columns."""
        schema = table.schema.with_metadata({**(table.schema.metadata or {}), **self.metadata})
        if self.writer is None:
            self.writer, self.names = self._open_writer(schema), schema.names
        self.writer.write_table(table.replace_schema_metadata(schema.metadata))
        self.rows += len(table)

    @classmethod
    def can_store(cls, kind: pa.DataType) -> bool:
        """Whether set ids of an Arrow type can be stored."""
        return True

    @classmethod  # noqa: B027 - most formats store all
    def check_ids(cls, sets: pa.Array, types: Sequence[pa.DataType] = ()) -> None:
        """Raise InputError if some set ids of a type that can be stored cannot be stored.

        Args:
            sets: The ids.
            types: The types of their columns, if they have several.
        """

    @abstractmethod
    def _open_writer(self, schema: pa.Schema) -> Any:
        """Return an object with `write_table` and `close` that writes to `self.file`."""

    def close(self) -> None:
        """Finish the file. At least one table must have been written."""
        self.writer.close()
        self.file.seal(self.rows)

    @property
    def result(self) -> str:
        """What `results.published_result` returns for the complete file."""
        return self.metadata[RESULT].decode()


class ParquetSink(Sink):
    """Parquet, with one row per set. Encodings are fixed-size lists."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")

    def _open_writer(self, schema: pa.Schema) -> pq.ParquetWriter:
        # Numbers hardly ever repeat, so dictionary encoding costs time and saves nothing, and
        # compression saves a twelfth for a third of the time. Nobody selects sets by the least
        # number of an encoding. Other tools do not know the seal, but many verify the checksums of
        # pages.
        plain = [field.name for field in schema if not pa.types.is_nested(field.type)]
        return pq.ParquetWriter(
            self.file,
            schema,
            use_dictionary=False,
            compression=dict.fromkeys(plain, "zstd"),
            write_statistics=plain,
            write_page_checksum=True,
        )


class ArrowSink(Sink):
    """Arrow, with the same columns as Parquet. The file can be memory-mapped."""

    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc")

    def _open_writer(self, schema: pa.Schema) -> pa.RecordBatchFileWriter:
        return pa.ipc.new_file(self.file, schema)


class NpzSink(ArrowSink):
    """NumPy archive with three arrays: set (B,), count (B,) and encoding (B, ...).

    If the set id has several columns, each is an array (B,) with its name.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".npz",)

    @classmethod
    def can_store(cls, kind: pa.DataType) -> bool:
        if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
            return True
        return bool(pa.array([], kind).to_numpy(zero_copy_only=False).dtype != object)

    @classmethod
    def check_ids(cls, sets: pa.Array, types: Sequence[pa.DataType] = ()) -> None:
        if types:
            for column in unpack(sets.unique(), types):
                cls.check_ids(column)
            return
        if not (pa.types.is_large_string(sets.type) or pa.types.is_large_binary(sets.type)):
            return
        if pc.any(pc.ends_with(sets, "\0")).as_py():
            raise InputError(
                "NumPy strips trailing zero bytes, so some of these set ids would become equal in "
                "an .npz file. Write a .parquet or .arrow file instead."
            )
        longest = pc.max(pc.binary_length(sets)).as_py() or 0
        if longest > MAX_ID_BYTES:
            raise InputError(
                f"a set id has {longest:,} bytes, and NumPy stores all ids with the length of the "
                f"longest; at most {MAX_ID_BYTES:,} are supported in an .npz file. Write a .parquet "
                "or .arrow file instead."
            )

    def close(self) -> None:
        """Convert the Arrow file, in which the tables were collected, into arrays."""
        super().close()
        arrow = self.path.with_name(self.path.name + ".table")
        self.path.rename(arrow)
        with zipfile.ZipFile(self.path, "w") as archive:
            for name in self.names:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    _write_array(file, partial(_blocks, arrow, name))
            archive.comment = RESULT + b"=" + self.metadata[RESULT]
        arrow.unlink()


class CsvSink(Sink):
    """CSV with the columns of Parquet, but one column for each number of an encoding.

    They are named encoding_0, encoding_1, ..., or probability_LABEL if they are probabilities.

    There is no place for a seal. So a CSV file is recognized by a digest of its content.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".csv",)

    def __init__(self, path: Path, metadata: Mapping[bytes, bytes] | None = None) -> None:
        self.path, self.metadata, self.writer = path, dict(metadata or {}), None

    @classmethod
    def can_store(cls, kind: pa.DataType) -> bool:
        if "binary" in str(kind):
            return False  # its bytes would be written as they are
        try:
            pacsv.write_csv(pa.table({"set": pa.array([None], kind)}), pa.BufferOutputStream())
        except pa.ArrowException:
            return False
        return True

    def write(self, table: pa.Table) -> None:
        header = header_of(table.schema, "encodings")
        numbers = as_tensor(table["encoding"], shape_of(header))
        flat = numbers.reshape(len(table), math.prod(numbers.shape[1:]))
        columns = table.drop_columns("encoding").replace_schema_metadata(None)
        classes = header.get("classes")
        for place, part in enumerate(flat.T.contiguous().numpy()):
            name = f"probability_{classes[place]}" if classes else f"encoding_{place}"
            columns = columns.append_column(name, pa.array(part))
        if self.writer is None:
            self.writer = self._open_writer(columns.schema)
        self.writer.write_table(columns)

    def _open_writer(self, schema: pa.Schema) -> pacsv.CSVWriter:
        return pacsv.CSVWriter(str(self.path), schema)

    def close(self) -> None:
        self.writer.close()

    @property
    def result(self) -> str:
        return digest_of_content(self.path)


def split_ids(table: pa.Table, fields: Sequence[tuple[str, pa.DataType]]) -> pa.Table:
    """Return a table of encodings with the columns of the set ids in place of the ids.

    `encodings.ids_in` is the inverse.

    Args:
        table: The columns set, count and encoding.
        fields: Names and types of the columns of an id; empty if an id is one value.
    """
    if not fields:
        return table
    names, types = zip(*fields, strict=True)
    columns = unpack(combined(table["set"]), types)
    metadata = dict(table.schema.metadata)
    metadata[HEADER] = json.dumps(json.loads(metadata[HEADER]) | {IDS: names}).encode()
    others = table.drop_columns("set")
    found = pa.table([*columns, *others.columns], names=[*names, *others.column_names])
    return found.replace_schema_metadata(metadata)


def digest_of_content(path: Path) -> str:
    """Return a digest of all bytes of a file, which has no place for one."""
    with path.open("rb") as file:
        return hashlib.file_digest(
            file, partial(hashlib.blake2b, digest_size=DIGEST_BYTES)
        ).hexdigest()


def _blocks(path: Path, name: str) -> Iterator[np.ndarray]:
    """Yield a column of an Arrow file as arrays."""
    with SealedFile(path) as file:
        stream = open_arrow(file)
        shape = shape_of(header_of(stream.schema, "encodings", path))
        no_rows = pa.RecordBatch.from_pylist([], stream.schema)
        for batch in chain([no_rows], stream):  # at least one block, which has the dtype
            column = pa.chunked_array([batch.column(name)])
            yield as_tensor(column, shape).numpy() if name == "encoding" else _plain(column)


def _plain(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column as an array that can be loaded without pickle."""
    values, kind = column.to_numpy(), column.type
    if values.dtype != object:
        return values
    is_binary = pa.types.is_large_binary(kind)
    if not (is_binary or pa.types.is_large_string(kind)):
        raise InputError(
            f"set ids of type {kind} cannot be stored in an .npz file. Write a .parquet or .arrow "
            "file instead."
        )
    items = column.to_pylist()
    return np.array(items, dtype="S" if is_binary else "U")


def _write_array(file: Any, blocks: Callable[[], Iterator[np.ndarray]]) -> None:
    """Write blocks as one npy file. They are read twice: for shape and dtype, and for content."""
    length, dtype, shape = 0, np.dtype("U1"), ()
    for number, block in enumerate(blocks()):
        length, shape = length + len(block), block.shape[1:]
        dtype = np.promote_types(dtype, block.dtype) if number else block.dtype
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (length, *shape)}
    npy.write_array_header_2_0(file, header)
    for block in blocks():
        file.write(block.astype(dtype).tobytes())


SINKS: tuple[type[Sink], ...] = (ParquetSink, ArrowSink, NpzSink, CsvSink)


def sink_for(path: Path) -> type[Sink]:
    """Return the sink class for a file, by suffix."""
    for sink in SINKS:
        if path.name.lower().endswith(sink.suffixes):
            return sink
    known = ", ".join(suffix for sink in SINKS for suffix in sink.suffixes)
    raise InputError(f"unknown suffix of {path}; expected one of {known}. Rename the output.")


def check_target(path: Path) -> None:
    """Raise InputError if a file cannot be created at a path."""
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder. Pass the name of a file.")
    if not path.parent.is_dir():
        raise InputError(
            f"cannot write {path}: the folder {path.parent} does not exist. Create it first."
        )
