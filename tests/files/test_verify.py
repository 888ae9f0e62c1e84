"""setfold.verify: any file of setfold is intact, or an error says why not."""

from __future__ import annotations

import io
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import setfold
from setfold.core import persist
from setfold.files import sealed
from setfold.files.inputs import open_reader
from setfold.files.sealed import SealedWriter
from tests.files.files import encode, encoder, fork, interrupt, rows, write

TEXT = {
    "model.safetensors": "model with 11 tensors; it can be rebuilt",
    "state.safetensors": "state of 2 sets with 10 elements in 3 tensors",
    "states.arrow": "states of 40 sets with 600 elements; model with 11 tensors; it can be rebuilt",
    "out.parquet": "encodings of 40 sets, each (4, 5)",
    "out.arrow": "encodings of 40 sets, each (4, 5)",
    "out.npz": "encodings of 40 sets, each (4, 5)",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One file of each kind."""
    folder, model = tmp_path_factory.mktemp("files"), encoder()
    setfold.save(model, folder / "model.safetensors")
    model.update(model.initial_state(2), torch.ones(2, 5, 3)).save(folder / "state.safetensors")
    inputs = write(folder / "in", rows(names=lambda i: f"user {i:02}"))
    for name in ("out.parquet", "out.arrow", "out.npz"):
        encode(model, inputs, folder / name, states=folder / "states.arrow", overwrite=True)
    return folder


@pytest.mark.parametrize("name", TEXT)
def test_an_intact_file_is_described(folder, name):
    assert setfold.verify(folder / name) == TEXT[name]
    assert setfold.verify(str(folder / name)) == TEXT[name]


@pytest.mark.parametrize("name", TEXT)
def test_damage_is_found(folder, tmp_path, name, monkeypatch):
    content, path = (folder / name).read_bytes(), tmp_path / name
    unnoticed = []
    for place in range(0, len(content), max(1, len(content) // 120)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            setfold.verify(path)
            unnoticed.append(place)
        except setfold.SetfoldError:
            pass
    if name != "out.npz":  # times and attributes in a zip file have no checksum, and no effect
        assert not unnoticed
    for place in unnoticed:
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        found, expected = np.load(io.BytesIO(damaged)), np.load(io.BytesIO(content))
        assert all((found[key] == expected[key]).all() for key in ("set", "count", "encoding"))
    for length in (0, 3, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(setfold.FileError):
            setfold.verify(path)


def test_files_of_other_tools_are_refused(tmp_path):
    table = pa.table({"set": [1], "count": [1], "encoding": [[1.0]]})
    pq.write_table(table, tmp_path / "a.parquet")
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    np.savez_compressed(
        tmp_path / "b.npz", set=np.arange(1), count=np.arange(1), encoding=np.ones((1, 2))
    )
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    for name in ("a.parquet", "a.npz", "b.npz", "empty", "folder", "missing"):
        with pytest.raises(setfold.FileError):
            setfold.verify(tmp_path / name)
    assert not list((tmp_path / "folder").iterdir())


def with_null(lists):
    values = [None, *lists.flatten().to_pylist()[1:]]
    return pa.FixedSizeListArray.from_arrays(pa.array(values, pa.float32()), lists.type.list_size)


@pytest.mark.parametrize("name", ["out.parquet", "out.arrow"])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.set_column(1, "count", pa.array([-1] * len(t))),
        lambda t: t.set_column(1, "count", pa.array([1.0] * len(t))),
        lambda t: t.take(pa.array(range(len(t)))[::-1]),
        lambda t: t.set_column(0, "set", pa.array([None] * len(t), pa.large_string())),
        lambda t: t.drop_columns("count"),
        lambda t: t.append_column("more", t["count"]),
        lambda t: t.set_column(2, "encoding", t["encoding"].cast(pa.list_(pa.float32()))),
        lambda t: t.set_column(2, "encoding", with_null(t["encoding"].combine_chunks())),
        lambda t: t.replace_schema_metadata({}),
        lambda t: t.replace_schema_metadata(
            {b"setfold": t.schema.metadata[b"setfold"].replace(b"[4, 5]", b"[4, 6]")}
        ),
    ],
)
def test_encodings_with_a_valid_seal_must_have_the_right_form(folder, tmp_path, name, change):
    arrow = pa.ipc.open_file(str(folder / "out.arrow")).read_all()
    changed, file = change(arrow), SealedWriter(tmp_path / name)
    opened = pq.ParquetWriter if name == "out.parquet" else pa.ipc.new_file
    with opened(file, changed.schema) as writer:
        writer.write_table(changed)
    file.seal(len(changed))
    with pytest.raises(setfold.FileError):
        setfold.verify(tmp_path / name)


def save_arrays(path, **arrays):
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array, version=(2, 0))
        archive.comment = b"setfold.result=" + b"0" * 32


ARRAYS = {"set": np.arange(2), "count": np.ones(2, np.int64), "encoding": np.ones((2, 3000))}


@pytest.mark.parametrize(
    "change",
    [
        {"set": np.arange(2)[::-1]},
        {"set": np.array([[0, 0], [1, 1]])},
        {"set": np.array([b"b", b"a"])},
        {"count": -np.ones(2, np.int64)},
        {"count": np.ones(2)},
        {"encoding": np.ones((3, 3))},
        {"encoding": np.asfortranarray(np.ones((2, 3)))},
        {"more": np.ones(2)},
    ],
    ids=str,
)
def test_arrays_must_have_the_right_form(tmp_path, change):
    save_arrays(tmp_path / "out.npz", **ARRAYS)
    assert setfold.verify(tmp_path / "out.npz") == "encodings of 2 sets, each (3000,)"
    save_arrays(tmp_path / "out.npz", **ARRAYS | change)
    with pytest.raises(setfold.FileError):
        setfold.verify(tmp_path / "out.npz")


def test_an_array_is_verified_to_its_end(tmp_path):
    save_arrays(tmp_path / "out.npz", **ARRAYS)
    content = bytearray((tmp_path / "out.npz").read_bytes())
    content[-1000] ^= 1
    (tmp_path / "out.npz").write_bytes(content)
    with pytest.raises(setfold.FileError, match="encoding"):
        setfold.verify(tmp_path / "out.npz")


def test_an_archive_that_lost_a_byte_is_refused(tmp_path):
    save_arrays(tmp_path / "out.npz", **ARRAYS)
    content = (tmp_path / "out.npz").read_bytes()
    for place in (40, 500, len(content) - 1000):  # offsets in the directory become negative
        (tmp_path / "out.npz").write_bytes(content[:place] + content[place + 1 :])
        with pytest.raises(setfold.FileError):
            setfold.verify(tmp_path / "out.npz")


def test_bytes_that_no_reader_needs_are_verified_too(tmp_path, monkeypatch):
    monkeypatch.setattr(sealed, "CHUNK", 8)
    encode(encoder(), write(tmp_path / "in", rows()), tmp_path / "out.arrow")
    content = bytearray((tmp_path / "out.arrow").read_bytes())
    content[7] ^= 1  # padding after the magic
    (tmp_path / "out.arrow").write_bytes(content)
    with pytest.raises(setfold.FileError, match="bytes 0 to 8 have changed"):
        setfold.verify(tmp_path / "out.arrow")


def test_an_array_must_have_the_size_that_its_header_says(tmp_path):
    with zipfile.ZipFile(tmp_path / "out.npz", "w") as archive:
        for name in ("set", "count", "encoding"):
            file = io.BytesIO()
            header = {"descr": "<i8", "fortran_order": False, "shape": (1 << 50,)}
            np.lib.format.write_array_header_2_0(file, header)
            archive.writestr(f"{name}.npy", file.getvalue())
    with pytest.raises(setfold.FileError, match="another size"):
        setfold.verify(tmp_path / "out.npz")


def test_classes_of_other_packages_are_not_imported(tmp_path):
    description = {"structure": {"class": "evil.Model", "arguments": {}}, "dtype": "float32"}
    persist.write(tmp_path / "model", "model", {}, description)
    assert setfold.verify(tmp_path / "model") == (
        "model with 0 tensors; it needs evil.Model, not imported"
    )


def test_a_run_in_progress_is_not_verified(tmp_path, tight, monkeypatch):
    inputs, out = write(tmp_path / "in", rows()), tmp_path / "out.parquet"
    work = tmp_path / "out.parquet.work"
    interrupt(monkeypatch, encoder(), inputs, out)
    assert setfold.verify(work).startswith("work folder of an interrupted run: journal and")

    def check():
        with pytest.raises(setfold.FileError, match="a run is using"):
            setfold.verify(work)

    def callback(_):
        process = fork(check)
        process.join()
        assert process.exitcode == 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(encoder(), inputs, out, resume=True, progress=callback)


def test_other_tools_find_damaged_pages_of_parquet_files(folder, tmp_path):
    content = bytearray((folder / "out.parquet").read_bytes())
    content[len(content) // 3] ^= 1
    path = tmp_path / "out.parquet"
    path.write_bytes(content)
    with pytest.raises(OSError, match="CRC checksum verification failed"):
        pq.read_table(path, page_checksum_verification=True)
    with open_reader(path) as reader, pytest.raises(setfold.FileError, match="CRC"):
        list(reader.read(["count", "encoding"], 0, None, rows=100))


def test_numpy_finds_damaged_arrays(folder, tmp_path):
    content = bytearray((folder / "out.npz").read_bytes())
    content[content.index(b"encoding.npy") + 400] ^= 1
    (tmp_path / "out.npz").write_bytes(content)
    with pytest.raises(zipfile.BadZipFile, match="CRC"):
        np.load(tmp_path / "out.npz")["encoding"]


def test_a_sealed_parquet_file_is_an_ordinary_one(folder):
    path = folder / "out.parquet"
    assert pq.read_table(path)["count"].to_pylist() == np.load(folder / "out.npz")["count"].tolist()
    polars, duckdb = pytest.importorskip("polars"), pytest.importorskip("duckdb")
    assert polars.read_parquet(path).shape == (40, 3)
    assert duckdb.sql(f"select sum(count) from '{path}'").fetchall() == [(600,)]


def test_the_seal_covers_every_byte(folder):
    for name in ("out.parquet", "out.arrow", "states.arrow"):
        content = (folder / name).read_bytes()
        with sealed.SealedFile(folder / name) as file:
            assert file.read() == content
            assert file.seal.rows == 40
