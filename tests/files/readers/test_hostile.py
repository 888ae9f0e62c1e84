"""Files that list more than they hold, or would take more memory than they hold."""

from __future__ import annotations

import io
import json
import os
import struct
import warnings
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
import torch
import trimesh
import uproot
import zarr

import setfold
from setfold.errors import FileError
from setfold.files.inputs import open_reader
from setfold.files.readers import meshes, root
from tests.files.files import encoder
from tests.files.readers.written import FORMATS

POINTS = np.arange(36, dtype="<f4").reshape(12, 3)


def read(path: Path, name: str = "elements") -> list[object]:
    with open_reader(path) as reader:
        reader.check([name])
        return [row for b in reader.read([name], rows=4) for row in b.column(0).to_pylist()]


# ---- NumPy -----------------------------------------------------------------------------------


def npy(shape, content: bytes = POINTS.tobytes(), fortran: bool = False) -> bytes:
    file = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": fortran, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + content


WRONG = [(-12, 3), (13, 3), (11, 3), (10**12, 3), (2**62, 2**62), (3,)]


@pytest.mark.parametrize("shape", WRONG)
def test_an_array_has_the_shape_of_its_header(tmp_path: Path, shape) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(npy((12, 3)))
    assert read(path) == POINTS.tolist()
    path.write_bytes(npy(shape))
    with pytest.raises(FileError, match=r"expected .* bytes of header and array"):
        open_reader(path)


@pytest.mark.parametrize("method", [ZIP_STORED, ZIP_DEFLATED])
@pytest.mark.parametrize("shape", WRONG)
def test_an_array_in_an_archive_has_the_shape_of_its_header(tmp_path, shape, method) -> None:
    path = tmp_path / "a.npz"
    for good in (True, False):
        with ZipFile(path, "w", method) as archive:
            archive.writestr("x.npy", npy((12, 3) if good else shape))
            archive.writestr("y.npy", npy((120, 3), POINTS.tobytes() * 10))  # would be read as x
        if good:
            assert read(path, "x") == POINTS.tolist()
    with pytest.raises(FileError, match=r"expected .* bytes of header and array"):
        open_reader(path)


# ---- chunks that must be read as a whole -----------------------------------------------------


def chunked_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        shape = (15_000_000, 3)
        dataset = file.create_dataset("x", shape, "f4", chunks=shape, compression="gzip")
        dataset.id.write_direct_chunk((0, 0), b"not a stream of gzip")


def chunked_zarr(path: Path) -> None:
    group = zarr.open_group(path, mode="w")
    group.create_array("x", shape=(10**15, 3), chunks=(10**9, 3), dtype="f4")


def fortran_npz(path: Path) -> None:
    shape = (15_000_000, 3)
    with ZipFile(path, "w", ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as file:
        file.write(npy(shape, b"", fortran=True))
        for _ in range(18):
            file.write(bytes(10_000_000))


def compressed_arrow(path: Path) -> None:
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(45_000_000, "f4")), 3)
    pa.feather.write_feather(pa.table({"x": zeros}), path, compression="zstd", chunksize=10**9)


@pytest.mark.parametrize(
    ("suffix", "write"),
    [
        (".h5", chunked_hdf5),
        (".zarr", chunked_zarr),
        (".npz", fortran_npz),
        (".feather", compressed_arrow),
    ],
)
def test_chunks_must_fit_in_memory(tmp_path: Path, suffix: str, write) -> None:
    path = tmp_path / f"a{suffix}"
    write(path)
    with pytest.raises(FileError, match=r"chunks of .*B, and a chunk must be .* --memory \d+MB"):
        setfold.encode_sets(encoder(), path, tmp_path / "out.npz", memory="500MB")


def large_hdf5_chunk(path: Path) -> None:
    with h5py.File(path, "w") as file:
        shape, chunks = (4, 3), (15_000_000, 3)
        options = {"chunks": chunks, "maxshape": (None, 3), "compression": "gzip"}
        file.create_dataset("x", shape, "f4", **options)


