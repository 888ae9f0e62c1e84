"""Memory that is used again: only if nothing refers to it, and not for much less."""

from __future__ import annotations

import numpy as np

from setfold.native.dispatch import Room


def address(array):
    return array.ctypes.data


def test_memory_is_used_again_when_nothing_refers_to_it():
    room = Room()
    first = address(room.empty((100,), np.float64))
    kept = room.empty((100,), np.float64)
    assert address(kept) == first
    part = kept[10:20]
    del kept
    assert address(room.empty((100,), np.float64)) != first, "a part of it is still used"
    assert part.size == 10


def test_little_does_not_keep_much():
    room = Room()
    large = address(room.empty((1 << 20,), np.float64))
    small = room.empty((100,), np.float64)
    assert not large <= address(small) < large + (8 << 20)
