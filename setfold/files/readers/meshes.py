"""Meshes and point clouds in the formats of trimesh."""

from __future__ import annotations

import json
import struct
import warnings
from typing import Any, ClassVar

import numpy as np

from setfold.errors import FileError
from setfold.files.readers.column import Column, ColumnReader, columns_of
from setfold.files.readers.reader import import_optional

# Bytes of a number by GLB's code of its type, and numbers of a value.
COMPONENTS = {5120: 1, 5121: 1, 5122: 2, 5123: 2, 5125: 4, 5126: 4}
PARTS = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4, "MAT2": 4, "MAT3": 9, "MAT4": 16}
MAX_VERTICES = 1 << 24  # if nodes repeat meshes


class MeshReader(ColumnReader):
    """The vertices of meshes and point clouds. The file is loaded as a whole, without materials.

    The columns are x, y, z; nx, ny, nz if the file has normals; red, green, blue, alpha if it has
    vertex colors. In PLY, they are all vertex properties. In STL, each triangle has three vertices
    of its own.
    """

    suffixes: ClassVar = (".ply", ".off", ".stl", ".obj", ".glb")

    def _find(self) -> dict[str, Column]:
        with warnings.catch_warnings():
            # NumPy before 2.4 warns, and drops the rest, where a number was expected.
            warnings.filterwarnings("error", "string or file could not be read", DeprecationWarning)
            if self.path.suffix.lower() == ".ply":
                return self._find_in_ply()
            return self._find_in_scene()

    def _find_in_ply(self) -> dict[str, Column]:
        ply = import_optional("trimesh.exchange.ply", "mesh")
        with self.path.open("rb") as file:
            raw = ply.load_ply(file, skip_materials=True)["metadata"]["_ply_raw"]["vertex"]
        empty = {name: np.empty(0, kind) for name, kind in raw["properties"].items()}
        data = raw["data"] if raw["length"] else empty
        return self._to_columns({name: np.ravel(data[name]) for name in empty}, raw["length"])

    def _find_in_scene(self) -> dict[str, Column]:
        trimesh = import_optional("trimesh", "mesh")
        if self.path.suffix.lower() == ".glb":
            self._check_glb()
        # A resolver opens other files. An empty one has none.
        scene = trimesh.load_scene(self.path, process=False, resolver={}, skip_materials=True)
        self._check_repetitions(scene)
        parts = [_vertices(geometry) for geometry in scene.dump()]
        shared = [name for name in parts[0] if all(name in part for part in parts)] if parts else []
        return self._to_columns(
            {n: np.concatenate([part[n] for part in parts]) for n in shared}, None
        )

    def _check_glb(self) -> None:
        """Raise FileError if arrays are not stored in the file, or larger than the file.

        trimesh would open other files, return zeros, or fill the memory.
        """
        with self.path.open("rb") as file:
            (length,) = struct.unpack("<12xI4x", file.read(20))
            header = json.loads(file.read(length))
        accessors, nodes = header.get("accessors", ()), header.get("nodes", ())
        if any("bufferView" not in accessor or "sparse" in accessor for accessor in accessors):
            raise self._refusal("has compressed arrays. Export it without compression")
        uris = (buffer.get("uri") for buffer in header.get("buffers", ()))
        if any(uri is not None and not uri.startswith("data:") for uri in uris):
            raise self._refusal("has arrays in other files, which are not opened. Embed them")
        sizes = [a["count"] * COMPONENTS[a["componentType"]] * PARTS[a["type"]] for a in accessors]
        if min(sizes, default=0) < 0 or sum(sizes) > 4 * self.path.stat().st_size:
            raise self._refusal("lists arrays that are larger than the file. Export it again")
        children = [child for node in nodes for child in node.get("children", ())]
        if len(set(children)) < len(children):
            raise self._refusal("has nodes with several parents. Export it as a tree")

    def _check_repetitions(self, scene: Any) -> None:
        """Raise FileError if the nodes of a scene repeat its meshes too often."""
        sizes = {name: len(geometry.vertices) for name, geometry in scene.geometry.items()}
        vertices = sum(sizes[scene.graph[node][1]] for node in scene.graph.nodes_geometry)
        if vertices > max(MAX_VERTICES, sum(sizes.values())):
            raise self._refusal(f"repeats its meshes to {vertices} vertices. Export a part of it")

    def _refusal(self, reason: str) -> FileError:
        return FileError(f"{self.path} {reason}, or convert it to another format.")

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
