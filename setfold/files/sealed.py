"""Sealed files: Arrow and Parquet files in which a digest covers every byte.

Both formats end with a footer that says where the data is, so readers ignore bytes between the data
and the footer. A seal is stored there, and the file stays one that any tool can read:

    data     everything that the format's writer wrote before its footer
    seal     digests of the data, of the footer and of the seal itself, and the number of rows
    footer   the format's footer, its length (4 bytes) and the format's magic

`SealedWriter` computes the digests while it writes. `SealedFile` verifies each chunk of the data
when it is read, so that no parser sees a damaged byte, and a part of a file can be trusted without
reading all of it. docs/formats.md has the layout.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from setfold.core.persist import DIGEST_BYTES
from setfold.errors import FileError

ARROW, PARQUET = b"ARROW1", b"PAR1"  # at the beginning and at the end of a file
CHUNK = 1 << 18  # bytes of data that one digest covers
LENGTH = struct.Struct("<I")  # length of a footer
MAGIC, VERSION = b"setfold.seal", 1
SEAL = struct.Struct(f"<QQ{DIGEST_BYTES}s{len(MAGIC)}sI")  # a `Seal`, magic and version


def digest(*parts: Any) -> bytes:
    """Return the digest of some buffers, one after the other."""
    hasher = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


class Seal(NamedTuple):
    """The end of a seal, after the digests of the chunks.

    Args:
        rows: The number of rows in the file.
        data: The length of the data in bytes.
        footer: The digest of everything after the seal.
    """

    rows: int
    data: int
    footer: bytes

    def pack(self, chunks: bytes) -> bytes:
        """Return the whole seal, given the digests of all chunks."""
        end = SEAL.pack(*self, MAGIC, VERSION)
        return chunks + end + digest(chunks, end)

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-self.data // CHUNK)

    @property
    def size(self) -> int:
        """The length of the whole seal in bytes."""
        return (self.chunks + 1) * DIGEST_BYTES + SEAL.size


# ---- write -------------------------------------------------------------------------------------


class SealedWriter:
    """A file for an Arrow or Parquet writer. `seal` completes it.

    Args:
        path: The file. It is overwritten.
    """

    closed = False

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")
        self._digests = bytearray()  # of complete chunks
        self._chunk = blake2b(digest_size=DIGEST_BYTES)
        self._length = 0

    def write(self, data: Any) -> int:
        """Write bytes or a buffer."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        start = 0
        while start < len(view):
            part = view[start : start + CHUNK - self._length % CHUNK]
            self._chunk.update(part)
            self._length += len(part)
            start += len(part)
            if self._length % CHUNK == 0:
                self._digests += self._chunk.digest()
                self._chunk = blake2b(digest_size=DIGEST_BYTES)
        return len(view)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()  # in case that an error kept it from being sealed

    def seal(self, rows: int) -> None:
        """Insert the seal before the footer, and close the file.

        Args:
            rows: The number of rows that were written.
        """
        with self._file as file:
            start = self._length - _footer_size(file, self._length)
            whole = start // CHUNK  # chunks without a byte of the footer
            file.seek(whole * CHUNK)
            rest = file.read(start - whole * CHUNK)
            footer = file.read()
            digests = bytes(self._digests[: whole * DIGEST_BYTES]) + (digest(rest) if rest else b"")
            file.seek(start)
            file.write(Seal(rows, start, digest(footer)).pack(digests) + footer)
        self.closed = True


def is_sealed(path: Path) -> bool:
    """Whether a file begins like an Arrow or Parquet file."""
    with path.open("rb") as file:
        return file.read(len(ARROW)).startswith((ARROW, PARQUET))


def _format_of(file: BinaryIO) -> bytes:
    """Return the magic with which a file begins.

    Raises:
        ValueError: It is neither an Arrow nor a Parquet file.
    """
    file.seek(0)
    start = file.read(len(ARROW))
    for magic in (ARROW, PARQUET):
        if start.startswith(magic):
            return magic
    raise ValueError("it is neither an Arrow nor a Parquet file")


def _footer_size(file: BinaryIO, size: int) -> int:
    """Return the length of a file's footer, including the length and the magic at its end.

    Raises:
        ValueError: There is no footer.
    """
    magic = _format_of(file)
    end = LENGTH.size + len(magic)
    file.seek(max(size - end, 0))
    tail = file.read(end)
    footer = end + LENGTH.unpack(tail[: LENGTH.size])[0] if tail[LENGTH.size :] == magic else size
    if footer >= size:
        raise ValueError("it has no footer")
    return footer


