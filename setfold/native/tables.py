"""The compiled kernels as functions of columns of tables.

As in `dispatch.py`, a function returns None if it cannot run a kernel: without a library, and for
other types. The caller then does the same with NumPy or Arrow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from setfold.native.dispatch import Room, check
from setfold.native.library import choice

KINDS = {  # as in rows.c
    np.dtype(name): kind
    for kind, name in enumerate(
        ("f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"),
    )
}
IDS = (np.dtype(np.int64), np.dtype(np.uint64))


def can_stack(columns: Sequence[np.ndarray]) -> bool:
    """Whether a kernel can stack columns: several contiguous ones (N,) of numbers."""
    if choice.kernels is None or not columns:
        return False
    return all(c.dtype in KINDS and c.ndim == 1 and c.flags.c_contiguous for c in columns)


def stack_columns(
    columns: Sequence[np.ndarray], room: Room, places: np.ndarray | None = None
) -> np.ndarray:
    """Columns (N,) of numbers as a matrix (N, d) of float32, in some room.

    Args:
        columns: the columns, for which `can_stack` is true.
        room: where the matrix is stored.
        places: (N,), from `group`, the row of the matrix for each row of the columns; None for the
            same order.

    >>> columns = [np.arange(3), np.ones(3, np.float32)]
    >>> not can_stack(columns) or stack_columns(columns, Room()).tolist() == [[0, 1], [1, 1], [2, 1]]
    True
    """
    library = choice.kernels
    assert library is not None
    kinds = [KINDS[column.dtype] for column in columns]
    rows, width = len(columns[0]), len(columns)
    out = room.empty((rows, width), np.float32)
    pointers = (ctypes.c_void_p * width)(*(column.ctypes.data for column in columns))
    codes = (ctypes.c_int8 * width)(*kinds)
    to = None if places is None else places.ctypes.data
    check(library.stack_columns(pointers, codes, to, rows, width, out.ctypes.data))
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


def group_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """The distinct ids, and the order in which rows with the same id follow one another.

    Returns:
        The ids in the order of their first appearance; the code (N,) of each row in the new order,
        sorted; and the place (N,) in the new order of each row.

    >>> found = group_ids(np.array([7, 5, 7]))
    >>> found is None or [part.tolist() for part in found] == [[7, 5], [0, 0, 1], [0, 2, 1]]
    True
    """
    found, library = encode_ids(ids), choice.kernels
    if found is None or library is None:
        return None
    names, codes = found
    places = np.empty_like(codes)
    check(library.group(codes.ctypes.data, len(codes), len(names), places.ctypes.data))
    return names, codes, places


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
