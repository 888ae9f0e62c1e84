"""The compiled kernels as functions of columns of tables.

As in `dispatch.py`, a function returns None if it cannot run a kernel: without a library, and for
other types. The caller then does the same with NumPy or Arrow.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import numpy as np

from setfold.native.dispatch import check
from setfold.native.library import choice

KINDS = {  # as in rows.c
    np.dtype(name): kind
    for kind, name in enumerate(
        ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"),
    )
}
LINE = 16  # float32 of a cache line
UNUSED = 3  # references to an array: of a list, of a variable, and of getrefcount
IDS = (np.dtype(np.int64), np.dtype(np.uint64))


class Room:
    """Memory for matrices, used again when nothing refers to it: new pages take time, too.

    One thread may use it.

    >>> room = Room()
    >>> first = room.matrix(2, 3).ctypes.data  # refers to nothing
    >>> kept = room.matrix(2, 3)
    >>> kept.ctypes.data == first, room.matrix(2, 3).ctypes.data == first
    (True, False)
    """

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def __reduce__(self) -> tuple[type[Room], tuple[()]]:
        return Room, ()  # in another process it begins empty

    def matrix(self, rows: int, width: int) -> np.ndarray:
        """A matrix of float32, aligned so that a row of 16 numbers is one cache line."""
        size = rows * width
        array = self._unused(size + LINE)
        start = -array.ctypes.data % (4 * LINE) // 4
        return array[start : start + size].reshape(rows, width)

    def _unused(self, size: int) -> np.ndarray:
        for array in self._arrays:
            if array.size >= size and sys.getrefcount(array) == UNUSED:
                return array
        new = np.empty(size, np.float32)
        self._arrays = [*self._arrays[-1:], new]
        return new


def stack_columns(columns: Sequence[np.ndarray], room: Room) -> np.ndarray | None:
    """Columns (N,) of numbers as a matrix (N, d) of float32, in some room.

    >>> found = stack_columns([np.arange(3), np.ones(3, np.float32)], Room())
    >>> found is None or found.tolist() == [[0, 1], [1, 1], [2, 1]]
    True
    """
    library = choice.kernels
    if library is None or not columns:
        return None
    kinds = [KINDS[column.dtype] for column in columns if column.dtype in KINDS]
    if len(kinds) < len(columns):
        return None
    if not all(column.ndim == 1 and column.flags.c_contiguous for column in columns):
        return None
    rows, width = len(columns[0]), len(columns)
    out = room.matrix(rows, width)
    pointers = (ctypes.c_void_p * width)(*(column.ctypes.data for column in columns))
    codes = (ctypes.c_int8 * width)(*kinds)
    check(library.stack_columns(pointers, codes, rows, width, out.ctypes.data))
    return out


def encode_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The distinct ids in the order of their first appearance, and the code (N,) of each id.

    >>> found = encode_ids(np.array([7, 5, 7]))
    >>> found is None or [part.tolist() for part in found] == [[7, 5], [0, 1, 0]]
    True
    """
    library = choice.kernels
    if library is None or ids.dtype not in IDS or ids.ndim != 1 or not ids.flags.c_contiguous:
        return None
    distinct, codes = np.empty_like(ids), np.empty(len(ids), np.int64)
    known = ctypes.c_int64()
    check(
        library.encode_ids(
            ids.ctypes.data,
            len(ids),
            distinct.ctypes.data,
            ctypes.addressof(known),
            codes.ctypes.data,
        )
    )
    return distinct[: known.value].copy(), codes


def add_at(total: np.ndarray, places: np.ndarray, part: np.ndarray) -> bool:
    """Add the rows of `part` (n, ...) to those of `total` (N, ...) at some places (n,).

    The caller has checked that the places are from 0 to N - 1.

    Returns:
        False if nothing was added, because a kernel cannot do it.
    """
    library = choice.kernels
    arrays = (total, part)
    if library is None or any(a.dtype != np.float64 or not a.flags.c_contiguous for a in arrays):
        return False
    if places.dtype != np.int64 or places.shape != part.shape[:1] or not places.flags.c_contiguous:
        return False
    if total.shape[1:] != part.shape[1:]:
        return False
    width = int(np.prod(part.shape[1:]))
    check(
        library.add_at(part.ctypes.data, places.ctypes.data, len(places), width, total.ctypes.data)
    )
    return True
