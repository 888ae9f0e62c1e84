"""Set ids of several columns, such as run and event.

Tables and state files hold such an id as bytes: the values one after the other, each in a form whose
bytes compare as the values do. So everything that works with ids (grouping, hashing, sorting,
merging) works with these, and sorted bytes are sorted by the first column, then by the second.

    integer, date   8 bytes, big-endian; signed numbers plus 2**63
    boolean         1 byte
    text            UTF-8 with 00 FF for each byte 00, and 00 01 at the end

Outputs have the columns themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from setfold.errors import InputError

TEXT = pa.large_string()
TYPES = {str(kind): kind for kind in (pa.int64(), pa.uint64(), TEXT, pa.bool_(), pa.date32())}
SIGN = np.uint64(1 << 63)
ZERO, ESCAPED, END = b"\0", b"\0\xff", b"\0\1"


def check_type(name: str, kind: pa.DataType) -> pa.DataType:
    """Return the type of a column of a compound set id.

    Raises:
        InputError: There is no form for it.
    """
    if str(kind) not in TYPES:
        raise InputError(
            f"the set column {name!r} is {kind}; if several columns are the set id, each must hold "
            "integers, text, booleans or dates. Convert it to one of them."
        )
    return kind


def pack(arrays: Sequence[pa.Array]) -> pa.Array:
    """Return ids (N,) as bytes.

    Args:
        arrays: The columns of the ids, without nulls, with types of `TYPES`.

    >>> keys = pack([pa.array([2, -1]), pa.array(["a", "b"], pa.large_string())])
    >>> keys[1].as_py() < keys[0].as_py()
    True
    """
    parts = [_forms(array) for array in arrays]
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))


def unpack(keys: pa.Array, types: Sequence[pa.DataType]) -> list[pa.Array]:
    """Return the columns of ids that `pack` returned.

    Raises:
        ValueError: They are not such ids.

    >>> keys = pack([pa.array([2, -1]), pa.array(["a", "b"], pa.large_string())])
    >>> [column.to_pylist() for column in unpack(keys, [pa.int64(), pa.large_string()])]
    [[2, -1], ['a', 'b']]
    """
    columns: list[list[bytes]] = [[] for _ in types]
    for key in keys.to_pylist():
        start = 0
        for kind, column in zip(types, columns, strict=True):
            end = key.index(END, start) if kind == TEXT else start + _width(kind)
            column.append(key[start:end])
            start = end + (len(END) if kind == TEXT else 0)
        if start != len(key):
            raise ValueError("a set id does not have the columns that it should have")
    return [_values(column, kind) for column, kind in zip(columns, types, strict=True)]


def show(key: bytes, names: Sequence[str], types: Sequence[pa.DataType]) -> str:
    """Return an id as text, for messages.

    >>> show(pack([pa.array([2]), pa.array([7])])[0].as_py(), ("run", "event"), [pa.int64()] * 2)
    'run=2, event=7'
    """
    values = [column[0] for column in unpack(pa.array([key], pa.large_binary()), types)]
    return ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def _width(kind: pa.DataType) -> int:
    return 1 if kind == pa.bool_() else 8


def _forms(array: pa.Array) -> pa.Array:
    """Return the values of a column as bytes that compare as the values do."""
    kind = array.type
    if kind == TEXT:
        escaped = pc.replace_substring(array.cast(pa.large_binary()), ZERO, ESCAPED)
        end, nothing = (pa.scalar(each, pa.large_binary()) for each in (END, b""))
        return pc.binary_join_element_wise(escaped, end, nothing)
    if kind == pa.bool_():
        flat = array.to_numpy(zero_copy_only=False).astype(np.uint8)
    else:
        numbers = array.cast(pa.int32()) if kind == pa.date32() else array
        numbers = numbers.to_numpy(zero_copy_only=False)
        signed = kind != pa.uint64()
        numbers = numbers.astype(np.int64).view(np.uint64) ^ SIGN if signed else numbers
        flat = numbers.astype(">u8")
    size = pa.binary(_width(kind))
    return pa.Array.from_buffers(size, len(array), [None, pa.py_buffer(flat)]).cast(
        pa.large_binary()
    )


def _values(forms: list[bytes], kind: pa.DataType) -> pa.Array:
    """Return the column whose values have these forms."""
    if kind == TEXT:
        return pa.array([form.replace(ESCAPED, ZERO).decode() for form in forms], TEXT)
    content = b"".join(forms)
    if len(content) != len(forms) * _width(kind):
        raise ValueError("a set id is too short")
    if kind == pa.bool_():
        return pa.array(np.frombuffer(content, np.uint8).astype(bool))
    numbers = np.frombuffer(content, ">u8").astype(np.uint64)
    if kind == pa.uint64():
        return pa.array(numbers)
    signed = pa.array((numbers ^ SIGN).view(np.int64))
    return signed.cast(pa.int32()).cast(kind) if kind == pa.date32() else signed
