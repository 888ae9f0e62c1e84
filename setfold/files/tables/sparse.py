"""Fields of many sets as rows, so that slots that no element has touched take no memory.

A field with few slots has a row for each set. A field with many, (K, ...) with K of at least
`MANY_SLOTS`, has a row for each slot of a set that is not empty. Joining two sets joins their slots
one by one, so a slot is joined like a set of its own, and the cost is that of the touched slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import torch
from torch import Tensor

from setfold.core.state_files import check_field
from setfold.core.statistic import (
    CentralMoments,
    Field,
    Max,
    Min,
    Parts,
    Softmax,
    Sum,
    clear,
)
from setfold.files.tables.arrow import FLOATS, as_lists, as_tensor, combined, writeable
from setfold.native.tables import add_at

MANY_SLOTS = 1024
MAX_NUMBERS = 1 << 28  # of a field, for one set; reading out a set needs that much memory
BY_SLOT = (Sum, Max, Min, Softmax, CentralMoments)  # others may mix the slots of a set


class Rows(NamedTuple):
    """One field of many sets.

    Attributes:
        places: (N,), sorted: the set of each row or, with many slots, set * K + slot.
        parts: What the statistic keeps, (N, ...) each.
    """

    places: Tensor
    parts: Parts

    @property
    def nbytes(self) -> int:
        """The size in memory."""
        return self.places.nbytes + sum(part.nbytes for part in self.parts)


def num_slots(field: Field) -> int | None:
    """Return the number K of slots if a field has a row for each slot; None if for each set."""
    many = len(field.shape) > 1 and field.shape[0] >= MANY_SLOTS
    return field.shape[0] if many and type(field.statistic) in BY_SLOT else None


def row_field(field: Field) -> Field:
    """Return the field of one row."""
    return field if num_slots(field) is None else Field(field.statistic, field.shape[1:])


def rows_of(field: Field, parts: Parts) -> Rows:
    """Return a field of a state as rows.

    >>> field, total = Field(Sum(), (2000, 1)), torch.zeros(3, 2000, 1)
    >>> total[1, 7], total[2, 0] = 5, 6
    >>> rows_of(field, (total,)).places
    tensor([2007, 4000])
    """
    sets = len(parts[0])
    if num_slots(field) is None:
        return Rows(torch.arange(sets), parts)
    flat = [part.flatten(0, 1) for part in parts]  # (B * K, ...)
    touched = torch.zeros(len(flat[0]), dtype=torch.bool)
    for part, empty in zip(flat, field.statistic.empty, strict=True):
        touched |= (part != empty).unsqueeze(-1).flatten(1).any(1)
    places = touched.nonzero().flatten()
    return Rows(places, tuple(part[places] for part in flat))


def parts_of(field: Field, rows: Rows, start: int, stop: int) -> Parts:
    """Return the sets from `start` to `stop` as they are in a state."""
    slots = num_slots(field)
    if slots is None:
        return tuple(part[start:stop] for part in rows.parts)
    ends = torch.tensor([start, stop]) * slots
    first, last = torch.searchsorted(rows.places, ends).tolist()
    places = rows.places[first:last] - start * slots
    whole = field.identity(stop - start, torch.device("cpu"))
    for part, some in zip(whole, rows.parts, strict=True):
        part.flatten(0, 1)[places] = some[first:last].to(part.dtype)
    return whole


def sets_of(field: Field, rows: Rows) -> Tensor:
    """Return the set (N,) of each row."""
    return rows.places // (num_slots(field) or 1)


def clear_sets(field: Field, rows: Rows, where: Tensor) -> Rows:
    """Return rows in which the sets marked by `where` (B,) are exactly empty."""
    if num_slots(field) is None:
        return Rows(rows.places, clear({"": field}, {"": rows.parts}, where)[""])
    kept = ~where[sets_of(field, rows)]
    return Rows(rows.places[kept], tuple(part[kept] for part in rows.parts))


def take(field: Field, rows: Rows, sets: Tensor) -> Rows:
    """Return the rows of some sets, in that order."""
    slots = num_slots(field)
    if slots is None:
        return Rows(torch.arange(len(sets)), tuple(part[sets] for part in rows.parts))
    starts = torch.searchsorted(rows.places, sets * slots)
    lengths = torch.searchsorted(rows.places, (sets + 1) * slots) - starts
    before = lengths.cumsum(0) - lengths
    chosen = torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)
    numbers = torch.arange(len(sets)).repeat_interleave(lengths)
    places = numbers * slots + rows.places[chosen] % slots
    return Rows(places, tuple(part[chosen] for part in rows.parts))


def merge(field: Field, pieces: Sequence[Rows], indices: Sequence[Tensor], sets: int) -> Rows:
    """Return the rows of all sets, joined in the order of the pieces.

    Args:
        field: The field.
        pieces: Its rows in several tables, each of which has a set at most once.
        indices: The numbers in the result of the sets of each table.
        sets: How many sets the result has.
    """
    slots = num_slots(field)
    if slots is None:
        places, indices = torch.arange(sets), [*indices]
    else:
        moved = [
            index[rows.places // slots] * slots + rows.places % slots
            for rows, index in zip(pieces, indices, strict=True)
        ]
        places, inverse = torch.cat(moved).unique(return_inverse=True)
        indices = inverse.split([len(rows.places) for rows in pieces])
    total = row_field(field).identity(len(places), torch.device("cpu"))
    for rows, index in zip(pieces, indices, strict=True):
        if type(field.statistic) is Sum and _add(total[0], index, rows.parts[0]):
            continue
        held = tuple(part[index] for part in total)
        for whole, part in zip(total, field.statistic.join(held, rows.parts), strict=True):
            whole[index] = part
    return Rows(places, total)


def add_in_place(field: Field, total: Rows, rows: Rows, index: Tensor) -> bool:
    """Join rows to those of a table, in place, with a compiled kernel.

    Args:
        field: The field.
        total: Its rows in a table that has all sets.
        rows: Its rows in another table.
        index: The numbers of its sets in the first one.

    Returns:
        False if nothing was joined: only sums with a row for each set can be.
    """
    if num_slots(field) is not None or type(field.statistic) is not Sum:
        return False
    return _add(total.parts[0], index, rows.parts[0])


def _add(total: Tensor, index: Tensor, part: Tensor) -> bool:
    """Add rows in place, with a compiled kernel; False if there is none for them."""
    return add_at(total.numpy(), index.contiguous().numpy(), part.contiguous().numpy())


# ---- columns -------------------------------------------------------------------------------------


def names_of(name: str, field: Field) -> list[str]:
    """Return the names of the columns of a field."""
    parts = [f"{name}.{i}" for i in range(len(field.statistic.empty))]
    return parts if num_slots(field) is None else [f"{name}.slots", *parts]


def to_columns(name: str, field: Field, rows: Rows, sets: int) -> dict[str, pa.Array]:
    """Return the columns of a field of some sets, by name."""
    slots = num_slots(field)
    names = names_of(name, field)
    if slots is None:
        return dict(zip(names, map(as_lists, rows.parts), strict=True))
    offsets = torch.searchsorted(rows.places, torch.arange(sets + 1) * slots)
    columns = [_as_large_lists((rows.places % slots).int(), offsets)]
    columns += [_as_large_lists(part, offsets) for part in rows.parts]
    return dict(zip(names, columns, strict=True))


def _as_large_lists(rows: Tensor, offsets: Tensor) -> pa.LargeListArray:
    """Return a column with the flattened rows of each set."""
    values = rows.detach().contiguous().reshape(-1)
    width = math.prod(rows.shape[1:])
    return pa.LargeListArray.from_arrays(
        pa.array((offsets * width).numpy()), pa.array(values.numpy())
    )


def from_columns(name: str, field: Field, table: pa.Table) -> Rows:
    """Return the rows of a field from the columns that `to_columns` returned.

    Raises:
        ValueError: A column has another type or shape, slots are not sorted or out of range, or a
            number is null or not finite.
    """
    slots = num_slots(field)
    names = names_of(name, field)
    if slots is None:
        shapes = zip(names, field.shapes, strict=True)
        rows = Rows(
            torch.arange(len(table)), tuple(as_tensor(table[n], shape) for n, shape in shapes)
        )
    else:
        if math.prod(field.shape) > MAX_NUMBERS:
            raise ValueError(f"{name!r} has more than {MAX_NUMBERS:,} numbers for a set")
        offsets, numbers = _from_large_lists(table[names[0]], (pa.int32(),))
        sets = torch.arange(len(table)).repeat_interleave(offsets.diff())
        places = sets * slots + numbers
        in_range = not len(numbers) or (int(numbers.min()) >= 0 and int(numbers.max()) < slots)
        if not in_range or not bool((places.diff() > 0).all()):
            raise ValueError(f"the slots of {name!r} are not sorted, or out of range")
        parts = []
        for column, shape in zip(names[1:], row_field(field).shapes, strict=True):
            ends, values = _from_large_lists(table[column], FLOATS)
            if not torch.equal(ends, offsets * math.prod(shape)):
                raise ValueError(f"expected {math.prod(shape)} numbers for each slot of {name!r}")
            parts.append(values.reshape(len(places), *shape))
        rows = Rows(places, tuple(parts))
    check_field(name, row_field(field), rows.parts, len(rows.places))
    return rows


def _from_large_lists(
    column: pa.ChunkedArray, kinds: Sequence[pa.DataType]
) -> tuple[Tensor, Tensor]:
    """Return where the list of each set begins, and all values."""
    array = combined(column)
    kind = array.type
    if not (pa.types.is_large_list(kind) and kind.value_type in kinds):
        raise ValueError(f"expected large lists of {', '.join(map(str, kinds))}; got {kind}")
    values = array.flatten()
    if array.null_count or values.null_count:
        raise ValueError("a number is null")
    offsets = writeable(array.offsets) if len(array) else torch.zeros(1, dtype=torch.long)
    return offsets - offsets[:1], writeable(values)
