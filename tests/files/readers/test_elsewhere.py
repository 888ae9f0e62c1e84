"""Files whose content is elsewhere or missing: in other files, in chunks that were never written."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

import setfold
from setfold.errors import FileError, InputError
from setfold.files.inputs import open_reader
from tests.files.files import encoder

SECRET = np.arange(1, 31, dtype="f4").reshape(10, 3)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that no input may make setfold read."""
    path = tmp_path / "secret" / "secret.bin"
    path.parent.mkdir()
    path.write_bytes(SECRET.tobytes())
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        file["x"] = SECRET
    return path


def read(path: Path, *names: str) -> list[object]:
    with open_reader(path) as reader:
        reader.check(names)
        return [row for b in reader.read(names, rows=4) for row in b.column(0).to_pylist()]


def assert_refused(path: Path, name: str, message: str) -> None:
    """Neither planning nor reading returns anything."""
    with pytest.raises(FileError, match=message):
        read(path, name)
    with pytest.raises(FileError, match=message):
        setfold.encode_sets(encoder(), path, path.parent / "out.npz", features=name)
    assert not (path.parent / "out.npz").exists()


# ---- HDF5 ------------------------------------------------------------------------------------


def external(file: h5py.File, secret: Path) -> None:
    file.create_dataset("x", SECRET.shape, "f4", external=[(str(secret), 0, SECRET.nbytes)])


