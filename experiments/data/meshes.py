"""Read meshes from OFF files and draw points uniformly from their surfaces."""

from __future__ import annotations

import re
import zlib
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from setfold import FileError

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]


class Mesh(NamedTuple):
    """A triangle mesh."""

    vertices: Floats  # (v, 3)
    triangles: Integers  # (t, 3), indices of vertices


def parse_off(content: bytes) -> Mesh:
    r"""Parse an OFF file; polygons become fans of triangles.

    Some files of ModelNet40 lack the line break after "OFF", so "OFF490 518 0" is accepted.

    >>> parse_off(b"OFF3 1 0\n0 0 0\n0 1 0\n1 0 0\n3 0 1 2\n").triangles
    array([[0, 1, 2]])
    """
    text = re.sub(rb"#[^\n]*", b"", content).decode("ascii", errors="replace").lstrip()
    if not text.startswith("OFF"):
        raise FileError(f"it starts with {text[:10]!r}; expected OFF")
    try:
        mesh = _parse_body(text.removeprefix("OFF"))
    except (ValueError, IndexError) as error:
        raise FileError(f"it is malformed: {error}") from error
    if mesh.triangles.min() < 0 or mesh.triangles.max() >= len(mesh.vertices):
        raise FileError(f"a face refers to a vertex that is not among the {len(mesh.vertices)}")
    return mesh


def _parse_body(text: str) -> Mesh:
    """Parse the content after the word OFF."""
    head, *lines = (line for line in text.splitlines() if line.strip())
    num_vertices, num_faces = (int(word) for word in head.split()[:2])
    if num_vertices < 1 or num_faces < 1:
        raise ValueError(f"it has {num_vertices} vertices and {num_faces} faces: no surface")
    if len(lines) < num_vertices + num_faces:
        raise ValueError(
            f"the header declares {num_vertices} vertices and {num_faces} faces, "
            f"but only {len(lines)} lines follow"
        )
    vertices = np.loadtxt(lines[:num_vertices], usecols=(0, 1, 2), ndmin=2)
    return Mesh(vertices, _triangles(lines[num_vertices : num_vertices + num_faces]))


def _triangles(faces: list[str]) -> Integers:
    """Parse faces "count vertex vertex vertex ..." to triangles (t, 3); ignores colours."""
    counts = {face.split(maxsplit=1)[0] for face in faces}
    if counts == {"3"}:  # the common case, and much faster
        return np.loadtxt(faces, usecols=(1, 2, 3), ndmin=2, dtype=np.int64)
    triangles = []
    for face in faces:
        count, *words = face.split()
        first, *others = (int(word) for word in words[: int(count)])
        triangles += [(first, a, b) for a, b in pairwise(others)]
    if not triangles:
        raise ValueError("no face has three vertices")
    return np.array(triangles, dtype=np.int64)


def sample(mesh: Mesh, count: int, name: str) -> Floats:
    """Draw points uniformly by area, then centre and scale them to the unit ball.

    Args:
        mesh: the mesh.
        count: number of points.
        name: seed, so that the points of a shape do not depend on other shapes.

    Returns:
        Points (count, 3).
    """
    corners = mesh.vertices[mesh.triangles]  # (t, 3, 3)
    sides = corners[:, 1:] - corners[:, :1]
    areas = np.linalg.norm(np.cross(sides[:, 0], sides[:, 1]), axis=-1)
    total = areas.sum()
    if not 0 < total < np.inf:
        raise FileError(f"its surface area is {total / 2}; cannot draw points from it")
    # RandomState instead of Generator: numpy guarantees that its stream never changes.
    random = np.random.RandomState(zlib.crc32(name.encode()))
    chosen = random.choice(len(areas), size=count, p=areas / total)
    along = random.random_sample((count, 2, 1))
    # Map points of the parallelogram's other half back to the triangle.
    along = np.where(along.sum(axis=1, keepdims=True) > 1, 1 - along, along)
    points = corners[chosen, 0] + (along * sides[chosen]).sum(axis=1)  # (count, 3)
    points -= points.mean(axis=0)
    return points / np.linalg.norm(points, axis=-1).max()
