"""Columns of a table, and the numbers that they become.

A column has two steps. `read` parses the values of a table into numbers: it fills gaps, looks up
categories and scales, in float64, so that large values such as projected coordinates keep their
digits. `forward` is the part with weights: it embeds categories and unfolds times. Elements, states
and files hold the numbers between the two.

`Columns` puts several columns side by side. `setfold.preprocessing.kinds` has the kinds of columns.
The constants of a column are constructor arguments; `setfold.preprocessing.fitting` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from setfold.errors import InputError

# by id, which is faster than a function for each kind
LISTS = {
    kind.id for kind in (pa.list_(pa.int8()), pa.large_list(pa.int8()), pa.list_(pa.int8(), 1))
}


class Column(nn.Module):
    """A column of a table.

    Attributes:
        name: The name of the column.
        width: How many numbers of an element it provides.
        dim_out: How many numbers `forward` makes of these.
        takes_missing: Whether a value may be missing.
    """

    name: str
    width: int = 1
    dim_out: int = 1
    takes_missing = False

    def fits(self, kind: pa.DataType) -> bool:
        """Whether `read` takes values of a type."""
        raise NotImplementedError

    def expected(self) -> str:
        """Return what `fits`, for an error message."""
        raise NotImplementedError

    def read(self, values: pa.Array) -> np.ndarray:
        """Parse values into numbers `(n, width)`, in float64; NaN where a value cannot be used."""
        raise NotImplementedError

    def show(self, numbers: Sequence[float]) -> str:
        """Return the value that was parsed into some numbers, as text."""
        raise NotImplementedError

    def forward(self, numbers: Tensor) -> Tensor:
        """Map numbers (..., width) to (..., dim_out)."""
        return numbers


class Columns(nn.Module):
    """The columns of a table that make up an element, in order.

    A model that contains one reads tables by itself: `setfold encode` needs no --features, and
    `setfold.encode_frame` takes frames with categories, times and missing values.

    Args:
        columns: The columns.

    >>> from setfold import CategoryColumn, NumberColumn
    >>> columns = Columns([NumberColumn("x"), CategoryColumn("kind", ["a", "b"], dim=2)])
    >>> numbers = columns.read({"x": pa.array([0.5]), "kind": pa.array(["b"])})
    >>> numbers.tolist()
    [[0.5, 2.0]]
    >>> columns(torch.tensor(numbers)).shape
    torch.Size([1, 3])
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        super().__init__()
        is_list = isinstance(columns, list | tuple | nn.ModuleList)
        if not is_list or not columns or not all(isinstance(one, Column) for one in columns):
            raise InputError(f"columns must be a list of columns; got {columns!r:.60}.")
        names = [column.name for column in columns]
        if len({*names}) < len(names):
            raise InputError(f"columns must have different names; got {names}.")
        self.columns = nn.ModuleList(columns)

    @property
    def all(self) -> list[Column]:
        """The columns, as a list."""
        return cast("list[Column]", list(self.columns))

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return [column.name for column in self.all]

    def __getitem__(self, name: str) -> Column:
        """The column with a name."""
        return next(column for column in self.all if column.name == name)

    @property
    def width(self) -> int:
        """The width of an element."""
        return sum(column.width for column in self.all)

    @property
    def dim_out(self) -> int:
        """The width of the output of `forward`."""
        return sum(column.dim_out for column in self.all)

    def places_out(self, name: str) -> range:
        """Return the places of a column in the output of `forward`."""
        first = 0
        for column in self.all:
            if column.name == name:
                return range(first, first + column.dim_out)
            first += column.dim_out
        raise InputError(f"there is no column {name!r}; there are {self.names}.")

    def read(self, table: dict[str, pa.Array]) -> np.ndarray:
        """Parse the columns of a table into elements `(n, width)`, in float64.

        A number is NaN where its value is missing and must not be.
        """
        return np.concatenate([column.read(table[column.name]) for column in self.all], 1)

    def show(self, element: Sequence[float]) -> dict[str, str]:
        """Return the values that were parsed into an element, as text."""
        found, first = {}, 0
        for column in self.all:
            found[column.name] = column.show(element[first : first + column.width])
            first += column.width
        return found

    def forward(self, elements: Tensor) -> Tensor:
        """Map elements (..., width) to (..., dim_out)."""
        parts = elements.split([column.width for column in self.all], -1)
        return torch.cat([c(part) for c, part in zip(self.all, parts, strict=True)], -1)


def columns_of(model: nn.Module) -> Columns | None:
    """Return the columns that a model reads; None if it takes elements as they are."""
    return next((module for module in model.modules() if isinstance(module, Columns)), None)


# ---- types and values of Arrow columns -----------------------------------------------------------


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
    return kind.id in LISTS


def is_jagged(kind: pa.DataType) -> bool:
    """Whether a column holds lists of variable length."""
    return is_list(kind) and not pa.types.is_fixed_size_list(kind)


def elements_in(kinds: Mapping[str, pa.DataType]) -> list[str]:
    """Return the columns whose lists hold one value for each element of a row.

    Beside lists of variable length, lists of fixed length are vectors, the same for all elements.

    Args:
        kinds: The types of the chosen columns.

    >>> momenta = {"pt": pa.list_(pa.float32()), "vertex": pa.list_(pa.float32(), 3)}
    >>> elements_in(momenta), elements_in({"vertex": momenta["vertex"]})
    (['pt'], ['vertex'])
    """
    jagged = [name for name, kind in kinds.items() if is_jagged(kind)]
    return jagged or [name for name, kind in kinds.items() if is_list(kind)]


def is_vector(kind: pa.DataType) -> bool:
    """Whether a column holds lists of numbers."""
    return is_list(kind) and (
        pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)
    )
