"""Files that hold many arrays, perhaps in groups: HDF5, Zarr, PyTorch's."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from setfold.errors import FileError
from setfold.files.readers.column import Column, ColumnReader, columns_of, type_of
from setfold.files.readers.reader import required

if TYPE_CHECKING:  # torch takes seconds to import, and other formats should not wait for it
    from torch import Tensor


class Hdf5Reader(ColumnReader):
    """HDF5: each dataset is a column, by its path; text and arrays of varying length are, too."""

    suffixes: ClassVar = (".h5", ".hdf5")

    def _find(self) -> dict[str, Column]:
        h5py = required("h5py", "hdf5")
        self._file = h5py.File(self.path, "r")
        columns: dict[str, Column] = {}

        def visit(name: str, node: Any) -> None:
            if not isinstance(node, h5py.Dataset) or not node.shape:
                return
            grain = node.chunks[0] if node.chunks else 1
            kind, rows = None, node
            if h5py.check_string_dtype(node.dtype):
                kind, rows = pa.string(), node.asstr()
            elif base := h5py.check_vlen_dtype(node.dtype):
                kind = pa.list_(type_of(base))
            if kind is None:
                columns.update(columns_of(name, node, grain=grain))
            elif node.ndim == 1:
                columns[name] = _listed(kind, rows, len(node), grain)

        self._file.visititems(visit)
        return columns

    def close(self) -> None:
        self._file.close()


class ZarrReader(ColumnReader):
    """Zarr: each array is a column, by its path. A chunk that is missing is what Zarr says: fill."""

    suffixes: ClassVar = (".zarr",)
    is_folder: ClassVar = True

    def _find(self) -> dict[str, Column]:
        zarr = required("zarr", "zarr")
        root = zarr.open(str(self.path), mode="r")
        arrays = {"": root}
        if isinstance(root, zarr.Group):
            members = sorted(root.members(max_depth=None))
            arrays = {name: node for name, node in members if isinstance(node, zarr.Array)}
        columns: dict[str, Column] = {}
        for name, array in arrays.items():
            grain = (array.shards or array.chunks)[0] if array.ndim else 1
            if array.ndim == 1 and array.dtype.kind in "OT":
                columns[name] = _listed(pa.string(), array, array.shape[0], grain)
            else:
                columns |= columns_of(name, array, grain=grain)
        return columns


def _listed(kind: pa.DataType, array: Any, length: int, grain: int) -> Column:
    """A column of Python objects: text, or arrays of any length."""

    def take(start: int, stop: int) -> pa.Array:
        return pa.array(list(array[start:stop]), kind)

    return Column(kind, length, take, grain)


class TorchReader(ColumnReader):
    """A tensor, or tensors in dicts, lists and tuples, mapped from the file; nothing is unpickled."""

    suffixes: ClassVar = (".pt", ".pth")

    def _find(self) -> dict[str, Column]:
        import torch

        try:
            found = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise FileError(
                f"{self.path} is corrupt, or holds other objects than tensors. Those are not loaded, since "
                "that could run code; save a dict of tensors with torch.save."
            ) from error
        columns: dict[str, Column] = {}
        for name, tensor in _tensors("", found):
            columns |= columns_of(name, _Rows(tensor))
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


class _Rows:
    """A tensor, sliced as numpy does it; what numpy has no type for becomes float32."""

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
        except TypeError:  # bfloat16 and narrower
            return tensor.float().numpy()
