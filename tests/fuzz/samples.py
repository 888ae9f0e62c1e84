"""More samples of some formats, in forms that damage reaches in other places."""

from __future__ import annotations

from pathlib import Path

import h5py
import laspy
import numcodecs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zarr

from tests.files.readers.written import Table, as_arrow, split, table


def parquet_plain(path: Path, n: int) -> Table:
    """Parquet whose pages are not compressed, so that damage reaches their content."""
    columns = table(n)
    pq.write_table(
        as_arrow(columns), path, compression="none", row_group_size=20, use_dictionary=False
    )
    return columns


def laz_layers(path: Path, n: int) -> Table:
    """LAZ of LAS 1.4, where each chunk has a layer for each dimension."""
    cloud = laspy.LasData(laspy.LasHeader(point_format=8, version="1.4"))
    cloud.x = cloud.y = cloud.z = np.arange(n) * 0.5
    cloud.intensity, cloud.gps_time = np.arange(n).astype("u2"), np.arange(n) * 0.1
    cloud.red, cloud.nir = np.arange(n).astype("u2"), np.arange(n).astype("u2") * 7
    cloud.write(path)
    return split(np.arange(n)[:, None] * np.full(3, 0.5))


def arrow_dictionaries(path: Path, n: int) -> Table:
    """Arrow with a dictionary, and with columns of variable length, all compressed."""
    columns = as_arrow(table(n))
    names = pa.array([f"name {row % 4}" for row in range(n)]).dictionary_encode()
    lists = pa.array([[0.5] * (row % 3) for row in range(n)])
    columns = columns.append_column("name", names).append_column("list", lists)
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    create = pa.ipc.new_stream if path.suffix == ".ipc" else pa.ipc.new_file
    with create(path, columns.schema, options=options) as file:
        file.write_table(columns, max_chunksize=20)
    return table(n)


def hdf5_ragged(path: Path, n: int) -> Table:
    """HDF5 in the current version of the format, with ragged arrays and texts, not compressed."""
    with h5py.File(path, "w", libver="latest") as file:
        file["p"] = table(n)["p"]
        lists = file.create_dataset("list", (n,), dtype=h5py.vlen_dtype("f4"))
        lists[:] = [np.arange(row % 5, dtype="f4") for row in range(n)]
        file.create_dataset("name", data=[f"n{row}" for row in range(n)], chunks=(20,))
    return {"p": table(n)["p"]}


def zarr_shards(path: Path, n: int) -> Table:
    """Zarr with shards, and with texts."""
    root = zarr.open_group(path, mode="w")
    root.create_array("p", data=table(n)["p"], chunks=(5, 3), shards=(20, 3))
    names = root.create_array("name", shape=(n,), dtype="string", chunks=(20,))
    names[:] = np.array([f"name {row}" for row in range(n)], object)
    return {"p": table(n)["p"]}


def zarr_2(path: Path, n: int) -> Table:
    """Zarr in version 2 of the format, compressed by gzip."""
    root = zarr.open_group(path, mode="w", zarr_format=2)
    codec = numcodecs.GZip()
    root.create_array("p", data=table(n)["p"], chunks=(20, 3), compressors=codec)
    return {"p": table(n)["p"]}
