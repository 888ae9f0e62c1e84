"""How tools of pathology lay out a slide: the features of its patches, and where they are.

CLAM and TRIDENT write one HDF5 file per slide, with the datasets `features` (N, d) and `coords`
(N, 2), the upper left corner of each patch. Some tools write them as a batch of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

VECTORS, COORDINATES = "features", "coords"
AXES = ("x", "y", "z")


def holds_vectors(schema: pa.Schema) -> bool:
    """Whether a file names its features: a column `features` of vectors of one length.

    What is beside them are coordinates, annotations or labels.

    >>> holds_vectors(pa.schema({"features": pa.list_(pa.float16(), 1024), "coords": pa.int64()}))
    True
    >>> holds_vectors(pa.schema({"features": pa.float32(), "x": pa.float32()}))
    False
    """
    return schema.names.count(VECTORS) == 1 and _is_vector(schema.field(VECTORS).type)


def holds_coordinates(schema: pa.Schema) -> bool:
    """Whether a file has a column `coords` with two or three numbers for each row.

    >>> holds_coordinates(pa.schema({"coords": pa.list_(pa.int64(), 2)}))
    True
    """
    if schema.names.count(COORDINATES) != 1:
        return False
    return len(axes_of(COORDINATES, schema.field(COORDINATES).type)) > 1


def axes_of(name: str, kind: pa.DataType) -> Sequence[str]:
    """Return the columns that a column is written as: x, y and z if it holds coordinates.

    >>> axes_of("coords", pa.list_(pa.int64(), 2)), axes_of("time", pa.int64())
    (('x', 'y'), ('time',))
    """
    if name == COORDINATES and _is_vector(kind) and kind.list_size in (2, 3):
        return AXES[: kind.list_size]
    return (name,)


def is_batch_of_one(nodes: Mapping[str, Any]) -> bool:
    """Whether there are features (1, N, d) of one slide, and coordinates (N, 2) or (1, N, 2).

    Args:
        nodes: The datasets of a file, by path.
    """
    features, coordinates = nodes.get(VECTORS), nodes.get(COORDINATES)
    if features is None or coordinates is None or features.ndim != 3 or features.shape[0] != 1:
        return False
    shape = tuple(coordinates.shape)
    shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    return len(shape) == 2 and shape[0] == features.shape[1]


def _is_vector(kind: pa.DataType) -> bool:
    if not pa.types.is_fixed_size_list(kind):
        return False
    return pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)