def large_zarr_chunk(path: Path) -> None:
    zarr.create_array(path, shape=(4, 3), chunks=(10**9, 3), dtype="f4")


def wide_zarr_chunk(path: Path) -> None:
    zarr.create_array(path, shape=(4, 3), chunks=(2, 10**9), dtype="f4")


def large_zarr_index(path: Path) -> None:
    zarr.create_array(path, shape=(4, 3), chunks=(1, 3), shards=(10**9, 3), dtype="f4")


@pytest.mark.parametrize(
    ("suffix", "write"),
    [
        (".h5", large_hdf5_chunk),
        (".zarr", large_zarr_chunk),
        (".zarr", wide_zarr_chunk),
        (".zarr", large_zarr_index),
    ],
)
def test_a_chunk_may_be_larger_than_the_array(tmp_path: Path, suffix: str, write) -> None:
    write(tmp_path / f"a{suffix}")
    with pytest.raises(FileError, match=r"chunks of .*GB, and a chunk must|chunks of 180 MB"):
        setfold.encode_sets(
            encoder(), tmp_path / f"a{suffix}", tmp_path / "out.npz", memory="500MB"
        )


@pytest.mark.parametrize("chunks", [(10**5, 3), (1, 1)])
def test_an_array_has_a_file_for_each_chunk(tmp_path: Path, chunks, monkeypatch) -> None:
    """Zarr would look for each of them, one after the other."""
    path = tmp_path / "a.zarr"
    array = zarr.create_array(path, shape=(10**18, 3), chunks=chunks, dtype="f4")
    array[:4] = 1.0
    monkeypatch.setattr(zarr.Array, "__getitem__", lambda *_: pytest.fail("was read"))
    with pytest.raises(FileError, match="is not stored"):
        setfold.encode_sets(encoder(), path, tmp_path / "out.npz")


def test_any_number_of_rows_has_few_ranges(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_array(path, shape=(10**18, 3), chunks=(10**5, 3), dtype="f4")
    with open_reader(path) as reader:
        cuts = reader.cuts(1 << 20)
    assert len(cuts) < 20_000
    assert (cuts[0][0], cuts[-1][1]) == (0, 10**18)
    assert all(start % 10**5 == 0 for start, _ in cuts)


@pytest.mark.parametrize("suffix", [".parquet", ".h5", ".npy", ".csv", ".arrow", ".laz", ".pt"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"a{suffix}")
    with pytest.raises(FileError, match="neither a file nor a folder"):
        open_reader(tmp_path / f"a{suffix}")


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=POINTS, chunks=(12, 3))
    chunk = tmp_path / "a.zarr" / "c" / "0" / "0"
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(FileError, match="neither a file nor a folder"):
        read(tmp_path / "a.zarr")


# ---- compressed Arrow --------------------------------------------------------------------------


def test_a_chunk_of_texts_cannot_hold_more_than_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    group = zarr.open_group(path, mode="w")
    array = group.create_array("ids", shape=(3,), chunks=(3,), dtype="str", compressors=None)
    array[:] = np.array(["a", "b", "c"], dtype=object)
    assert read(path, "ids") == ["a", "b", "c"]
    chunk = path / "ids" / "c" / "0"
    chunk.write_bytes(struct.pack("<I", 50_000_000) + chunk.read_bytes()[4:])
    with pytest.raises(FileError, match="cannot hold 50000000 texts"):
        read(path, "ids")


@pytest.mark.parametrize("suffix", [".arrow", ".ipc"])
def test_what_a_buffer_declares_must_fit_in_memory(tmp_path: Path, suffix: str) -> None:
    """Arrow allocates it, although the rows would take a few bytes."""
    path, table = tmp_path / f"a{suffix}", pa.table({n: np.ones(99, "f4") for n in "xyz"})
    create = pa.ipc.new_file if suffix == ".arrow" else pa.ipc.new_stream
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with create(path, table.schema, options=options) as file:
        file.write_table(table)
    setfold.encode_sets(encoder(), path, tmp_path / "out.npz", memory="500MB")
    declared = struct.pack("<q", 4 * 99) + b"\x28\xb5\x2f\xfd"  # then a frame of Zstandard
    content = path.read_bytes()
    assert content.count(declared) == 3
    path.write_bytes(content.replace(declared, struct.pack("<q", 1 << 33) + declared[8:]))
    with pytest.raises(FileError, match=r"chunks of 25\.8 GB, and a chunk must"):
        setfold.encode_sets(encoder(), path, tmp_path / "new.npz", memory="500MB")


def test_a_record_batch_has_at_least_no_rows(tmp_path: Path) -> None:
    path, table = tmp_path / "a.arrow", pa.table({"elements": np.ones(7777)})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    rows = struct.pack("<q", 7777)
    path.write_bytes(path.read_bytes().replace(rows, struct.pack("<q", -7)))
    with pytest.raises(FileError, match="a record batch has -7 rows"):
        open_reader(path)


# ---- PyTorch ---------------------------------------------------------------------------------


def test_repetitions_of_a_few_numbers_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"x": torch.ones(1, 3).expand(10**12, 3), "y": torch.arange(12.0)[::2]}, path)
    assert read(path, "y") == [0, 2, 4, 6, 8, 10]
    with pytest.raises(FileError, match="repetitions of a few"):
        setfold.encode_sets(encoder(), path, tmp_path / "out.npz", features="x")


