"""Columns that are the position of an element."""

from __future__ import annotations

from collections.abc import Sequence

from setfold.errors import InputError
from setfold.preprocessing.columns import Column, Columns
from setfold.preprocessing.kinds import NumberColumn, VectorColumn

# Names of coordinates, in lower case. The first group of which a table has all is taken.
NAMES = (
    ("x", "y", "z"),
    ("x", "y"),
    ("row", "column"),
    ("row", "col"),
    ("longitude", "latitude"),
    ("lon", "lat"),
)


def choose_position(given: Sequence[str] | None, columns: Columns) -> list[str]:
    """Return the columns that are the position of an element; none if there is no position.

    Args:
        given: Their names; None to find columns that are named like coordinates.
        columns: The columns of the table.

    Raises:
        InputError: A given column does not exist, or is not a number that is always there.

    >>> choose_position(None, Columns([NumberColumn("Y"), NumberColumn("ink"), NumberColumn("X")]))
    ['X', 'Y']
    """
    if given is None:
        usable = {column.name.lower(): column.name for column in columns.all if _is_usable(column)}
        found = next((group for group in NAMES if {*group} <= {*usable}), ())
        return [usable[name] for name in found]
    for name in given:
        if name not in columns.names:
            raise InputError(
                f"the position {name!r} is not among the columns that are used: "
                f"{', '.join(columns.names)}."
            )
        if not _is_usable(columns[name]):
            raise InputError(
                f"the position {name!r} must be a number that is never missing; it is "
                f"{columns[name]}."
            )
    return list(given)


def _is_usable(column: Column) -> bool:
    is_number = isinstance(column, NumberColumn) and not column.missing
    return is_number or isinstance(column, VectorColumn)