def virtual(file: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout(SECRET.shape, "f4")
    layout[:] = h5py.VirtualSource(secret.with_suffix(".h5"), "x", SECRET.shape)
    file.create_virtual_dataset("x", layout)


def dangling(file: h5py.File, secret: Path) -> None:
    layout = h5py.VirtualLayout(SECRET.shape, "f4")
    layout[:] = h5py.VirtualSource("no such file.h5", "x", SECRET.shape)
    file.create_virtual_dataset("x", layout)


@pytest.mark.parametrize("write", [external, virtual, dangling])
def test_datasets_in_other_files_are_not_read(tmp_path: Path, secret: Path, write) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        write(file, secret)
        file["y"] = SECRET
    assert_refused(path, "x", "in other files, and these are not opened")
    assert read(path, "y") == SECRET.tolist()
    with open_reader(path) as reader, pytest.raises(FileError, match="in other files"):
        list(reader.read(["x"], rows=4))  # even if nothing was checked before


def test_links_are_not_followed(tmp_path: Path, secret: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["y"] = SECRET
        file["x"] = h5py.ExternalLink(str(secret.with_suffix(".h5")), "/x")
        file["soft"] = h5py.SoftLink("/x")
    with open_reader(path) as reader:
        assert reader.schema.names == ["y"]
    with pytest.raises(InputError, match="has no column 'x'"):
        setfold.encode_sets(encoder(), path, tmp_path / "out.npz", features="x")


@pytest.mark.parametrize("chunks", [None, (4, 3), (4, 2)])
@pytest.mark.parametrize("rows", [0, 4, 10])
def test_datasets_must_be_complete(tmp_path: Path, chunks, rows: int) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", SECRET.shape, "f4", chunks=chunks)
        dataset[:rows] = SECRET[:rows]
        file.create_dataset("none", (0, 3), "f4", chunks=chunks, maxshape=(None, 3))
    if rows == 10 or (rows and chunks is None):  # contiguous storage is allocated as a whole
        assert read(path, "x")[:rows] == SECRET[:rows].tolist()
    else:
        assert_refused(path, "x", "never written")
    assert read(path, "none") == []


def test_a_dataset_that_grew_is_complete_when_it_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", (5, 3), "f4", chunks=(2, 3), maxshape=(None, 3))
        dataset[:] = SECRET[:5]
        dataset.resize((10, 3))
        dataset[5:] = SECRET[5:]
    assert read(path, "x") == SECRET.tolist()


# ---- Zarr ------------------------------------------------------------------------------------

STORES = [(2, None), (3, None), (3, (6, 3))]


def store(path: Path, version: int, shards, values=SECRET, **options):
    group = zarr.open_group(path, mode="w", zarr_format=version)
    chunks = (2, *values.shape[1:])
    options |= {"shape": values.shape, "chunks": chunks, "dtype": values.dtype}
    if shards is not None:
        options["shards"] = (6, *values.shape[1:])
    array = group.create_array("x", **options)
    array[:] = values
    return array


def chunk_files(path: Path) -> list[Path]:
    kept = [file for file in path.rglob("*") if file.is_file() and "zarr.json" not in file.name]
    return sorted(file for file in kept if not file.name.startswith("."))


@pytest.mark.parametrize(("version", "shards"), STORES)
def test_a_lost_chunk_is_an_error(tmp_path: Path, version: int, shards) -> None:
    path = tmp_path / "a.zarr"
    store(path, version, shards)
    assert read(path, "x") == SECRET.tolist()
    for file in chunk_files(path):
        content = file.read_bytes()
        file.unlink()
        assert_refused(path, "x", r"chunk .* is not stored.*write_empty_chunks")
        file.write_bytes(content)


@pytest.mark.parametrize(("version", "shards"), STORES)
@pytest.mark.parametrize("fill", [0, 7, "NaN"])
def test_chunks_that_were_never_written_are_errors(tmp_path, version, shards, fill) -> None:
    path = tmp_path / "a.zarr"
    options = {"fill_value": float(fill)}
    array = store(path, version, shards, np.full_like(SECRET, float(fill)), **options)
    array[:4] = SECRET[:4]  # a part of a shard
    with open_reader(path) as reader, pytest.raises(FileError, match="is not stored"):
        list(reader.read(["x"], rows=4))


@pytest.mark.parametrize(("version", "shards"), STORES)
@pytest.mark.parametrize(
    "values", [np.zeros((10, 3), "f4"), np.zeros(10, "i8"), np.zeros(10, "?")], ids=str
)
def test_fill_values_that_were_written_are_values(tmp_path, version, shards, values) -> None:
    path = tmp_path / "a.zarr"
    store(path, version, shards, values, config={"write_empty_chunks": True})
    assert read(path, "x") == values.tolist()
    store(path, version, shards, values)
    with pytest.raises(FileError, match="is not stored"):
        read(path, "x")


@pytest.mark.parametrize("empty", [True, False])
def test_texts_in_shards_must_be_stored(tmp_path: Path, empty: bool) -> None:
    path = tmp_path / "a.zarr"
    group = zarr.open_group(path, mode="w")
    config = {"write_empty_chunks": empty}
    array = group.create_array(
        "x", shape=8, chunks=(2,), shards=(4,), dtype="string", config=config
    )
    array[:] = np.array(["a", "b", "", "", "e", "f", "g", ""], dtype=object)
    if empty:
        assert read(path, "x") == ["a", "b", "", "", "e", "f", "g", ""]
    else:
        with pytest.raises(FileError, match="is not stored"):
            read(path, "x")


def test_a_chunk_elsewhere_is_not_read(tmp_path: Path, secret: Path) -> None:
    path = tmp_path / "a.zarr"
    array = zarr.create_array(path, shape=(10, 3), chunks=(10, 3), dtype="f4", compressors=None)
    array[:] = 0 * SECRET + 1
    (file,) = chunk_files(path)
    file.unlink()
    file.symlink_to(secret)
    with open_reader(path) as reader, pytest.raises(FileError, match="outside the folder"):
        list(reader.read(["elements"], rows=4))
    link = tmp_path / "link.zarr"  # a link that the user chose is followed
    os.rename(path, tmp_path / "b.zarr")
    file = tmp_path / "b.zarr" / file.relative_to(path)
    file.unlink()
    file.write_bytes(SECRET.tobytes())
    link.symlink_to(tmp_path / "b.zarr")
    assert read(link, "elements") == SECRET.tolist()


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_an_array_elsewhere_is_not_read(tmp_path: Path) -> None:
    store(tmp_path / "other.zarr", 3, None)
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    group.create_array("y", shape=(2,), chunks=(2,), dtype="f4")[:] = 1.0
    (tmp_path / "a.zarr" / "z").symlink_to(tmp_path / "other.zarr")
    with pytest.raises(FileError, match="outside the folder"):
        open_reader(tmp_path / "a.zarr")
    (tmp_path / "a.zarr" / "z").unlink()
    zarr.consolidate_metadata(tmp_path / "a.zarr")
    described = tmp_path / "a.zarr" / "zarr.json"
    metadata = json.loads(described.read_text())
    members = metadata["consolidated_metadata"]["metadata"]
    members["../other.zarr/x"] = members["y"]
    described.write_text(json.dumps(metadata))
    with open_reader(tmp_path / "a.zarr") as reader:
        assert reader.schema.names == ["y"]


class Code:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("place", ["filters", "compressor"])
def test_code_in_a_chunk_is_not_run(tmp_path: Path, place: str, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    store(tmp_path / "a.zarr", 2, None)
    described = tmp_path / "a.zarr" / "x" / ".zarray"
    text, code = {"id": "vlen-utf8"}, {"id": "pickle", "protocol": 4}
    filters, compressor = ([text, code], None) if place == "filters" else ([text], code)
    metadata = json.loads(described.read_text())
    metadata |= {"dtype": "|O", "fill_value": "", "filters": filters, "compressor": compressor}
    described.write_text(json.dumps(metadata))
    for file in chunk_files(tmp_path / "a.zarr"):
        file.write_bytes(pickle.dumps(Code()))
    with pytest.raises(FileError, match=r"codec is 'pickle'.*could run code"):
        setfold.encode_sets(encoder(), "a.zarr", "out.npz")
    assert not (tmp_path / "ran").exists()
