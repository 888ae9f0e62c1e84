"""Small files in every format, each written by the library of that format."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import awkward as ak
import h5py
import laspy
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import torch
import trimesh
import uproot
import zarr

Table = dict[str, np.ndarray]


class Format(NamedTuple):
    """Writes a file of n rows, and returns the values that a reader should return."""

    suffix: str
    write: Callable[[Path, int], Table]
    detects_truncation: bool = True  # whether truncated files can be detected


def table(n: int) -> Table:
    generator = np.random.default_rng(n)
    return {
        "event": np.arange(n) // 3,
        "x": generator.standard_normal(n).astype(np.float32),
        "half": generator.standard_normal(n).astype(np.float16),
        "flag": generator.random(n) < 0.5,
        "p": generator.standard_normal((n, 3)).astype(np.float32),
    }


def as_arrow(columns: Table) -> pa.Table:
    def column(values: np.ndarray) -> pa.Array:
        flat = pa.array(values.reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, 3) if values.ndim == 2 else flat

    return pa.table({name: column(values) for name, values in columns.items()})


def parquet(path: Path, n: int) -> Table:
    columns = table(n)
    pq.write_table(as_arrow(columns), path, row_group_size=7)
    return columns


def arrow_file(path: Path, n: int) -> Table:
    columns = table(n)
    whole = as_arrow(columns)
    with pa.ipc.new_file(path, whole.schema) as file:
        file.write_table(whole, max_chunksize=7)
    return columns


def arrow_stream(path: Path, n: int) -> Table:
    columns = table(n)
    whole = as_arrow(columns)
    with pa.ipc.new_stream(path, whole.schema) as file:
        file.write_table(whole, max_chunksize=7)
    return columns


def feather(path: Path, n: int) -> Table:
    columns = table(n)
    pa.feather.write_feather(as_arrow(columns), path, compression="zstd", chunksize=7)
    return columns


def text(path: Path, n: int) -> Table:
    columns = {name: table(n)[name] for name in ("event", "x")}
    columns["x"] = columns["x"].astype(np.float64)
    separator = "\t" if ".tsv" in path.name else ","
    with pa.output_stream(path, compression="gzip" if path.suffix == ".gz" else None) as file:
        options = pa.csv.WriteOptions(delimiter=separator)
        pa.csv.write_csv(pa.table(columns), file, options)
    return columns


def json_lines(path: Path, n: int) -> Table:
    columns = table(n)
    columns["x"] = columns["x"].astype(np.float64)
    columns["half"] = columns["half"].astype(np.float64)
    del columns["p"]  # JSON has no lists of a fixed size
    lists = {name: values.tolist() for name, values in columns.items()}
    lines = [json.dumps({name: lists[name][row] for name in lists}) for row in range(n)]
    content = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return columns


def npy(path: Path, n: int) -> Table:
    np.save(path, table(n)["p"])
    return {"elements": table(n)["p"]}


def npy_plain(path: Path, n: int) -> Table:
    np.save(path, table(n)["x"].astype(">f8"))
    return {"elements": table(n)["x"].astype("f8")}


def npy_fortran(path: Path, n: int) -> Table:
    np.save(path, np.asfortranarray(table(n)["p"]))
    return {"elements": table(n)["p"]}


def npy_fields(path: Path, n: int) -> Table:
    columns = table(n)
    fields = [(name, v.dtype, v.shape[1:]) for name, v in columns.items()]
    rows = np.zeros(n, fields)
    for name, values in columns.items():
        rows[name] = values
    np.save(path, rows)
    return columns


def npz(path: Path, n: int) -> Table:
    np.savez(path, **table(n), scalar=3)
    return table(n)


def npz_compressed(path: Path, n: int) -> Table:
    columns = table(n)
    np.savez_compressed(path, **columns, turned=np.asfortranarray(columns["p"]))
    return columns | {"turned": columns["p"]}


def hdf5(path: Path, n: int) -> Table:
    columns = table(n)
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file.create_dataset(f"group/{name}", data=values)
        file["group/scalar"] = 3
    return {f"group/{name}": values for name, values in columns.items()}


def hdf5_chunks(path: Path, n: int) -> Table:
    columns = table(n)
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            chunks = (20, *values.shape[1:])
            file.create_dataset(
                name, data=values, chunks=chunks, compression="gzip", maxshape=(None, *chunks[1:])
            )
        file.create_dataset("name", data=[f"é{i}" for i in range(n)], dtype=h5py.string_dtype())
    return columns | {"name": np.array([f"é{i}" for i in range(n)])}


def zarr_group(path: Path, n: int) -> Table:
    columns = table(n)
    root = zarr.open_group(path, mode="w")
    for name, values in columns.items():
        root.create_array(f"group/{name}", data=values, chunks=(20, *values.shape[1:]))
    return {f"group/{name}": values for name, values in columns.items()}


def zarr_array(path: Path, n: int) -> Table:
    zarr.save_array(path, table(n)["p"])
    return {"elements": table(n)["p"]}


def tensors(path: Path, n: int) -> Table:
    columns = table(n)
    nested = {name: torch.from_numpy(values) for name, values in columns.items()}
    brief = torch.arange(n).to(torch.bfloat16)
    torch.save({"a": nested, "b": [brief], "scalar": torch.tensor(3), "text": "?"}, path)
    expected = {f"a/{name}": values for name, values in columns.items()}
    return expected | {"b/0": brief.float().numpy()}


def tensor(path: Path, n: int) -> Table:
    torch.save(torch.from_numpy(table(n)["p"]), path)
    return {"elements": table(n)["p"]}


def las(path: Path, n: int) -> Table:
    header = laspy.LasHeader(point_format=3, version="1.2")
    header.scales = np.array([0.5, 0.25, 0.125])
    header.offsets = np.array([1000.0, 0.0, -3.0])
    header.add_extra_dim(laspy.ExtraBytesParams(name="extra", type=np.float32))
    cloud = laspy.LasData(header)
    steps = np.arange(n)
    cloud.x, cloud.y, cloud.z = 1000 + steps * 0.5, steps * 0.25, steps * 0.125 - 3
    cloud.intensity = (steps * 7).astype(np.uint16)
    cloud.return_number = (steps % 5).astype(np.uint8)
    cloud.extra = table(n)["x"]
    cloud.write(path)
    return {
        "x": 1000 + steps * 0.5,
        "y": steps * 0.25,
        "z": steps * 0.125 - 3,
        "intensity": (steps * 7).astype(np.uint16),
        "return_number": (steps % 5).astype(np.uint8),
        "extra": table(n)["x"],
    }


def corners(n: int) -> np.ndarray:
    """Return points whose coordinates are exact in every text format."""
    return np.random.default_rng(n).integers(-800, 800, (n, 3)) / 8


def triangles(n: int) -> trimesh.Trimesh:
    """Return a mesh in which every vertex is used; n is a multiple of 3."""
    return trimesh.Trimesh(corners(n), np.arange(n).reshape(-1, 3), process=False)


def split(points: np.ndarray, dtype: str = "f8") -> Table:
    return {name: points[:, i].astype(dtype) for i, name in enumerate("xyz")}


def mesh(path: Path, n: int) -> Table:
    triangles(n).export(path)
    return split(corners(n))


def glb(path: Path, n: int) -> Table:
    shape = triangles(n)
    shape.visual.vertex_colors = np.arange(4 * n).reshape(n, 4).astype(np.uint8)
    shape.apply_translation([0, 0, 1])
    shape.export(path)
    colours = np.arange(4 * n).reshape(n, 4).astype(np.uint8)
    names = ("red", "green", "blue", "alpha")
    moved = split(corners(n) + np.array([0, 0, 1]))
    return moved | {name: colours[:, i] for i, name in enumerate(names)}


def ply_lines(n: int, kind: str) -> str:
    return (
        f"ply\nformat {kind} 1.0\nelement vertex {n}\n"
        "property float x\nproperty float y\nproperty float z\n"
        "property uchar red\nproperty float intensity\nend_header\n"
    )


def ply(path: Path, n: int) -> Table:
    content = ply_lines(n, "binary_little_endian").encode()
    for row, point in enumerate(corners(n)):
        content += struct.pack("<3fBf", *point, row % 256, row / 2)
    path.write_bytes(content)
    return ply_columns(n)


def ply_text(path: Path, n: int) -> Table:
    lines = [f"{x} {y} {z} {row % 256} {row / 2}" for row, (x, y, z) in enumerate(corners(n))]
    path.write_text(ply_lines(n, "ascii") + "\n".join(lines) + "\n")
    return ply_columns(n)


def ply_columns(n: int) -> Table:
    rest = {"red": (np.arange(n) % 256).astype("u1"), "intensity": np.arange(n, dtype="f4") / 2}
    return split(corners(n), "f4") | rest


def root_columns(n: int) -> Table:
    columns = {name: table(n)[name] for name in ("event", "x", "flag", "p")}
    jagged = np.empty(n, object)
    jagged[:] = [np.arange(row % 4, dtype=np.float32).tolist() for row in range(n)]
    return columns | {"jagged": jagged}


def root_tree(path: Path, n: int) -> Table:
    columns = root_columns(n)
    kinds = {"event": "i8", "x": "f4", "flag": "?", "p": ("f4", (3,)), "jagged": "var * float32"}
    with uproot.recreate(path) as file:
        tree = file.mktree("folder/tree", kinds)
        for start in range(0, n, 20):
            part = {name: values[start : start + 20] for name, values in columns.items()}
            tree.extend(part | {"jagged": ak.values_astype(ak.Array(list(part["jagged"])), "f4")})
    return columns


def root_ntuple(path: Path, n: int) -> Table:
    columns = root_columns(n)
    jagged = ak.values_astype(ak.Array(list(columns["jagged"])), "f4")
    with uproot.recreate(path) as file:
        file.mkrntuple("tuple", columns | {"jagged": jagged})
    return columns


FORMATS = {
    "parquet": Format(".parquet", parquet),
    "parquet, other suffix": Format(".PQ", parquet),
    "arrow": Format(".arrow", arrow_file),
    "arrow stream": Format(".ipc", arrow_stream),
    "feather": Format(".feather", feather),
    "csv": Format(".csv", text, detects_truncation=False),
    "csv.gz": Format(".csv.gz", text),
    "tsv": Format(".tsv", text, detects_truncation=False),
    "jsonl": Format(".jsonl", json_lines, detects_truncation=False),
    "ndjson.gz": Format(".ndjson.gz", json_lines),
    "npy": Format(".npy", npy),
    "npy, plain": Format(".npy", npy_plain),
    "npy, fortran": Format(".npy", npy_fortran),
    "npy, fields": Format(".npy", npy_fields),
    "npz": Format(".npz", npz),
    "npz, compressed": Format(".npz", npz_compressed),
    "hdf5": Format(".hdf5", hdf5),
    "hdf5, chunks": Format(".h5", hdf5_chunks),
    "zarr": Format(".zarr", zarr_group),
    "zarr, array": Format(".zarr", zarr_array),
    "torch": Format(".pt", tensors),
    "torch, tensor": Format(".pth", tensor),
    "las": Format(".las", las),
    "laz": Format(".laz", las),
    "off": Format(".off", mesh),
    "stl": Format(".stl", mesh),
    "obj": Format(".obj", mesh, detects_truncation=False),
    "glb": Format(".glb", glb),
    "ply": Format(".ply", ply),
    "ply, text": Format(".ply", ply_text),
    "root": Format(".root", root_tree),
    "root, ntuple": Format(".root", root_ntuple),
}
