"""Heaps of HDF5 files, which hold texts and arrays of variable length.

The HDF5 library believes the sizes in a heap, and the lengths in the references to it. If they are
damaged, it loops for ever or fills the memory, so they are checked before it reads anything of
variable length.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

START = b"GCOL\x01"  # signature and version
HEAD = struct.Struct("<8xQ")  # signature, version, size
ITEM = struct.Struct("<HHxxxxQ")  # index, references, size
REFERENCE = np.dtype([("length", "<u4"), ("heap", "<u8"), ("index", "<u4")])
AT_ONCE = REFERENCE.itemsize << 16  # bytes
DEFLATE, SHUFFLE = 1, 2  # filters of chunks


def find_damaged_heap(path: Path) -> str:
    """Return what is wrong with the heaps of a file; empty if nothing is.

    The library opens a heap wherever a reference points to one, so the whole file is searched.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        place = content.find(START)
        while place >= 0:
            if not _is_valid(content, place):
                return f"the heap at byte {place:,} is damaged. Write the file again."
            place = content.find(START, place + 1)
    return ""


def _is_valid(content: mmap.mmap, place: int) -> bool:
    """Whether items and free space fill a heap exactly."""
    if place + HEAD.size > len(content):
        return False
    (size,) = HEAD.unpack_from(content, place)
    position, end = place + HEAD.size, place + size
    if not position < end <= len(content):
        return False
    while end - position >= ITEM.size:
        index, _, length = ITEM.unpack_from(content, position)
        if index == 0:  # free space is at the end, and its length includes its head
            return bool(length == end - position)
        position += ITEM.size + -(-length // 8) * 8
    return position <= end


def find_wrong_lengths(path: Path, node: Any) -> str:
    """Return why the references of a dataset cannot be right; empty if they can.

    Every item is in the file once, so all together are not larger than the file.

    Args:
        path: The file.
        node: A dataset of variable length, of which all chunks are stored.
    """
    size, total = path.stat().st_size, 0
    is_text = node.dtype.metadata["vlen"] in (str, bytes)
    width = 1 if is_text else node.id.get_type().get_super().get_size()
    for references in _references(path, node):
        total += int(references["length"].sum(dtype=np.uint64)) * width
        if total > size:
            return (
                f"its items would have {total:,} bytes or more; the file has {size:,}. Write the "
                "file again."
            )
    return ""


def _references(path: Path, node: Any) -> Iterator[np.ndarray]:
    """Yield the references of a dataset, except those in chunks with unknown filters."""
    settings = node.id.get_create_plist()
    filters = [settings.get_filter(i)[0] for i in range(settings.get_nfilters())]
    if not {*filters} <= {DEFLATE, SHUFFLE}:
        return
    stored: list[tuple[int, int, int]] = []
    if node.chunks:
        node.id.chunk_iter(lambda c: stored.append((c.byte_offset, c.size, c.filter_mask)))
    elif (start := node.id.get_offset()) is not None:
        end = start + node.size * REFERENCE.itemsize
        stored = [(at, min(AT_ONCE, end - at), 0) for at in range(start, end, AT_ONCE)]
    expected = prod(node.chunks or node.shape) * REFERENCE.itemsize
    with path.open("rb") as file:
        for offset, size, mask in stored:
            file.seek(offset)
            used = [kind for place, kind in enumerate(filters) if not mask >> place & 1]
            content = _decode(file.read(size), used, expected)
            yield np.frombuffer(content[: len(content) // 16 * 16], REFERENCE)


def _decode(content: bytes, filters: list[int], expected: int) -> bytes:
    """Return a chunk without its filters, which were applied in this order."""
    for kind in reversed(filters):
        if kind == DEFLATE:
            content = zlib.decompressobj().decompress(content, expected)
        else:
            columns = np.frombuffer(content[:expected], np.uint8)
            content = columns.reshape(REFERENCE.itemsize, -1).T.tobytes()
    return content
