"""Types and values of Arrow columns."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def decoded(array: pa.Array) -> pa.Array:
    """Return the values of a dictionary array; other arrays as they are."""
    if not pa.types.is_dictionary(array.type):
        return array
    values = array.dictionary
    if values.type in (pa.string_view(), pa.binary_view()):  # Arrow cannot take from these
        is_text = values.type == pa.string_view()
        values = values.cast(pa.large_string() if is_text else pa.large_binary())
    return values.take(array.indices)


def as_numbers(values: pa.Array) -> np.ndarray:
    """Return values as float64, with NaN for nulls.

    >>> as_numbers(pa.array([True, None]))
    array([ 1., nan])
    """
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.int8())
    return values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def as_text(values: pa.Array) -> pa.Array:
    """Return values as text; whole numbers in decimal.

    >>> as_text(pa.array([7, None])).to_pylist()
    ['7', None]
    """
    return values.cast(pa.large_string())


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds text."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view()


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists, of fixed or variable length."""
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def is_vector(kind: pa.DataType) -> bool:
    """Whether a column holds lists of numbers."""
    return is_list(kind) and (
        pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)
    )
