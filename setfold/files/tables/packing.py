"""Rows of a table of states as bytes, for engines that know no lists.

A row is the bytes of its columns, one after the other. A list of any length, such as the slots that
were touched, follows its length, an int64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from setfold.files.tables.arrow import combined

LENGTH_BYTES = 8


class _Form(NamedTuple):
    """How a value of a column is packed."""

    dtype: np.dtype
    length: int | None  # numbers in a value; None for a list of any length


def _form(kind: pa.DataType) -> _Form:
    if pa.types.is_large_list(kind):
        return _Form(np.dtype(kind.value_type.to_pandas_dtype()), None)
    if pa.types.is_fixed_size_list(kind):
        return _Form(np.dtype(kind.value_type.to_pandas_dtype()), kind.list_size)
    return _Form(np.dtype(kind.to_pandas_dtype()), 1)


def pack(columns: Sequence[pa.ChunkedArray]) -> Iterable[bytes]:
    """Return the bytes of each row.

    >>> columns = [pa.chunked_array([[1, 2]]), pa.chunked_array([pa.array([[], [5]], pa.large_list(pa.int32()))])]
    >>> [len(row) for row in pack(columns)]
    [16, 20]
    """
    forms = [_form(column.type) for column in columns]
    if any(form.length is None for form in forms):
        return map(b"".join, zip(*map(_values, columns), strict=True))
    rows = len(columns[0]) if columns else 0
    if not rows:
        return ()
    return _rows_of(
        [np.frombuffer(_content(column), np.uint8).reshape(rows, -1) for column in columns]
    )


def pack_parts(parts: Sequence[Tensor]) -> Iterable[bytes]:
    """Return the bytes of each row of tensors (N, ...): those that `pack` gives for their columns.

    >>> parts = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0])]
    >>> again = unpack_parts([*pack_parts(parts)], [part[:0] for part in parts])
    >>> [torch.equal(*pair) for pair in zip(again, parts)]
    [True, True]
    """
    rows = len(parts[0])
    if not rows:
        return ()
    numbers = (part.detach().contiguous().numpy().reshape(rows, -1) for part in parts)
    return _rows_of([part.view(np.uint8) for part in numbers])


def _rows_of(blocks: Sequence[np.ndarray]) -> Iterable[bytes]:
    """Return the bytes of each row of blocks (N, width)."""
    block = blocks[0] if len(blocks) == 1 else np.concatenate(blocks, 1)
    content, (rows, width) = block.tobytes(), block.shape
    return (content[start : start + width] for start in range(0, rows * width, width))


def _values(column: pa.ChunkedArray) -> Iterable[bytes]:
    """Return the bytes of each value of a column."""
    array, form, content = combined(column), _form(column.type), _content(column)
    if form.length is None:
        lengths = np.diff(array.offsets.to_numpy()) if len(array) else np.zeros(0, np.int64)
    else:
        lengths = np.full(len(array), form.length, np.int64)
    ends = [0, *(np.cumsum(lengths) * form.dtype.itemsize).tolist()]
    parts = (content[start:end] for start, end in itertools.pairwise(ends))
    if form.length is not None:
        return parts
    heads = (int(length).to_bytes(LENGTH_BYTES, "little") for length in lengths)
    return (head + part for head, part in zip(heads, parts, strict=True))


def _content(column: pa.ChunkedArray) -> bytes:
    """Return the bytes of all values of a column."""
    array = combined(column)
    is_list = pa.types.is_nested(array.type)
    return (array.flatten() if is_list else array).to_numpy(zero_copy_only=False).tobytes()


def unpack(rows: Sequence[bytes], kinds: Sequence[pa.DataType]) -> list[pa.Array]:
    """Return the columns whose rows `pack` returned.

    Raises:
        ValueError: A row has another length than it says.
    """
    forms = [_form(kind) for kind in kinds]
    if all(form.length is not None for form in forms):
        return _unpack_fixed(rows, kinds, forms)
    positions, columns = [0] * len(rows), []
    for kind in kinds:
        form, parts, lengths = _form(kind), [], []
        for number, row in enumerate(rows):
            start, length = positions[number], form.length
            if length is None:
                start += LENGTH_BYTES
                length = int.from_bytes(row[start - LENGTH_BYTES : start], "little")
            end = start + length * form.dtype.itemsize
            if end > len(row):
                raise ValueError("a packed state is truncated")
            parts.append(row[start:end])
            lengths.append(length)
            positions[number] = end
        columns.append(_column(b"".join(parts), lengths, kind))
    if positions != [len(row) for row in rows]:
        raise ValueError("a packed state is too long")
    return columns


def _unpack_fixed(
    rows: Sequence[bytes], kinds: Sequence[pa.DataType], forms: Sequence[_Form]
) -> list[pa.Array]:
    """Return the columns of rows that all have the same length."""
    sizes = [(form.length or 0) * form.dtype.itemsize for form in forms]
    if any(len(row) != sum(sizes) for row in rows):
        raise ValueError("a packed state is truncated or too long")
    block = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), sum(sizes))
    ends = list(itertools.accumulate(sizes, initial=0))
    return [
        _column(block[:, start:end].tobytes(), (), kind)
        for kind, (start, end) in zip(kinds, itertools.pairwise(ends), strict=True)
    ]


def unpack_parts(rows: Sequence[bytes], like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors (N, ...) whose rows `pack_parts` returned.

    Args:
        rows: The bytes of each row.
        like: Tensors (0, ...) with the same shapes and dtypes.

    Raises:
        ValueError: A row has another length.
    """
    sizes = [math.prod(part.shape[1:]) * part.element_size() for part in like]
    if any(len(row) != sum(sizes) for row in rows):
        raise ValueError("a packed state is truncated or too long")
    if not rows:
        return [*like]
    content = torch.frombuffer(bytearray().join(rows), dtype=torch.uint8)
    return [
        block.contiguous().view(part.dtype).reshape(len(rows), *part.shape[1:])
        for block, part in zip(content.reshape(len(rows), -1).split(sizes, 1), like, strict=True)
    ]


def _column(content: bytes, lengths: Sequence[int], kind: pa.DataType) -> pa.Array:
    form = _form(kind)
    values = pa.array(np.frombuffer(content, form.dtype))
    if form.length is None:
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(values, form.length)
    return values
