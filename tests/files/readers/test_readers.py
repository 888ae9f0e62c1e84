"""Behaviour of single formats, and errors that all readers share."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import uproot

from setfold.errors import FileError, InputError
from setfold.files.inputs import open_reader
from setfold.files.readers.reader import PACKAGES
from tests.files.readers.written import FORMATS


def values(path: Path, name: str) -> list[object]:
    with open_reader(path) as reader:
        return [v for b in reader.read([name], rows=1000) for v in b.column(name).to_pylist()]


@pytest.mark.parametrize(
    ("name", "module", "packages"),
    [
        ("hdf5", "h5py", "h5py"),
        ("zarr", "zarr", "zarr"),
        ("las", "laspy", "'laspy[lazrs]'"),
        ("laz", "lazrs", "'laspy[lazrs]'"),
        ("off", "trimesh", "trimesh"),
        ("root", "uproot", "uproot awkward"),
        ("root", "awkward", "uproot awkward"),
    ],
)
def test_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, packages: str
) -> None:
    path = tmp_path / f"a{FORMATS[name].suffix}"
    FORMATS[name].write(path, 3)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=f"{module}.*{re.escape(f'pip install {packages}')}$"):
        open_reader(path)


def test_the_packages_of_the_advice_are_those_of_the_extras() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    for extra, packages in PACKAGES.items():
        names = [re.split("[<>=]", requirement)[0] for requirement in extras[extra]]
        assert packages.replace("'", "").split() == names


def test_unknown_and_absent(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown suffix of a\.txt; expected one of \.parquet"):
        open_reader(Path("a.txt"))
    with pytest.raises(FileError, match="does not exist"):
        open_reader(tmp_path / "a.npy")
    (tmp_path / "b.npy").mkdir()
    with pytest.raises(FileError, match="got a folder"):
        open_reader(tmp_path / "b.npy")


def test_parquet_cuts_are_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": range(100)}), path, row_group_size=15)
    with open_reader(path) as reader:
        assert reader.cuts(30) == [(0, 30), (30, 60), (60, 90), (90, 100)]
        assert reader.cuts(40) == [(0, 45), (45, 90), (90, 100)]


@pytest.mark.parametrize("kind", ["npz", "hdf5", "torch"])
def test_columns_of_several_lengths(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a{FORMATS[kind].suffix}"
    columns = {"x": np.arange(5.0), "y": np.arange(5), "other": np.arange(3)}
    if kind == "npz":
        np.savez(path, **columns)
    elif kind == "hdf5":
        with h5py.File(path, "w") as file:
            file.update(columns)
    else:
        torch.save({name: torch.from_numpy(v) for name, v in columns.items()}, path)
    with open_reader(path) as reader:
        assert set(reader.schema.names) == set(columns)
        assert reader.num_rows is None
        assert reader.cuts(2) == [(0, None)]
        (batch,) = reader.read(["x", "y"], rows=10)
        assert batch.to_pydict() == {"x": [0, 1, 2, 3, 4], "y": [0, 1, 2, 3, 4]}
        with pytest.raises(InputError, match="'x' has 5, 'other' has 3"):
            list(reader.read(["x", "other"], rows=10))


def test_trees(tmp_path: Path) -> None:
    path = tmp_path / "a.root"
    with uproot.recreate(path) as file:
        for name, rows in (("one", 3), ("two", 2)):
            file.mktree(name, {"x": "f8"}).extend({"x": np.arange(rows) / 2})
    assert values(path, "one/x") == [0, 0.5, 1]
    assert values(path, "two/x") == [0, 0.5]


def test_sets_as_rows_of_an_array(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    clouds = np.arange(24.0).reshape(2, 4, 3)
    np.save(path, clouds)
    assert values(path, "elements") == clouds.tolist()


def test_arrays_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        rows = file.create_dataset("j", 3, dtype=h5py.vlen_dtype(np.float32))
        for row in range(3):
            rows[row] = np.arange(row)
    assert values(path, "j") == [[], [0], [0, 1]]


def test_what_could_run_code_is_not_loaded(tmp_path: Path) -> None:
    torch.save({"x": Path("a")}, tmp_path / "a.pt")
    with pytest.raises(FileError, match="not loaded, because that could run code"):
        open_reader(tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(FileError, match="never unpickled"):
        open_reader(tmp_path / "a.npy")


MEMORY = """
import sys
from pathlib import Path
from zipfile import ZipFile
from setfold.files.inputs import open_reader
from setfold.files.readers.reader import PACKAGES

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024

with open_reader(Path(sys.argv[1])) as reader:
    rows, seen = 0, []
    for batch in reader.read(reader.schema.names, rows=8192):
        rows += batch.num_rows
        for column in batch.columns:
            (column.flatten() if column.type.num_fields else column).sum()
        seen.append(resident())
print(rows, max(seen) - seen[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory usage from /proc")
@pytest.mark.parametrize("suffix", [".npy", ".parquet", ".arrow", ".ipc"])
def test_memory(tmp_path: Path, suffix: str) -> None:
    """Only a small part of a 32 MB block is in memory at any time."""
    path = tmp_path / f"a{suffix}"
    elements = np.random.default_rng(0).random((500_000, 16), np.float32)
    table = pa.table({f"c{i}": elements[:, i] for i in range(16)})
    if suffix == ".npy":
        np.save(path, elements)
    elif suffix == ".parquet":
        pq.write_table(table, path, row_group_size=len(elements), use_dictionary=False)
    else:
        new = pa.ipc.new_file if suffix == ".arrow" else pa.ipc.new_stream
        with new(path, table.schema) as file:
            file.write_table(table)
    command = [sys.executable, "-c", MEMORY, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows, megabytes = map(int, done.stdout.split())
    assert rows == len(elements)
    assert megabytes < 16


def test_columns_share_what_is_read_ahead(tmp_path: Path) -> None:
    """For the first rows of 64 columns of 1 MB each, at most a quarter is read."""
    path = tmp_path / "a.parquet"
    numbers = np.random.default_rng(0).random(1 << 17)
    table = pa.table({f"c{i}": numbers for i in range(64)})
    pq.write_table(table, path, compression="none", use_dictionary=False, data_page_size=1 << 13)
    before = pa.total_allocated_bytes()
    with open_reader(path) as reader:
        batches = reader.read(reader.schema.names, rows=100)
        next(batches)
        assert pa.total_allocated_bytes() - before < 24 << 20


@pytest.mark.parametrize("suffix", [".las", ".laz"])
def test_impossible_record_counts(tmp_path: Path, suffix: str) -> None:
    """laspy would allocate as many records as the header lists, regardless of the file size."""
    path = tmp_path / f"a{suffix}"
    FORMATS["las"].write(path, 10)
    content = bytearray(path.read_bytes())
    place = 100
    if suffix == ".laz":  # the chunk table: a version, then the number of chunks
        (points,) = struct.unpack_from("<I", content, 96)
        place = struct.unpack_from("<q", content, points)[0] + 4
    struct.pack_into("<I", content, place, 100_000)
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"a\.la.*more records than fit"):
        open_reader(path)


def test_stream_cut_between_batches(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    FORMATS["arrow stream"].write(path, 20)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(FileError, match="a stream without its end marker"):
        open_reader(path)


def test_checksum_of_what_is_compressed(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).random(50_000))
    with ZipFile(path) as archive:
        checksum = struct.pack("<I", archive.getinfo("x.npy").CRC)
    path.write_bytes(path.read_bytes().replace(checksum, b"oops"))
    with pytest.raises(FileError, match=r"cannot read .*a\.npz from row 49000 on.*CRC"):
        values(path, "x")
