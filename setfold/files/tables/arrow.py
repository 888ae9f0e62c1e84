"""Tensors as columns of an Arrow table, and the header in the metadata of its schema.

Reading checks that a column is exactly what writing makes: type, shape, and no nulls.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from setfold.core.persist import DIGEST_BYTES
from setfold.errors import FileError

VERSION = 3
# Entries in the metadata of an Arrow schema: what the table contains, what all sets share, and a
# digest of everything that determines the content of an output.
HEADER, FRAME, RESULT = b"setfold", b"setfold.frame", b"setfold.result"
KINDS = ("states", "rows", "encodings")
COLUMNS = ("set", "count", "encoding")  # of a table of encodings
IDS = "ids"  # entry of its header: the columns of a set id that has several
FLOATS = (pa.float64(), pa.float32(), pa.float16())


def make_header(kind: str, **entries: Any) -> bytes:
    """Return the header of a table, for the metadata of its schema.

    Args:
        kind: "states", "rows" or "encodings".
        entries: What the table needs in addition; must be serializable as JSON.
    """
    return json.dumps({"kind": kind, "version": VERSION, **entries}).encode()


def header_of(
    schema: pa.Schema, kind: str | None = None, where: str | Path = "the table"
) -> dict[str, Any]:
    """Return the header of a table that setfold wrote.

    Args:
        schema: The schema of the table.
        kind: What the table must contain; None for anything.
        where: The name of the table in messages.

    Raises:
        FileError: setfold did not write the table, or in another format version, or it contains
            something else.
    """
    try:
        header = json.loads((schema.metadata or {})[HEADER])
        found, version = header["kind"], header["version"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileError(f"{where} was not written by setfold: its schema has no header.") from error
    if type(version) is not int or version != VERSION:
        raise FileError(
            f"{where} has format version {version!r:.20}; this setfold reads version {VERSION}. "
            "Read it with the setfold that wrote it, or write it again."
        )
    if found not in KINDS:
        raise FileError(f"{where} is corrupt: it contains {found!r:.60}. Write it again.")
    if kind is not None and found != kind:
        raise FileError(f"expected {kind} in {where}; got {found}. Pass a file or table of {kind}.")
    return header


def result_of(content: bytes | None) -> str:
    """Return the digest of what an output is the result of, from the entry `RESULT`.

    Raises:
        ValueError: It is missing or not a digest.
    """
    if content is None or not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * DIGEST_BYTES), content):
        raise ValueError("it does not say what it is the result of")
    return content.decode()


def shape_of(header: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of a row's tensor that a header declares.

    Raises:
        ValueError: It is not a list of sizes.
    """
    shape = header.get("shape")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"expected the shape of a row; got {shape!r:.60}")
    return tuple(shape)


def as_lists(tensor: Tensor) -> pa.FixedSizeListArray:
    """Return a column with the flattened rows of a tensor (N, ...), without a copy."""
    flat = tensor.detach().contiguous().reshape(-1).numpy()
    width = math.prod(tensor.shape[1:])
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), max(width, 1))


def as_tensor(column: pa.ChunkedArray, shape: Sequence[int]) -> Tensor:
    """Return the tensor (N, ...) whose rows `as_lists` flattened.

    Raises:
        ValueError: The column has another type or shape, or a null.
    """
    array = combined(column)
    kind, width = array.type, max(math.prod(shape), 1)
    if not (pa.types.is_fixed_size_list(kind) and kind.value_type in FLOATS):
        raise ValueError(f"expected lists of floats; got {kind}")
    if kind.list_size != width:
        raise ValueError(f"expected lists of {width} numbers; got {kind}")
    values = array.flatten()
    if array.null_count or values.null_count:
        raise ValueError("a number is null")
    return writeable(values).reshape(len(column), *shape)


def as_counts(column: pa.ChunkedArray) -> Tensor:
    """Return a column of counts (N,).

    Raises:
        ValueError: They are not int64, or one is null.
    """
    array = combined(column)
    if array.type != pa.int64() or array.null_count:
        raise ValueError(f"counts must be int64 without nulls; got {array.type}")
    return writeable(array)


def as_ids(column: pa.ChunkedArray) -> pa.Array:
    """Return a column of set ids (N,).

    Raises:
        ValueError: They have a type that no set id has, or one is null.
    """
    array = combined(column)
    kind = array.type
    if (
        pa.types.is_nested(kind)
        or pa.types.is_dictionary(kind)
        or pa.types.is_floating(kind)
        or isinstance(kind, pa.BaseExtensionType)
    ):
        raise ValueError(f"set ids cannot be {kind}")
    if array.null_count:
        raise ValueError("a set id is null")
    return array


def check_sorted(sets: pa.Array, last: pa.Scalar | None) -> pa.Scalar | None:
    """Raise ValueError unless set ids are unique and sorted, after the last one before them.

    Returns:
        The last one now.
    """
    if not len(sets):
        return last
    in_order = pc.all(pc.less(sets[:-1], sets[1:])).as_py() is not False  # None for a single set
    if not in_order or (last is not None and not pc.less(last, sets[0]).as_py()):
        raise ValueError("the sets are not sorted, or one is listed twice")
    return sets[-1]


def check_names(table: pa.Table, names: Sequence[str]) -> None:
    """Raise ValueError unless a table has exactly these columns, in this order."""
    if table.column_names != [*names]:
        raise ValueError(
            f"expected the columns {', '.join(names)}; got {table.column_names!r:.200}"
        )


def writeable(array: pa.Array) -> Tensor:
    """Return a tensor of the values of an array, in memory of its own."""
    values = array.to_numpy(zero_copy_only=False)
    if not values.flags.writeable:  # Arrow's buffers must not be written to
        values = values.copy()
    return torch.from_numpy(values)


def combined(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one contiguous array."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
