"""HDF5 files with which the HDF5 library would not end, or would fill the memory."""

from __future__ import annotations

import struct
from pathlib import Path

import h5py
import numpy as np
import pytest

from setfold.errors import FileError
from setfold.files.inputs import open_reader
from setfold.files.readers import heaps
from tests.files.readers.test_hostile import POINTS, read
from tests.files.readers.written import FORMATS


def test_a_group_that_contains_itself(tmp_path: Path) -> None:
    """Some functions of the HDF5 library would not end."""
    path = tmp_path / "a.h5"
    names = sorted(FORMATS["hdf5"].write(path, 12))
    with h5py.File(path, "a") as file:
        file["group/again"] = file["group"]
        file["group/root"] = file["/"]
        file["group/x2"] = file["group/x"]
    content = bytearray(path.read_bytes())
    tree = content.index(b"TREE")
    struct.pack_into("<Q", content, tree + 16, tree)  # the next node is the same node
    path.write_bytes(content)
    with open_reader(path) as reader:
        assert reader.schema.names == names


def test_groups_are_not_nested_without_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["a/" * 99 + "x"] = POINTS
    assert read(path, "a/" * 99 + "x") == POINTS.tolist()
    with h5py.File(path, "w") as file:
        file["a/" * 120 + "x"] = POINTS
    with pytest.raises(FileError, match="nested more than 100 deep"):
        open_reader(path)


# ---- texts and ragged arrays in HDF5 -----------------------------------------------------------

HEAP = b"GCOL\x01"


def ragged(path: Path, **options) -> bytes:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.ones((20, 3), "f4"))
        names = [f"event {i // 4}" for i in range(20)]
        file.create_dataset("name", data=names, dtype=h5py.string_dtype(), **options)
        lists = file.create_dataset("list", (20,), dtype=h5py.vlen_dtype("f8"), **options)
        lists[:] = [np.arange(float(i % 3)) for i in range(20)]
    return path.read_bytes()


def test_items_fill_their_heap(tmp_path: Path) -> None:
    """Otherwise the HDF5 library would loop for ever."""
    path = tmp_path / "a.h5"
    content = ragged(path)
    assert read(path, "name")[:5] == ["event 0"] * 4 + ["event 1"]
    heap = content.index(HEAP)
    for place, damage in ((8, 0), (8, 1 << 60), (24, 1 << 62), (24, (1 << 64) - 16)):
        damaged = bytearray(content)
        struct.pack_into("<Q", damaged, heap + place, damage)
        path.write_bytes(damaged)
        with pytest.raises(FileError, match=r"the heap at byte [\d,]+ is damaged"):
            read(path, "name")
    damaged = bytearray(content)
    damaged[heap + 16 : heap + 32] = bytes(16)  # free space of no length
    path.write_bytes(damaged)
    with pytest.raises(FileError, match="is damaged"):
        read(path, "list")
    assert read(path, "x") == [[1, 1, 1]] * 20


@pytest.mark.parametrize(
    "options",
    [{}, {"chunks": (8,)}, {"chunks": (8,), "compression": "gzip", "shuffle": True}],
    ids=["plain", "chunks", "gzip"],
)
@pytest.mark.parametrize("name", ["name", "list"])
def test_items_are_not_larger_than_the_file(tmp_path: Path, name, options, monkeypatch) -> None:
    path = tmp_path / "a.h5"
    ragged(path, **options)
    assert len(read(path, name)) == 20
    decode = heaps._decode

    def longer(*arguments):
        content = bytearray(decode(*arguments))
        struct.pack_into("<I", content, 16, (1 << 32) - 1)
        return bytes(content)

    monkeypatch.setattr(heaps, "_decode", longer)
    with pytest.raises(FileError, match=r"its items would have .* bytes or more; the file has"):
        read(path, name)
