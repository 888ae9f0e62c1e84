"""Zarr arrays and groups, in both versions of the format."""

from __future__ import annotations

import json
import os
from functools import cache, cached_property
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from setfold.errors import FileError
from setfold.files.readers.column import Column, ColumnReader, columns_of
from setfold.files.readers.containers import object_column
from setfold.files.readers.reader import import_optional

METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
RUNS_CODE = "pickle"  # a codec of numcodecs


class ZarrReader(ColumnReader):
    """Zarr: each array is a column, named by its path.

    A missing chunk is an error. Zarr would return its fill value, whether the chunk was lost, was
    never written, or was left out because it holds nothing but the fill value.
    """

    suffixes: ClassVar = (".zarr",)
    is_folder: ClassVar = True

    def _find(self) -> dict[str, Column]:
        zarr = import_optional("zarr", "zarr")
        _limit_texts()
        # Consolidated metadata could name arrays in other folders.
        root = zarr.open(_store(self.path), mode="r", use_consolidated=False)
        arrays = {"": root}
        if isinstance(root, zarr.Group):
            members = sorted(root.members(max_depth=None))
            arrays = {name: node for name, node in members if isinstance(node, zarr.Array)}
        columns: dict[str, Column] = {}
        for name, array in arrays.items():
            codecs = (*array.filters, *array.compressors)
            if any(getattr(codec, "codec_id", None) == RUNS_CODE for codec in codecs):
                raise FileError(
                    f"{self.path} contains {name!r}, whose codec is {RUNS_CODE!r}. It is not read, "
                    "because that could run code. Write it with another codec."
                )
            rows = _Written(self.path, name, array)
            details = {
                "chunk_rows": rows.grid[0] if array.ndim else 1,
                "chunk_bytes": prod(array.chunks) * array.dtype.itemsize + rows.index_bytes,
                "missing": rows.missing,
            }
            if array.ndim == 1 and array.dtype.kind in "OT":
                columns[name] = object_column(pa.string(), rows, array.shape[0], **details)
            else:
                columns |= columns_of(name, rows, **details)
        return columns


class _Written:
    """An array whose slices contain nothing that was not written.

    Args:
        path: The folder.
        name: The path of the array in it.
        array: The Zarr array.
    """

    def __init__(self, path: Path, name: str, array: Any) -> None:
        self._path, self._name, self._array = path, name, array
        self.dtype, self.shape = array.dtype, array.shape
        self.grid = [max(size, 1) for size in array.shards or array.chunks]  # what is in one file
        inner = prod(self.grid) // max(prod(array.chunks), 1) if array.shards else 0
        self.index_bytes = 16 * inner  # at the end of a shard: where its chunks are

    def missing(self) -> str:
        """Return why a part of the array is not stored; empty if there is a file for each part."""
        expected = prod(-(-size // part) for size, part in zip(self.shape, self.grid, strict=True))
        files = (name for _, _, names in os.walk(self._path / self._name) for name in names)
        chunks = (name for name in files if name not in METADATA)
        found = sum(1 for _ in islice(chunks, expected))
        if found == expected:
            return ""
        return f"at least one chunk of its {expected} {NOT_STORED}."

    def __getitem__(self, part: slice) -> Any:
        found = self._array[part]
        # A shard is one file, so the store does not notice chunks that are missing in it.
        if self._may_be_filled(found) and not _same(found, self._twin[part]):
            start, stop, _ = part.indices(self.shape[0])
            raise ValueError(
                f"a chunk of {self._name!r} in rows {start} to {stop - 1} {NOT_STORED}"
            )
        return found

    def _may_be_filled(self, found: Any) -> bool:
        """Whether fill values of shards may be among some rows."""
        fill = self._array.fill_value
        if self._array.shards is None:
            return False
        return found.dtype.kind in "OT" or fill != fill or bool((found == fill).any())

    @cached_property
    def _twin(self) -> Any:
        """The same array with another fill value."""
        zarr = import_optional("zarr", "zarr")
        store = _store(self._path, other_fill=True)
        return zarr.open_array(store, path=self._name, mode="r")


NOT_STORED = (
    "is not stored: it was lost, never written, or left out because it holds nothing but the fill "
    "value. In the last case, write the array with config={'write_empty_chunks': True}"
)


@cache
def _limit_texts() -> None:
    """Make the decoder of texts check their number, which it would allocate memory for, once.

    Each text takes four bytes for its length at least, so no valid chunk is affected.
    """
    vlen = import_optional("numcodecs.vlen", "zarr")
    decode = vlen.VLenUTF8.decode

    def checked(self: Any, buf: Any, out: Any = None) -> Any:
        data = memoryview(buf).cast("B")
        number = int.from_bytes(data[:4], "little")
        if number > (len(data) - 4) // 4:
            raise ValueError(f"a chunk of {len(data)} bytes cannot hold {number} texts")
        return decode(self, buf, out)

    vlen.VLenUTF8.decode = checked


def _same(found: Any, other: Any) -> bool:
    if found.dtype.kind in "OT":
        return list(found) == list(other)
    return found.tobytes() == other.tobytes()


def _store(path: Path, other_fill: bool = False) -> Any:
    """Return a store of the files in a folder.

    Reading a chunk that does not exist, or a file outside the folder, raises an error.

    Args:
        path: The folder.
        other_fill: Whether to change the fill value of all arrays.
    """
    storage = import_optional("zarr.storage", "zarr")
    root = os.path.realpath(path)

    class Store(storage.WrapperStore):  # type: ignore[name-defined]  # imported at run time
        async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
            path = os.path.realpath(os.path.join(root, key))
            if not path.startswith(root + os.sep):
                raise ValueError(f"{key} is a link to a file outside the folder")
            if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
                raise ValueError(f"{key} is neither a file nor a folder")
            found = await super().get(key, prototype, byte_range)
            is_metadata = key.rpartition("/")[2] in METADATA
            if found is None and not is_metadata:
                raise ValueError(f"the chunk {key} {NOT_STORED}")
            if found is None or not (is_metadata and other_fill):
                return found
            changed = json.loads(found.to_bytes())
            changed["fill_value"] = _other(changed.get("fill_value"), changed.get("data_type"))
            return prototype.buffer.from_bytes(json.dumps(changed).encode())

    return Store(storage.LocalStore(root, read_only=True))


def _other(fill_value: Any, data_type: Any) -> Any:
    """Return another fill value for an array, in JSON."""
    if data_type == "string":
        return f"{fill_value}?"
    if data_type == "bool":
        return not fill_value
    return 1 if fill_value == 0 else 0
