"""NumPy files. Only one batch is memory-mapped at a time."""

from __future__ import annotations

import struct
from functools import cached_property
from math import prod
from pathlib import Path
from typing import IO, ClassVar, NamedTuple
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np

from setfold.files.readers.column import Column, ColumnReader, columns_of


class NpyHeader(NamedTuple):
    """The header of an npy file.

    Args:
        shape: The shape of the array.
        dtype: The dtype of the array.
        fortran: Whether the array is in Fortran order.
        size: The size of the header in bytes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    size: int

    @property
    def bytes(self) -> int:
        """The size of the array in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def read_header(file: IO[bytes], size: int) -> NpyHeader:
    """Read the header of an array in the npy format.

    Args:
        file: The file, at the start of the header. Afterwards it is at the start of the array.
        size: The size of header and array in bytes.
    """
    start = file.tell()
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(
            f"expected version 1.0 or 2.0 of the npy format; got {version[0]}.{version[1]}"
        )
    one = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if one else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled")
    header = NpyHeader(shape, dtype, fortran and len(shape) > 1, file.tell() - start)
    if min(shape, default=0) < 0 or header.size + header.bytes != size:
        raise ValueError(
            f"expected {size} bytes of header and array; the header lists {header.size} bytes and "
            f"an array of shape {shape} and dtype {dtype}"
        )
    return header


class Mapped:
    """An uncompressed array in a file, which can be memory-mapped.

    Args:
        path: The file.
        header: The header of the array.
        offset: The position of the array in the file.
    """

    def __init__(self, path: Path, header: NpyHeader, offset: int) -> None:
        self._path, self._header, self._offset = path, header, offset
        self.dtype, self.shape = header.dtype, header.shape

    def __getitem__(self, part: slice) -> np.ndarray:
        if self._header.fortran:  # a row is spread over the file
            mapped = np.memmap(self._path, self.dtype, "r", self._offset, self.shape, "F")
            return np.ascontiguousarray(mapped[part])
        start, stop, _ = part.indices(self.shape[0])
        offset = self._offset + start * prod(self.shape[1:]) * self.dtype.itemsize
        shape = (stop - start, *self.shape[1:])
        return np.asarray(np.memmap(self._path, self.dtype, "r", offset, shape))


class Streamed:
    """A compressed array in an archive. Only reading forward is efficient.

    Args:
        archive: The archive.
        member: The array in the archive.
        header: The header of the array.
    """

    def __init__(self, archive: ZipFile, member: ZipInfo, header: NpyHeader) -> None:
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
            self._file.read(1)  # at the end, the checksum is verified
        return np.frombuffer(content, self.dtype).reshape(stop - start, *self.shape[1:])

    @cached_property
    def _file(self) -> IO[bytes]:
        return self._archive.open(self._member)

    @cached_property
    def _whole(self) -> np.ndarray:
        """The whole array, because a row is spread over the stream."""
        self._file.seek(0)
        whole: np.ndarray = np.lib.format.read_array(self._file, allow_pickle=False)
        return whole


class NpyReader(ColumnReader):
    """npy: one array. Its rows are elements, or its fields are columns."""

    suffixes: ClassVar = (".npy",)

    def _find(self) -> dict[str, Column]:
        with self.path.open("rb") as file:
            header = read_header(file, self.path.stat().st_size)
        return columns_of("", Mapped(self.path, header, header.size))


class NpzReader(ColumnReader):
    """npz: several arrays, each a column. Compressed arrays are streamed."""

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
            header = read_header(file, member.file_size)
        if member.compress_type != ZIP_STORED:
            rows = header.shape[0] if header.fortran else 1  # a row is spread over the stream
            array = Streamed(self._archive, member, header)
            return columns_of(name, array, chunk_rows=rows, seekable=False)
        with self.path.open("rb") as file:
            file.seek(member.header_offset + 26)  # two fields with variable lengths
            entry = 30 + sum(struct.unpack("<HH", file.read(4)))
        offset = member.header_offset + entry + header.size
        return columns_of(name, Mapped(self.path, header, offset))

    def close(self) -> None:
        self._archive.close()