def twice(levels: int) -> list[object]:
    inner: list[object] = [torch.ones(2)]
    for _ in range(levels):
        inner = [inner, inner]
    return inner


def itself() -> list[object]:
    outer: list[object] = [torch.ones(2)]
    outer.append(outer)
    return outer


@pytest.mark.parametrize("content", [twice(60), itself()], ids=["twice", "itself"])
def test_containers_within_each_other_are_not_listed(tmp_path: Path, content) -> None:
    path = tmp_path / "a.pt"
    torch.save(content, path)
    with pytest.raises(FileError, match=r"it contains the list .* twice"):
        open_reader(path)


# ---- meshes ----------------------------------------------------------------------------------

GLB = {
    "asset": {"version": "2.0"},
    "scenes": [{"nodes": [0]}],
    "nodes": [{"mesh": 0}],
    "meshes": [{"primitives": [{"attributes": {"POSITION": 0}}]}],
    "buffers": [{"byteLength": POINTS.nbytes}],
    "bufferViews": [{"buffer": 0, "byteLength": POINTS.nbytes}],
    "accessors": [{"bufferView": 0, "componentType": 5126, "count": 12, "type": "VEC3"}],
}
ARRAY = GLB["accessors"][0]
INNER = [{"children": [place + 1, place + 1]} for place in range(60)]


