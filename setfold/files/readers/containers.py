"""Containers of named, possibly nested arrays: HDF5, Zarr and PyTorch files."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from setfold.errors import FileError
from setfold.files.readers.column import Column, ColumnReader, columns_of, type_of
from setfold.files.readers.reader import import_optional

if TYPE_CHECKING:  # torch takes seconds to import, and other formats do not need it
    from torch import Tensor


class Hdf5Reader(ColumnReader):
    """HDF5: each dataset is a column, named by its path. Text and ragged arrays are supported."""

    suffixes: ClassVar = (".h5", ".hdf5")

    def _find(self) -> dict[str, Column]:
        h5py = import_optional("h5py", "hdf5")
        self._file = h5py.File(self.path, "r")
        columns: dict[str, Column] = {}

        def visit(name: str, node: Any) -> None:
            if not isinstance(node, h5py.Dataset) or not node.shape:
                return
            chunk_rows = node.chunks[0] if node.chunks else 1
            kind, rows = None, node
            if h5py.check_string_dtype(node.dtype):
                kind, rows = pa.string(), node.asstr()
            elif base := h5py.check_vlen_dtype(node.dtype):
                kind = pa.list_(type_of(base))
            if kind is None:
                columns.update(columns_of(name, node, chunk_rows=chunk_rows))
            elif node.ndim == 1:
                columns[name] = _object_column(kind, rows, len(node), chunk_rows)

        self._file.visititems(visit)
        return columns

    def close(self) -> None:
        self._file.close()


class ZarrReader(ColumnReader):
    """Zarr: each array is a column, named by its path. Missing chunks have Zarr's fill value."""

    suffixes: ClassVar = (".zarr",)
    is_folder: ClassVar = True

    def _find(self) -> dict[str, Column]:
        zarr = import_optional("zarr", "zarr")
        root = zarr.open(str(self.path), mode="r")
        arrays = {"": root}
        if isinstance(root, zarr.Group):
            members = sorted(root.members(max_depth=None))
            arrays = {name: node for name, node in members if isinstance(node, zarr.Array)}
        columns: dict[str, Column] = {}
        for name, array in arrays.items():
            chunk_rows = (array.shards or array.chunks)[0] if array.ndim else 1
            if array.ndim == 1 and array.dtype.kind in "OT":
                columns[name] = _object_column(pa.string(), array, array.shape[0], chunk_rows)
            else:
                columns |= columns_of(name, array, chunk_rows=chunk_rows)
        return columns


def _object_column(kind: pa.DataType, array: Any, length: int, chunk_rows: int) -> Column:
    """Return a column of Python objects: text, or arrays of variable length."""

    def take(start: int, stop: int) -> pa.Array:
        return pa.array(list(array[start:stop]), kind)

    return Column(kind, length, take, chunk_rows)


class TorchReader(ColumnReader):
    """PyTorch: a tensor, or tensors in dicts, lists and tuples, memory-mapped. No unpickling."""

    suffixes: ClassVar = (".pt", ".pth")

    def _find(self) -> dict[str, Column]:
        import torch

        try:
            found = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise FileError(
                f"{self.path} is corrupt, or contains objects other than tensors. Those are not "
                "loaded, because that could run code. Save a dict of tensors with torch.save."
            ) from error
        columns: dict[str, Column] = {}
        for name, tensor in _tensors("", found):
            columns |= columns_of(name, _TensorSlices(tensor))
        return columns


def _tensors(name: str, found: Any) -> Iterator[tuple[str, Tensor]]:
    import torch

    if isinstance(found, torch.Tensor):
        if found.layout == torch.strided and not found.is_quantized:
            yield name, found.detach()
    elif isinstance(found, dict | list | tuple):
        items = found.items() if isinstance(found, dict) else enumerate(found)
        for key, value in items:
            yield from _tensors(f"{name}/{key}" if name else str(key), value)


class _TensorSlices:
    """A tensor whose slices are NumPy arrays. Dtypes that NumPy lacks become float32."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = self._numpy(tensor[:0] if tensor.ndim else tensor).dtype

    def __getitem__(self, part: slice) -> np.ndarray:
        return self._numpy(self._tensor[part])

    @staticmethod
    def _numpy(tensor: Tensor) -> np.ndarray:
        try:
            return tensor.numpy()
        except TypeError:  # bfloat16, float8
            return tensor.float().numpy()
