"""Frames: Arrow tables in append-only files, each with its length and a digest.

    frame    magic (8 bytes), length of the content (8), digest (16), content: an Arrow stream

The digest also covers the name of the file, and the length and the position of the frame. So a frame
that is damaged, lost, repeated or moved is noticed before Arrow parses it. A file that is complete ends with a frame
without content, so that one that was truncated between two frames is noticed, too. docs/formats.md
has the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from setfold.core.persist import DIGEST_BYTES
from setfold.errors import FileError
from setfold.files.tables.stream import Stream, reading

MAGIC = b"setfold1"
HEAD = struct.Struct(f"<{len(MAGIC)}sQ{DIGEST_BYTES}s")
PLACE = struct.Struct("<QQ")  # position and length
START_OVER = "Start over with --restart."


class _Content:
    """A file that Arrow writes the content of a frame to."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hasher = blake2b(digest_size=DIGEST_BYTES)

    def write(self, data: Any) -> int:
        self.hasher.update(data)
        return self._file.write(data)


def place_of(path: Path, position: int, length: int) -> bytes:
    """Return what the digest of a frame covers after its content.

    The name of the file counts without its suffix, which changes when a sorted run is complete.
    """
    return path.stem.encode() + PLACE.pack(position, length)


def append_frame(path: Path, table: pa.Table | None) -> int:
    """Append a table to a file, and return the number of bytes written.

    Args:
        path: The file; created if there is none.
        table: The table; None for the end of a complete file.
    """
    with path.open("r+b" if path.exists() else "w+b") as file:
        position = file.seek(0, 2)
        file.write(bytes(HEAD.size))  # replaced when length and digest are known
        content = _Content(file)
        if table is not None:
            with pa.ipc.new_stream(content, table.schema) as stream:
                stream.write_table(table)
        end = file.tell()
        length = end - position - HEAD.size
        content.hasher.update(place_of(path, position, length))
        file.seek(position)
        file.write(HEAD.pack(MAGIC, length, content.hasher.digest()))
        return end - position


def read_frame(path: Path, position: int) -> tuple[pa.Table | None, int]:
    """Return the table of a frame (None at the end of a complete file), and where the next begins.

    The file is opened for each frame, because there may be more files than a process may open.

    Args:
        path: The file.
        position: Where the frame begins.

    Raises:
        FileError: The frame is damaged.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(position)
            magic, length, expected = HEAD.unpack(file.read(HEAD.size))
            if magic != MAGIC or length > size - position - HEAD.size:
                raise ValueError("it is not the beginning of a table")
            content = np.empty(length, np.uint8).data
            if file.readinto(content) < length:
                raise ValueError("it is truncated")
    except (FileNotFoundError, ValueError, struct.error) as error:
        raise _corrupt(path, position) from error
    hasher = blake2b(content, digest_size=DIGEST_BYTES)
    hasher.update(place_of(path, position, length))
    if hasher.digest() != expected:
        raise _corrupt(path, position)
    end = position + HEAD.size + length
    if not length:
        if end != size:
            raise _corrupt(path, end)
        return None, end
    with reading(path, START_OVER):
        return Stream(pa.py_buffer(content)).read_all(), end


def read_frames(path: Path) -> Iterator[pa.Table]:
    """Yield the tables of a complete file, in the order in which they were appended.

    Raises:
        FileError: The file is damaged or not complete.
    """
    table, position = read_frame(path, 0)
    while table is not None:
        yield table
        table, position = read_frame(path, position)


def _corrupt(path: Path, position: int) -> FileError:
    return FileError(
        f"{path} is corrupt: at byte {position:,} there is not the table that was written there. "
        f"{START_OVER}"
    )