def glb(path: Path, **changes) -> Path:
    header = json.dumps({**GLB, **changes}).encode()
    header += b" " * (-len(header) % 4)
    data = POINTS.tobytes()
    parts = struct.pack("<I4s", len(header), b"JSON") + header
    parts += struct.pack("<I4s", len(data), b"BIN\0") + data
    path.write_bytes(struct.pack("<4sII", b"glTF", 2, 12 + len(parts)) + parts)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accessors": [{**ARRAY, "count": 10**9}]}, "larger than the file"),
        ({"accessors": [ARRAY, {**ARRAY, "count": -(10**9)}]}, "larger than the file"),
        ({"accessors": [ARRAY] * 1000, "nodes": []}, None),
        ({"accessors": [{k: v for k, v in ARRAY.items() if k != "bufferView"}]}, "compressed"),
        ({"accessors": [{**ARRAY, "sparse": {"count": 1}}]}, "compressed"),
        ({"buffers": [{"byteLength": 144, "uri": "../other.bin"}]}, "in other files"),
        ({"nodes": [*INNER, {"mesh": 0}]}, "several parents"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_arrays_of_a_mesh_are_in_the_file(tmp_path: Path, changes, message) -> None:
    assert read(glb(tmp_path / "good.glb"), "x") == POINTS[:, 0].tolist()
    with pytest.raises(FileError, match=message):
        open_reader(glb(tmp_path / "a.glb", **changes))


def test_meshes_are_not_repeated_without_limit(tmp_path: Path, monkeypatch) -> None:
    scene = {"scenes": [{"nodes": list(range(50))}], "nodes": [{"mesh": 0}] * 50}
    path = glb(tmp_path / "a.glb", **scene)
    assert len(read(path, "x")) == 600
    monkeypatch.setattr(meshes, "MAX_VERTICES", 599)
    with pytest.raises(FileError, match="repeats its meshes to 600 vertices"):
        open_reader(path)


OTHERS = {
    "a.obj": "mtllib secret\nusemtl m\nv 1 2 3\nv 4 5 6\nv 7 8 9\nf 1 2 3\n",
    "a.ply": "ply\nformat ascii 1.0\ncomment TextureFile secret\nelement vertex 3\n"
    "property float x\nproperty float y\nproperty float z\nend_header\n1 2 3\n4 5 6\n7 8 9\n",
}


@pytest.mark.parametrize("name", OTHERS)
def test_files_that_a_mesh_refers_to_are_not_opened(tmp_path: Path, name: str, monkeypatch) -> None:
    opened = []
    for resolver in (trimesh.resolvers.FilePathResolver, trimesh.resolvers.WebResolver):
        monkeypatch.setattr(resolver, "get", lambda self, key: opened.append(key))
        monkeypatch.setattr(resolver, "__getitem__", lambda self, key: opened.append(key))
    (tmp_path / "secret").write_text("newmtl m\nKd 1 0 0\n")
    (tmp_path / name).write_text(OTHERS[name])
    assert read(tmp_path / name, "x") == [1, 4, 7]
    assert not opened


def test_numbers_of_a_mesh_are_never_dropped(tmp_path: Path, monkeypatch) -> None:
    """NumPy before 2.4 only warned if a text of numbers contained something else."""
    numbers_of = np.fromstring

    def old(text, **options):
        warnings.warn("string or file could not be read to its end", DeprecationWarning, 1)
        return numbers_of(text.partition("oops")[0], **options)

    monkeypatch.setattr(np, "fromstring", old)
    corners = "".join(f"vertex {place} 0 0\n" for place in range(6)).replace("3 0 0", "oops 0 0")
    (tmp_path / "a.stl").write_text(f"solid a\nfacet normal 0 0 1\n{corners}endfacet\nendsolid a\n")
    with pytest.raises(FileError, match="could not be read to its end"):
        open_reader(tmp_path / "a.stl")


# ---- ROOT ------------------------------------------------------------------------------------


def test_branches_in_other_files_are_not_read(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.root"
    expected = FORMATS["root"].write(path, 10)
    name = next(iter(expected))
    assert read(path, name) == expected[name].tolist()
    member = uproot.model.Model.member
    monkeypatch.setattr(
        uproot.model.Model,
        "member",
        lambda self, key, *more, **others: (
            "b.root" if key == "fFileName" else member(self, key, *more, **others)
        ),
    )
    with pytest.raises(FileError, match=r"its content is in b\.root, which is not opened"):
        read(path, name)
    with open_reader(path) as reader, pytest.raises(FileError, match="which is not opened"):
        list(reader.read([name], rows=4))


def test_a_basket_has_a_limited_size(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.root"
    FORMATS["root"].write(path, 10)
    with open_reader(path) as reader:
        monkeypatch.setattr(root, "MAX_BASKET", 8)
        with pytest.raises(FileError, match="a basket has 40 bytes; at most 8"):
            list(reader.read(["x"], rows=4))
