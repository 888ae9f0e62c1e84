"""Point clouds and meshes: LAS, and what trimesh reads."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from setfold.errors import FileError
from setfold.files.readers.column import Column, ColumnReader, arrow_of, columns_of
from setfold.files.readers.reader import Reader, required

RAW = ("X", "Y", "Z")  # whole numbers, which a file's scale and offset make x, y, z of


class LasReader(Reader):
    """LAS and LAZ: x, y and z in the file's unit, then all other dimensions by name."""

    suffixes: ClassVar = (".las", ".laz")

    def _open(self) -> None:
        self._laspy = required("laspy", "las")
        if self.path.suffix.lower() == ".laz":
            required("lazrs", "las")
        self._check_counts()
        with self._laspy.open(self.path) as file:
            self.num_rows = file.header.point_count
            others = [n for n in file.header.point_format.dimension_names if n not in RAW]
            empty = self._laspy.ScaleAwarePointRecord.zeros(0, header=file.header)
        names = ["x", "y", "z", *others]
        self.schema = pa.schema([(n, _dimension(empty, n).type) for n in names])

    def _check_counts(self) -> None:
        """Refuse counts that cannot be: laspy would make as many things, until memory is full."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            head = file.read(247)
            (points,) = struct.unpack_from("<I", head, 96)
            (records,) = struct.unpack_from("<I", head, 100)
            # From version 1.4 on there may be records at the end, too.
            (extended,) = struct.unpack_from("<I", head, 243) if head[25] >= 4 else (0,)
            chunks = 0
            if self.path.suffix.lower() == ".laz" and points + 8 <= size:
                file.seek(points)
                (place,) = struct.unpack("<q", file.read(8))
                if 0 <= place <= size - 8:  # else it stands elsewhere, or lazrs finds out
                    file.seek(place + 4)
                    (chunks,) = struct.unpack("<I", file.read(4))
        if records * 54 + extended * 60 > size or chunks > size:
            raise ValueError("it promises more records than fit into it")

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
    """The vertices of meshes and of clouds of points, loaded as a whole.

    Columns are x, y, z; nx, ny, nz if the file has normals; red, green, blue, alpha if vertices have
    colours; all that vertices have, by name, in PLY. In STL each triangle has its own three.
    """

    suffixes: ClassVar = (".ply", ".off", ".stl", ".obj", ".glb")

    def _find(self) -> dict[str, Column]:
        trimesh = required("trimesh", "mesh")
        if self.path.suffix.lower() == ".ply":
            ply = required("trimesh.exchange.ply", "mesh")
            with self.path.open("rb") as file:
                raw = ply.load_ply(file)["metadata"]["_ply_raw"]["vertex"]
            empty = {name: np.empty(0, kind) for name, kind in raw["properties"].items()}
            data = raw["data"] if raw["length"] else empty
            return self._checked({name: np.ravel(data[name]) for name in empty}, raw["length"])
        scene = trimesh.load_scene(self.path, process=False)
        parts = [_vertices(geometry) for geometry in scene.dump()]
        shared = [name for name in parts[0] if all(name in part for part in parts)] if parts else []
        return self._checked({n: np.concatenate([part[n] for part in parts]) for n in shared}, None)

    def _checked(self, arrays: dict[str, np.ndarray], length: int | None) -> dict[str, Column]:
        """The columns, if they have the rows that the file promises."""
        found = {len(array) for array in arrays.values()}
        if found != {length} if length is not None else found in (set(), {0}):
            raise FileError(
                f"{self.path} has not the vertices that it should have. It is truncated, corrupt or "
                "empty; write it anew."
            )
        columns: dict[str, Column] = {}
        for name, array in arrays.items():
            columns |= columns_of(name, array)
        return columns


def _vertices(geometry: Any) -> dict[str, np.ndarray]:
    """What a mesh, or a cloud of points, tells of each vertex."""
    columns = dict(zip("xyz", np.asarray(geometry.vertices).T, strict=True))
    # Normals that the file does not have would be made from the faces when they are asked for.
    if "vertex_normals" in geometry._cache:
        columns |= zip(("nx", "ny", "nz"), np.asarray(geometry.vertex_normals).T, strict=True)
    if geometry.visual.kind == "vertex":
        colours = np.asarray(geometry.visual.vertex_colors).T
        columns |= zip(("red", "green", "blue", "alpha"), colours, strict=True)
    return columns
