"""Point clouds and meshes: LAS, and the formats of trimesh."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from setfold.errors import FileError
from setfold.files.readers.column import Column, ColumnReader, arrow_of, columns_of
from setfold.files.readers.reader import Reader, import_optional

RAW = ("X", "Y", "Z")  # integers; x, y, z are computed from them by scale and offset


class LasReader(Reader):
    """LAS and LAZ: x, y and z in the unit of the file, then all other dimensions by name."""

    suffixes: ClassVar = (".las", ".laz")

    def _open(self) -> None:
        self._laspy = import_optional("laspy", "las")
        if self.path.suffix.lower() == ".laz":
            import_optional("lazrs", "las")
        self._check_counts()
        with self._laspy.open(self.path) as file:
            self.num_rows = file.header.point_count
            others = [n for n in file.header.point_format.dimension_names if n not in RAW]
            empty = self._laspy.ScaleAwarePointRecord.zeros(0, header=file.header)
        names = ["x", "y", "z", *others]
        self.schema = pa.schema([(n, _dimension(empty, n).type) for n in names])

    def _check_counts(self) -> None:
        """Raise ValueError for impossible counts, for which laspy would fill the memory."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            head = file.read(247)
            (points,) = struct.unpack_from("<I", head, 96)
            (records,) = struct.unpack_from("<I", head, 100)
            # From version 1.4 on there may be more records at the end.
            (extended,) = struct.unpack_from("<I", head, 243) if head[25] >= 4 else (0,)
            chunks = 0
            if self.path.suffix.lower() == ".laz" and points + 8 <= size:
                file.seek(points)
                (place,) = struct.unpack("<q", file.read(8))
                if 0 <= place <= size - 8:  # otherwise lazrs raises an error
                    file.seek(place + 4)
                    (chunks,) = struct.unpack("<I", file.read(4))
        if records * 54 + extended * 60 > size or chunks > size:
            raise ValueError("its header lists more records than fit into the file")

    def _batches(
        self, columns: list[str], start: int, stop: int | None, rows: int
    ) -> Iterator[pa.RecordBatch]:
        left = (stop or 0) - start
        with self._laspy.open(self.path) as file:
            if left > 0:
                file.seek(start)
            while left > 0:
                points = file.read_points(min(rows, left))
                if not len(points):
                    return
                left -= len(points)
                arrays = [_dimension(points, name) for name in columns]
                yield pa.RecordBatch.from_arrays(arrays, names=columns)


def _dimension(points: Any, name: str) -> pa.Array:
    return arrow_of(np.asarray(points[name]))


class MeshReader(ColumnReader):
    """The vertices of meshes and point clouds. The file is loaded as a whole.

    The columns are x, y, z; nx, ny, nz if the file has normals; red, green, blue, alpha if it has
    vertex colors. In PLY, they are all vertex properties. In STL, each triangle has three vertices
    of its own.
    """

    suffixes: ClassVar = (".ply", ".off", ".stl", ".obj", ".glb")

    def _find(self) -> dict[str, Column]:
        trimesh = import_optional("trimesh", "mesh")
        if self.path.suffix.lower() == ".ply":
            ply = import_optional("trimesh.exchange.ply", "mesh")
            with self.path.open("rb") as file:
                raw = ply.load_ply(file)["metadata"]["_ply_raw"]["vertex"]
            empty = {name: np.empty(0, kind) for name, kind in raw["properties"].items()}
            data = raw["data"] if raw["length"] else empty
            return self._to_columns({name: np.ravel(data[name]) for name in empty}, raw["length"])
        scene = trimesh.load_scene(self.path, process=False)
        parts = [_vertices(geometry) for geometry in scene.dump()]
        shared = [name for name in parts[0] if all(name in part for part in parts)] if parts else []
        return self._to_columns(
            {n: np.concatenate([part[n] for part in parts]) for n in shared}, None
        )

    def _to_columns(self, arrays: dict[str, np.ndarray], length: int | None) -> dict[str, Column]:
        """Return the columns. Raises FileError if they do not have the expected length."""
        found = {len(array) for array in arrays.values()}
        if found != {length} if length is not None else found in (set(), {0}):
            raise FileError(
                f"{self.path} does not have the vertices that its header lists. It is truncated, "
                "corrupt or empty. Write it again."
            )
        columns: dict[str, Column] = {}
        for name, array in arrays.items():
            columns |= columns_of(name, array)
        return columns


def _vertices(geometry: Any) -> dict[str, np.ndarray]:
    """Return the vertex columns of a mesh or point cloud."""
    columns = dict(zip("xyz", np.asarray(geometry.vertices).T, strict=True))
    # If the file has no normals, trimesh would compute them from the faces on access.
    if "vertex_normals" in geometry._cache:
        columns |= zip(("nx", "ny", "nz"), np.asarray(geometry.vertex_normals).T, strict=True)
    if geometry.visual.kind == "vertex":
        colors = np.asarray(geometry.visual.vertex_colors).T
        columns |= zip(("red", "green", "blue", "alpha"), colors, strict=True)
    return columns
