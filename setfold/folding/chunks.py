"""Chunks as users pass them to `fold`: tensors, arrays, mapped files, and pairs of them."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setfold.core.arguments import check_kind
from setfold.core.inputs import Chunk
from setfold.errors import InputError

Array = Tensor | np.ndarray
CHUNK_FORMS = (
    "chunks are tensors or arrays (B, n, d), or pairs (elements, mask) or (elements, index)"
)


def chunk_from(given: Any, like: Tensor | None) -> Chunk:
    """A chunk from a tensor, an array, or a pair with a mask (bool) or an index.

    Args:
        given: elements (B, n, d), or a pair with a mask (B, n); or (N, d) and an index (N,).
        like: a weight; arrays are converted to its dtype and device.
    """
    parts = tuple(given) if isinstance(given, tuple | list) else (given,)
    if len(parts) not in (1, 2) or not all(isinstance(part, Array) for part in parts):
        raise InputError(f"{CHUNK_FORMS}; got {type_names(given)}.")
    elements = _tensor_from(parts[0], like)
    if elements.dim() == 0:
        raise InputError(f"{CHUNK_FORMS}; got a single number.")
    if len(parts) == 1:
        return Chunk(elements)
    beside = _tensor_from(parts[1], None)
    if isinstance(parts[1], np.ndarray):
        beside = beside.to(elements.device)
    is_mask = beside.dtype == torch.bool
    if not is_mask and beside.dim() != 1:
        raise InputError(
            "the second item of a pair must be a mask, bool (B, n), or an index, int64 (N,); got "
            f"{beside.dtype} {tuple(beside.shape)}."
        )
    return Chunk(elements, beside, None) if is_mask else Chunk(elements, None, beside)


def type_names(given: object) -> str:
    """The type of a value, with the types of its items, for a message."""
    if isinstance(given, tuple | list):
        items = " and ".join(type(item).__name__ for item in given[:3])
        return f"{type(given).__name__} of {items}"
    return type(given).__name__


def _tensor_from(given: Array, like: Tensor | None) -> Tensor:
    """A tensor as it is; an array converted, and copied if torch could not write to its memory."""
    if isinstance(given, Tensor):
        check_kind("chunks", given)
        return given
    if isinstance(given, np.ma.MaskedArray):
        raise InputError(
            "masked arrays are not supported: pass a pair (array.data, mask), with a mask (B, n) "
            "that is True where an element is present."
        )
    if given.dtype.kind not in "fiub" or given.dtype.itemsize > 8:
        raise InputError(f"arrays must hold numbers of 64 bits at most; got dtype {given.dtype}.")
    mapped = _mapped_file(given)
    shareable = given.flags.writeable and all(stride >= 0 for stride in given.strides)
    copy = None if mapped is None and shareable else True
    found = torch.from_numpy(np.array(given, given.dtype.newbyteorder("="), copy=copy))
    if mapped is not None:
        mapped.madvise(mmap.MADV_DONTNEED)
    return found if like is None else found.to(like.device, like.dtype)


def _mapped_file(array: Any) -> mmap.mmap | None:
    """The memory-mapped file behind an array, if its pages may be released after reading.

    Unless released they count as memory of this process. Pages of a copy-on-write mapping, or of
    one that numpy did not open, may hold data that was never written to the file: keep those.
    """
    shared = False
    while array is not None and not isinstance(array, mmap.mmap):
        shared = shared or (isinstance(array, np.memmap) and array.mode in ("r", "r+", "w+"))
        array = getattr(array, "base", None)
    return array if shared and hasattr(mmap, "MADV_DONTNEED") else None
