"""numpy's own files. Only the bytes of one batch are mapped at a time."""

from __future__ import annotations

import struct
from functools import cached_property
from math import prod
from pathlib import Path
from typing import IO, ClassVar, NamedTuple
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np

from setfold.files.readers.column import Column, ColumnReader, columns_of


class Header(NamedTuple):
    """What stands before an array's bytes.

    Args:
        shape: of the array.
        dtype: of the array.
        fortran: whether the first index runs fastest.
        size: how many bytes the header takes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    size: int

    @property
    def bytes(self) -> int:
        """How many bytes the array takes."""
        return prod(self.shape) * self.dtype.itemsize


def read_header(file: IO[bytes]) -> Header:
    """Read the header of an array in numpy's format.

    Args:
        file: stands at its beginning; afterwards, at the array's bytes.
    """
    start = file.tell()
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(
            f"version {version[0]}.{version[1]} of numpy's format; known are 1.0 and 2.0"
        )
    one = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if one else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("its elements are Python objects, which are never unpickled")
    return Header(shape, dtype, fortran and len(shape) > 1, file.tell() - start)


class Mapped:
    """An array that lies in a file as it would in memory.

    Args:
        path: the file.
        header: what is said of the array.
        offset: where its bytes begin.
    """

    def __init__(self, path: Path, header: Header, offset: int) -> None:
        if path.stat().st_size < offset + header.bytes:
            raise ValueError(
                f"{header.bytes} bytes expected after byte {offset}, but it ends before"
            )
        self._path, self._header, self._offset = path, header, offset
        self.dtype, self.shape = header.dtype, header.shape

    def __getitem__(self, part: slice) -> np.ndarray:
        if self._header.fortran:  # rows are spread over the file
            mapped = np.memmap(self._path, self.dtype, "r", self._offset, self.shape, "F")
            return np.ascontiguousarray(mapped[part])
        start, stop, _ = part.indices(self.shape[0])
        offset = self._offset + start * prod(self.shape[1:]) * self.dtype.itemsize
        shape = (stop - start, *self.shape[1:])
        return np.asarray(np.memmap(self._path, self.dtype, "r", offset, shape))


class Streamed:
    """An array that is compressed in an archive: reading goes forward only, at a reasonable cost.

    Args:
        archive: the file.
        member: the array in it.
        header: what is said of the array.
    """

    def __init__(self, archive: ZipFile, member: ZipInfo, header: Header) -> None:
        self._archive, self._member, self._header = archive, member, header
        self.dtype, self.shape = header.dtype, header.shape

    def __getitem__(self, part: slice) -> np.ndarray:
        if self._header.fortran:
            return np.ascontiguousarray(self._whole[part])
        start, stop, _ = part.indices(self.shape[0])
        row = prod(self.shape[1:]) * self.dtype.itemsize
        self._file.seek(self._header.size + start * row)
        content = self._file.read((stop - start) * row)
        if stop == self.shape[0]:
            self._file.read(1)  # at its end, the checksum is compared
        return np.frombuffer(content, self.dtype).reshape(stop - start, *self.shape[1:])

    @cached_property
    def _file(self) -> IO[bytes]:
        return self._archive.open(self._member)

    @cached_property
    def _whole(self) -> np.ndarray:
        """All of it: a row's numbers are spread over the stream."""
        self._file.seek(0)
        whole: np.ndarray = np.lib.format.read_array(self._file, allow_pickle=False)
        return whole


class NpyReader(ColumnReader):
    """One array: its rows are elements, or its fields are columns."""

    suffixes: ClassVar = (".npy",)

    def _find(self) -> dict[str, Column]:
        with self.path.open("rb") as file:
            header = read_header(file)
        return columns_of("", Mapped(self.path, header, header.size))


class NpzReader(ColumnReader):
    """Several arrays, each a column; compressed ones are streamed."""

    suffixes: ClassVar = (".npz",)

    def _find(self) -> dict[str, Column]:
        self._archive = ZipFile(self.path)
        columns: dict[str, Column] = {}
        for member in self._archive.infolist():
            if member.filename.endswith(".npy"):
                columns |= self._columns(member)
        return columns

    def _columns(self, member: ZipInfo) -> dict[str, Column]:
        name = member.filename.removesuffix(".npy")
        with self._archive.open(member) as file:
            header = read_header(file)
        if member.compress_type != ZIP_STORED:
            return columns_of(name, Streamed(self._archive, member, header), seekable=False)
        with self.path.open("rb") as file:
            file.seek(member.header_offset + 26)  # of the entry, whose last two lengths vary
            entry = 30 + sum(struct.unpack("<HH", file.read(4)))
        offset = member.header_offset + entry + header.size
        return columns_of(name, Mapped(self.path, header, offset))

    def close(self) -> None:
        self._archive.close()
