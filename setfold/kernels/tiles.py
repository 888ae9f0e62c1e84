"""How a batch of sets is cut into pieces that stay in cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

TILE_BYTES = 2 << 20
MIN_ROWS, MAX_ROWS = 512, 16384


def tile_rows(width: int, itemsize: int = 4) -> int:
    """Rows of `width` numbers that fill about two MiB: a power of two, between 512 and 16384.

    >>> tile_rows(64 + 32), tile_rows(5 + 16), tile_rows(10_000)
    (4096, 16384, 512)
    """
    rows = 2 ** round(math.log2(TILE_BYTES / (itemsize * max(width, 1))))
    return min(MAX_ROWS, max(MIN_ROWS, rows))


def tiles(batch: int, length: int, rows: int) -> Iterator[tuple[slice, slice]]:
    """Cut (batch, length) into pieces of at most about `rows` elements.

    Long sets are cut one by one; short ones are taken several at a time and never cut.

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
