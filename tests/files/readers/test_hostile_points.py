"""LAS and LAZ files whose headers list something else than they hold."""

from __future__ import annotations

import struct
from pathlib import Path

import laspy
import lazrs
import numpy as np
import pytest

import setfold
from setfold.errors import FileError
from setfold.files.inputs import open_reader
from tests.files.files import encoder
from tests.files.readers.test_hostile import read


@pytest.mark.parametrize("suffix", [".las", ".laz"])
@pytest.mark.parametrize("version", ["1.2", "1.4"])
def test_points_that_the_header_does_not_list(tmp_path: Path, suffix: str, version: str) -> None:
    path = tmp_path / f"a{suffix}"
    header = laspy.LasHeader(point_format=0, version=version)
    points = laspy.LasData(header)
    points.x = points.y = points.z = np.arange(60_000.0)
    points.write(path)
    place, form = (107, "<I") if version == "1.2" else (247, "<Q")
    content = bytearray(path.read_bytes())
    assert struct.unpack_from(form, content, place) == (60_000,)
    for count in (0, 10, 50_000):
        struct.pack_into(form, content, place, count)
        path.write_bytes(content)
        with pytest.raises(FileError, match=f"lists {count} points; the file has at least"):
            open_reader(path)


def laz(path: Path, points: int = 60_000, version: str = "1.2") -> bytearray:
    kind = 0 if version == "1.2" else 6
    cloud = laspy.LasData(laspy.LasHeader(point_format=kind, version=version))
    cloud.x = cloud.y = cloud.z = np.arange(float(points))
    cloud.write(path)
    return bytearray(path.read_bytes())


def record_of(content: bytes) -> int:
    """The position of the record that describes the compression."""
    return content.index(b"laszip encoded") - 2 + 54


@pytest.mark.parametrize(
    ("place", "form", "value", "message"),
    [
        (12, "<I", 1 << 31, "chunks of .*GB, and a chunk must be"),
        (32, "<H", 0, "its points have 20 bytes, or 0"),
        (32, "<H", 65535, "cannot open"),
        (36, "<H", 65535, "its points have 20 bytes, or 65535"),
        (36, "<H", 0, "its points have 20 bytes, or 0"),
    ],
)
def test_the_record_of_a_compression_is_not_believed(
    tmp_path: Path, place: int, form: str, value: int, message: str
) -> None:
    path = tmp_path / "a.laz"
    content = laz(path, 100)
    setfold.encode_sets(encoder(), path, tmp_path / "out.npz", memory="500MB")
    struct.pack_into(form, content, record_of(content) + place, value)
    path.write_bytes(content)
    with pytest.raises(FileError, match=message):
        setfold.encode_sets(encoder(), path, tmp_path / "new.npz", memory="500MB")


def test_layers_of_a_chunk_are_in_the_chunk(tmp_path: Path) -> None:
    """lazrs would allocate what they declare, up to 4 GB for each."""
    path = tmp_path / "a.laz"
    content = laz(path, version="1.4")
    assert len(read(path, "x")) == 60_000
    (start,) = struct.unpack_from("<I", content, 96)
    for layer in range(9):
        damaged = content[:]
        struct.pack_into("<I", damaged, start + 8 + 30 + 4 + 4 * layer, (1 << 32) - 1)
        path.write_bytes(damaged)
        with pytest.raises(FileError, match="layers that are larger than the chunk"):
            open_reader(path)


@pytest.mark.parametrize("suffix", [".las", ".laz"])
def test_points_that_are_not_in_the_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    content = laz(path, version="1.4")
    struct.pack_into("<Q", content, 247, 1 << 60)
    path.write_bytes(content)
    with pytest.raises(FileError, match=f"lists {1 << 60} points; the file has at most"):
        open_reader(path)


class PanicException(BaseException):
    """What libraries that are written in Rust raise."""


def test_a_panic_is_an_error_of_the_file(tmp_path: Path, monkeypatch) -> None:
    laz(tmp_path / "a.laz")

    def panic(*_):
        raise PanicException("index out of bounds")

    with open_reader(tmp_path / "a.laz") as reader, monkeypatch.context() as patch:
        patch.setattr(laspy.LasReader, "read_points", panic)
        with pytest.raises(FileError, match="PanicException: index out of bounds"):
            list(reader.read(["x"], rows=10))
    monkeypatch.setattr(lazrs, "read_chunk_table", panic)
    with pytest.raises(FileError, match=r"cannot open .* PanicException"):
        open_reader(tmp_path / "a.laz")
