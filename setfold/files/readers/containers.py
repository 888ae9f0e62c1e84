"""Containers of named, possibly nested arrays: HDF5 and PyTorch files."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from setfold.errors import FileError
from setfold.files.readers.column import Column, ColumnReader, columns_of, type_of
from setfold.files.readers.heaps import find_damaged_heap, find_wrong_lengths
from setfold.files.readers.reader import import_optional
from setfold.files.readers.slides import COORDINATES, VECTORS, is_batch_of_one

if TYPE_CHECKING:  # torch takes seconds to import, and other formats do not need it
    from torch import Tensor

MAX_DEPTH = 100  # of groups within groups


class Hdf5Reader(ColumnReader):
    """HDF5: each dataset is a column, named by its path. Text and ragged arrays are supported.

    Some tools write the features of a slide as a batch of one, `(1, N, d)`. Beside the coordinates
    of N patches, the patches are the rows.

    Links are not followed. Datasets that are stored in other files, and datasets of which some
    chunks were never written, are not read.
    """

    suffixes: ClassVar = (".h5", ".hdf5")

    def _find(self) -> dict[str, Column]:
        self._h5py = import_optional("h5py", "hdf5")
        self._file = self._h5py.File(self.path, "r")
        nodes = {name: node for name, node in self._datasets() if node.shape}
        batched = (VECTORS, COORDINATES) if is_batch_of_one(nodes) else ()
        columns: dict[str, Column] = {}
        for name, node in nodes.items():
            is_batch = name in batched and node.ndim == 3
            columns.update(_patches(name, node) if is_batch else self._columns(name, node))
        return columns

    def _datasets(self) -> Iterator[tuple[str, Any]]:
        """Yield the datasets by path, each once. Links are ignored.

        `visititems` of h5py does the same, but does not end if certain groups are damaged.
        """
        h5py, root = self._h5py, self._file["/"]
        seen = {h5py.h5g.get_objinfo(root.id).objno[0]}  # addresses
        left: list[tuple[Any, tuple[str, ...]]] = []
        left += [(root, (name,)) for name in sorted(root, reverse=True)]
        while left:
            parent, path = left.pop()
            link = parent.id.links.get_info(path[-1].encode())
            if link.type != h5py.h5l.TYPE_HARD or link.u in seen:
                continue
            seen.add(link.u)
            node = parent[path[-1]]
            if isinstance(node, h5py.Dataset):
                yield "/".join(path), node
            elif isinstance(node, h5py.Group):
                if len(path) > MAX_DEPTH:
                    raise ValueError(f"its groups are nested more than {MAX_DEPTH} deep")
                left += [(node, (*path, name)) for name in sorted(node, reverse=True)]

    def _columns(self, name: str, node: Any) -> dict[str, Column]:
        h5py, kind, rows = self._h5py, None, node
        if h5py.check_string_dtype(node.dtype):
            kind, rows = pa.string(), node.asstr()
        elif base := h5py.check_vlen_dtype(node.dtype):
            kind = pa.list_(type_of(base))
        if node.external or node.is_virtual:
            rows = _Elsewhere(node)
        details = _storage_of(node)
        if kind is None:
            return columns_of(name, rows, **details)
        if node.dtype.hasobject:
            details["missing"] = partial(self._missing_items, node)
        return {name: object_column(kind, rows, len(node), **details)} if node.ndim == 1 else {}

    def _missing_items(self, node: Any) -> str:
        """Return why texts or arrays of variable length cannot be read; empty if they can."""
        missing = _missing_storage(node) or self._damaged_heap
        return missing or find_wrong_lengths(self.path, node)

    @cached_property
    def _damaged_heap(self) -> str:
        """What is wrong with the heaps of the file; empty if nothing is."""
        if self._file.id.get_create_plist().get_sizes() != (8, 8):
            return "its addresses do not have 64 bits. Write the file again."
        return find_damaged_heap(self.path)

    def close(self) -> None:
        self._file.close()


def _patches(name: str, node: Any) -> dict[str, Column]:
    """Return the column of a batch (1, N, d) of one slide: N rows."""
    details = _storage_of(node) | {"chunk_rows": node.chunks[1] if node.chunks else 1}
    return columns_of(name, _OnlySet(node), **details)


def _storage_of(node: Any) -> dict[str, Any]:
    """Return the arguments of `Column` that say how a dataset is stored."""
    return {
        "chunk_rows": node.chunks[0] if node.chunks else 1,
        "chunk_bytes": prod(node.chunks) * node.dtype.itemsize if node.chunks else 0,
        "missing": partial(_missing_storage, node),
    }


class _OnlySet:
    """The elements of a batch of one set."""

    def __init__(self, node: Any) -> None:
        self.dtype, self.shape = node.dtype, node.shape[1:]
        self._rows = _Elsewhere(node) if node.external or node.is_virtual else node

    def __getitem__(self, part: slice) -> Any:
        return self._rows[0, part]


class _Elsewhere:
    """A dataset that is stored in other files, any that this process may read."""

    def __init__(self, node: Any) -> None:
        self.dtype, self.shape = node.dtype, node.shape
        self._reason = _missing_storage(node)

    def __getitem__(self, part: Any) -> Any:
        raise ValueError(self._reason)


def _missing_storage(node: Any) -> str:
    """Return why a dataset is not stored in its file; empty if it is."""
    if node.external or node.is_virtual:
        kind = "external storage" if node.external else "a virtual dataset"
        return (
            f"it is {kind}, whose content is in other files, and these are not opened. Copy the "
            "content into this file."
        )
    if not node.size:
        return ""
    if not node.chunks:
        return "" if node.id.get_storage_size() else f"its content {NEVER_WRITTEN}"
    expected = prod(-(-size // chunk) for size, chunk in zip(node.shape, node.chunks, strict=True))
    lost = expected - node.id.get_num_chunks()
    return f"{lost} of its {expected} chunks {NEVER_WRITTEN}" if lost > 0 else ""


NEVER_WRITTEN = (
    "was never written, and would be read as fill values. Write the file again, or make the "
    "dataset as long as its content."
)


def object_column(kind: pa.DataType, array: Any, length: int, **details: Any) -> Column:
    """Return a column of Python objects: text, or arrays of variable length.

    Args:
        kind: The Arrow type.
        array: The array; its first dimension is the rows.
        length: The number of rows.
        details: More arguments of `Column`.
    """

    def take(start: int, stop: int) -> pa.Array:
        return pa.array(list(array[start:stop]), kind)

    return Column(kind, length, take, **details)


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
        for name, tensor in _tensors("", found, set()):
            columns |= columns_of(name, _TensorSlices(tensor), missing=partial(_repeated, tensor))
        return columns


def _tensors(name: str, found: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested containers, by path.

    Args:
        name: The path so far.
        found: A tensor or a container.
        seen: The containers so far.

    Raises:
        ValueError: A container occurs twice. Forty lists that contain each other twice would take
            years to list.
    """
    import torch

    if isinstance(found, torch.Tensor):
        if found.layout == torch.strided and not found.is_quantized:
            yield name, found.detach()
    elif isinstance(found, dict | list | tuple) and found:
        if id(found) in seen:
            raise ValueError(f"it contains the {type(found).__name__} {name!r} twice")
        seen.add(id(found))
        items = found.items() if isinstance(found, dict) else enumerate(found)
        for key, value in items:
            yield from _tensors(f"{name}/{key}" if name else str(key), value, seen)


def _repeated(tensor: Tensor) -> str:
    """Return why a tensor is larger than what is stored of it; empty if it is not."""
    if tensor.nbytes <= tensor.untyped_storage().nbytes():
        return ""
    return (
        f"its {tensor.numel()} numbers are repetitions of a few. Save tensor.contiguous() instead "
        "of an expanded tensor."
    )


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
