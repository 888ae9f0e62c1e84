"""How a batch of sets is split into tiles: they fit in a CPU's cache, or keep a device busy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

TILE_BYTES = 2 << 20
MIN_ROWS, MAX_ROWS = 512, 16384
DEVICE_FACTOR = 32  # on a device every operation on a tile is a launch
CPU = torch.device("cpu")


def tile_factor(device: torch.device) -> int:
    """How many times larger tiles are on a device than on a CPU."""
    return 1 if device.type == "cpu" else DEVICE_FACTOR


def is_one_tile(length: int) -> bool:
    """Whether so few rows of any width are one tile."""
    return length <= MIN_ROWS


def tile_rows(width: int, itemsize: int = 4, device: torch.device = CPU) -> int:
    """The number of rows of `width` numbers in a tile: a power of two, at least 512.

    On a CPU that is about 2 MiB and at most 16384 rows.

    >>> tile_rows(64 + 32), tile_rows(5 + 16), tile_rows(10_000)
    (4096, 16384, 512)
    >>> tile_rows(64 + 32, device=torch.device("cuda"))
    131072
    """
    factor = tile_factor(device)
    rows = 2 ** round(math.log2(factor * TILE_BYTES / (itemsize * max(width, 1))))
    return min(factor * MAX_ROWS, max(MIN_ROWS, rows))


def tiles(batch: int, length: int, rows: int) -> Iterator[tuple[slice, slice]]:
    """Split (batch, length) into tiles of at most `rows` elements.

    Sets longer than `rows` are split one by one. Shorter sets are not split; a tile contains as
    many as fit.

    >>> [(b.start, b.stop, n.start, n.stop) for b, n in tiles(2, 5, rows=3)]
    [(0, 1, 0, 3), (0, 1, 3, 5), (1, 2, 0, 3), (1, 2, 3, 5)]
    >>> [(b.start, b.stop, n.start, n.stop) for b, n in tiles(3, 2, rows=4)]
    [(0, 2, 0, 2), (2, 3, 0, 2)]
    """
    if length > rows:
        for start in range(batch):
            for first in range(0, length, rows):
                yield slice(start, start + 1), slice(first, min(first + rows, length))
    elif length > 0:
        group = max(1, rows // length)
        for start in range(0, batch, group):
            yield slice(start, min(start + group, batch)), slice(0, length)