# ---- read --------------------------------------------------------------------------------------


class SealedFile:
    """A sealed file, open for reading. Every byte that it returns has been verified.

    It can be passed to Arrow's readers.

    Args:
        path: The file.

    Raises:
        FileError: The file is missing, truncated or corrupt, or has no seal.
    """

    closed = False

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise FileError(f"{path} does not exist. Check the path.")
        self._file = path.open("rb", buffering=0)
        try:
            self._open()
        except ValueError as error:
            self.close()
            raise FileError(
                f"{path} is truncated or corrupt, or setfold did not write it: {error}. Pass a "
                "file that setfold wrote, or write it again."
            ) from error
        self._position = 0
        self._last = (-1, b"")  # number and content of the last chunk that was verified

    def _open(self) -> None:
        """Read and verify everything but the data."""
        size = self.path.stat().st_size
        self.format = _format_of(self._file)
        footer_size = _footer_size(self._file, size)
        fixed = SEAL.size + DIGEST_BYTES
        end = size - footer_size
        if end < fixed:
            raise ValueError("it has no seal")
        self._file.seek(end - fixed)
        *values, magic, version = SEAL.unpack(self._file.read(SEAL.size))
        if magic != MAGIC:
            raise ValueError("it has no seal")
        if version != VERSION:
            raise ValueError(f"its seal has version {version}; this setfold reads {VERSION}")
        self.seal = Seal(*values)
        if self.seal.data + self.seal.size != end:
            raise ValueError("its length does not match its seal")
        self._file.seek(self.seal.data)
        self._end = self._file.read()  # seal and footer
        self._digests = self._end[: self.seal.chunks * DIGEST_BYTES]
        seal, footer = self._end[: self.seal.size], self._end[self.seal.size :]
        if self.seal.pack(self._digests) != seal or digest(footer) != self.seal.footer:
            raise ValueError("its seal does not match its content")
        self.size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self.closed = True

    def readable(self) -> bool:
        """Whether the file can be read: yes."""
        return True

    def writable(self) -> bool:
        """Whether the file can be written: no."""
        return False

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, position: int, whence: int = 0) -> int:
        """Move to a position from the beginning (0), from here (1) or from the end (2)."""
        self._position = max(0, position + (0, self._position, self.size)[whence])
        return self._position

    def read(self, size: int = -1) -> bytes | memoryview:
        """Return up to `size` verified bytes; all that are left if it is negative.

        Raises:
            FileError: They are damaged.
        """
        start, data = self._position, self.seal.data
        stop = self.size if size < 0 else min(start + size, self.size)
        if start >= stop:
            return b""
        self._position = stop
        if stop <= data:
            return self._read_data(start, stop)
        if start >= data:
            return self._end[start - data : stop - data]
        return bytes(self._read_data(start, data)) + self._end[: stop - data]

    def _read_data(self, start: int, stop: int) -> memoryview:
        """Read all chunks that a range touches, verify them and return the range."""
        first, last = start // CHUNK, (stop - 1) // CHUNK
        begin, end = first * CHUNK, min((last + 1) * CHUNK, self.seal.data)
        number, chunk = self._last
        if number == first == last:
            return memoryview(chunk)[start - begin : stop - begin]
        # Not initialized, and aligned like the file, so that Arrow need not copy it.
        block = np.empty(end - begin, np.uint8).data
        self._file.seek(begin)
        filled = 0
        while filled < len(block) and (count := self._file.readinto(block[filled:])):
            filled += count
        for number in range(first, last + 1):
            place, entry = number * CHUNK - begin, number * DIGEST_BYTES
            expected = self._digests[entry : entry + DIGEST_BYTES]
            if filled < len(block) or digest(block[place : place + CHUNK]) != expected:
                raise FileError(
                    f"{self.path} is corrupt: bytes {number * CHUNK:,} to "
                    f"{min((number + 1) * CHUNK, self.seal.data):,} have changed since it was "
                    "written. Write it again, or restore a copy."
                )
        self._last = last, bytes(block[last * CHUNK - begin :])
        return block[start - begin : stop - begin]
