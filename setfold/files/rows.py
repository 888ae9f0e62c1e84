"""Convert record batches into elements and set ids, and find bad rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from setfold.errors import InputError
from setfold.files.columns import ColumnSpec
from setfold.files.features import Feature
from setfold.files.ids import TEXT, pack
from setfold.files.readers.reader import BadRow
from setfold.native.dispatch import Room
from setfold.native.tables import can_stack, group_ids, stack_columns
from setfold.preprocessing.columns import Columns, decoded, elements_in, is_list

BLOCK_ROWS = 8192  # rows that are copied at a time; more would not fit into the CPU cache


@dataclass(frozen=True)
class Rows:
    """The elements of a batch, and the sets that they belong to.

    Args:
        sets: The set id of each element, without nulls, maybe as a dictionary; None if the file is
            one set.
        elements: `(n, d)`, C-contiguous. It may be a view of the batch, so do not write to it.
        bad: The bad rows, which have no elements, in order.
        read: The number of rows in the batch, good and bad.
        first: The row number of the batch's first row in its file.
        kept: The row of each good element in the batch; None if that is 0, 1, 2, ...
        places: Where each of these is among the elements; None if they are in the same order.
        empty: For exploded rows without elements, the set ids, or the row numbers if there is no
            set column.
        names: The column of each number of an element.
    """

    sets: pa.Array | None
    elements: np.ndarray
    bad: tuple[BadRow, ...]
    read: int
    first: int
    kept: np.ndarray | None
    places: np.ndarray | None = None
    empty: pa.Array | None = None
    names: tuple[str, ...] = ()

    @property
    def numbers(self) -> np.ndarray:
        """The row number of each element in its file."""
        rows = np.arange(len(self.elements)) if self.kept is None else self.kept
        numbers = self.first + rows
        if self.places is not None:
            numbers[self.places] = self.first + rows
        return numbers

    def find_non_finite(self) -> dict[int, str]:
        """Return the rows with a number that is NaN or infinite, and the column of the first."""
        wrong = ~np.isfinite(self.elements)
        places = np.flatnonzero(wrong.any(axis=1))
        columns = wrong[places].argmax(axis=1)
        return {
            int(row): f"column {self.names[column]!r} is NaN or infinite"
            for row, column in zip(self.numbers[places].tolist(), columns.tolist(), strict=True)
        }


def rows_of(
    batch: pa.RecordBatch,
    columns: ColumnSpec,
    *,
    first: int,
    dtype: np.dtype,
    width: int | None,
    partition: Mapping[str, str],
    parser: Columns | None = None,
    room: Room | None = None,
    grouped: bool = False,
) -> Rows:
    """Extract the elements of a batch, and find its bad rows.

    Args:
        batch: The columns that `columns.needed` returns.
        columns: Which columns hold the features and the set id.
        first: The row number of the batch's first row in its file.
        dtype: The dtype of the elements. Offsets and factors are applied in float64 before the
            conversion.
        width: The number of features of an element; None to use the width of the first row.
        partition: The key=value folders in the path of the file.
        parser: The columns of the model, if it parses them itself.
        room: Where elements may be stored; None for new memory.
        grouped: Whether elements of a set may follow one another, which makes them faster to sum.

    >>> batch = pa.record_batch({"event": [7, 7, 8], "x": [1.0, None, 3.0], "y": [4, 5, 6]})
    >>> rows = rows_of(
    ...     batch, ColumnSpec(None, "event"), first=0, dtype=np.dtype("f4"), width=2, partition={}
    ... )
    >>> rows.sets.to_pylist(), rows.elements.tolist(), rows.bad
    ([7, 8], [[1.0, 4.0], [3.0, 6.0]], (BadRow(row=1, reason="column 'x' is null"),))
    """
    features = columns.chosen(batch.schema)
    ids = {
        name: decoded(batch.column(name)).cast(columns.column_type(name, batch.schema))
        for name in columns.set_names
        if name in batch.schema.names
    }
    arrays = [decoded(batch.column(feature.name)) for feature in features]
    draft = _Draft([feature.name for feature in features], arrays, ids)
    if parser is not None:
        draft.optional = {column.name for column in parser.all if column.takes_missing}
    draft.drop_nulls()
    if columns.explode:
        draft.explode()
        draft.drop_nulls()
    if parser is None:
        draft.drop_other_widths(width)
    sets, places = _set_ids(columns, draft.ids, partition, len(draft.arrays[0])), None
    if parser is None:
        blocks = [_block(array) for array in draft.arrays]
        plain = dtype == np.float32 and all(f == Feature(f.name) for f in features)
        if plain and can_stack(blocks):
            if grouped:
                sets, places = _group(sets)
            elements = stack_columns(blocks, room or Room(), places)
        else:
            elements = _matrix(blocks, features, dtype)
    else:
        with np.errstate(over="ignore"):  # overflows become infinite, and are found later
            elements = parser.read(dict(zip(draft.names, draft.arrays, strict=True))).astype(dtype)
    if width is not None and elements.shape[1] != width:
        if len(elements):
            raise InputError(
                f"elements have {elements.shape[1]} numbers ({', '.join(draft.names)}); expected "
                f"{width}. Select other columns with --features."
            )
        elements = np.empty((0, width), dtype)
    bad = tuple(BadRow(first + row, reason) for row, reason in sorted(draft.reasons.items()))
    if parser is None:
        names = draft.columns_of(elements.shape[1])
    else:
        names = tuple(column.name for column in parser.all for _ in range(column.width))
    rows = Rows(sets, elements, bad, batch.num_rows, first, draft.kept, places, names=names)
    if not columns.explode:
        return rows
    if columns.set is None:
        return replace(rows, sets=pa.array(rows.numbers), empty=pa.array(first + draft.empty))
    without = {name: array.take(pa.array(draft.empty)) for name, array in ids.items()}
    return replace(rows, empty=_set_ids(columns, without, partition, len(draft.empty)))


def _set_ids(
    columns: ColumnSpec, ids: Mapping[str, pa.Array], partition: Mapping[str, str], count: int
) -> pa.Array | None:
    """Return the set ids of elements, from columns and from the path; None without a set column."""
    if columns.set is None:
        return None
    arrays = [
        ids[name] if name in ids else pa.repeat(pa.scalar(partition[name], TEXT), count)
        for name in columns.set_names
    ]
    return arrays[0] if isinstance(columns.set, str) else pack(arrays)


def _group(sets: pa.Array | None) -> tuple[pa.Array | None, np.ndarray | None]:
    """Return set ids in an order in which equal ones follow one another, and the place of each.

    Other ids than integers stay in their order, and so do all without compiled kernels.
    """
    if sets is None or sets.type not in (pa.int64(), pa.uint64()):
        return sets, None
    found = group_ids(sets.to_numpy())
    if found is None:
        return sets, None
    names, codes, places = found
    return pa.DictionaryArray.from_arrays(codes, names, safe=False), places


@dataclass
class _Draft:
    """Elements during validation. If one is bad, all elements of its row are dropped."""

    names: list[str]
    arrays: list[pa.Array]
    ids: dict[str, pa.Array]  # the set id of each element, by column
    kept: np.ndarray | None = None  # the row of each element in the batch; None for 0, 1, 2, ...
    reasons: dict[int, str] = field(default_factory=dict)
    empty: np.ndarray = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # rows without elements
    optional: set[str] = field(default_factory=set)  # columns in which a value may be missing

    def drop_nulls(self) -> None:
        """Drop rows with a null in the set id, in a feature, or in the list of a feature."""
        for name, array in [*self.ids.items(), *zip(self.names, self.arrays, strict=True)]:
            if array.null_count and name not in self.optional:
                self._reject(np.flatnonzero(array.is_null()), f"column {name!r} is null")
            if is_list(array.type) and (values := array.flatten()).null_count:
                places = _owners(array)[np.flatnonzero(values.is_null())]
                self._reject(places, f"column {name!r} has a null in its list")
        self._drop()

    def explode(self) -> None:
        """Turn each position in the lists of a row into an element."""
        kinds = {name: array.type for name, array in zip(self.names, self.arrays, strict=True)}
        listed = [self.names.index(name) for name in elements_in(kinds)]
        lengths = [_lengths(self.arrays[place]) for place in listed]
        for place, others in zip(listed[1:], lengths[1:], strict=True):
            unequal = np.flatnonzero(others != lengths[0])
            names = f"{self.names[listed[0]]!r} and {self.names[place]!r}"
            self._reject(unequal, f"the lists of columns {names} differ in length")
        self._drop()
        rows = np.arange(len(self.arrays[0])) if self.kept is None else self.kept
        self.empty = rows[_lengths(self.arrays[listed[0]]) == 0]
        owners = _owners(self.arrays[listed[0]])
        self.arrays = [
            array.flatten() if place in listed else array.take(owners)
            for place, array in enumerate(self.arrays)
        ]
        self.ids = {name: array.take(owners) for name, array in self.ids.items()}
        self.kept = owners if self.kept is None else self.kept[owners]

    def drop_other_widths(self, width: int | None) -> None:
        """Drop rows whose lists have the wrong length.

        Args:
            width: The number of features of an element, over all columns; None to use the width of
                the first row.
        """
        lists = [array for array in self.arrays if is_list(array.type)]
        if all(pa.types.is_fixed_size_list(array.type) for array in lists) or not len(lists[0]):
            return
        lengths = np.stack([_lengths(array) for array in lists], axis=1)
        totals = lengths.sum(axis=1) + (len(self.arrays) - len(lists))
        if width is None:
            width = int(totals[0])
        fitting = np.flatnonzero(totals == width)
        model = lengths[fitting[0]] if len(fitting) else -1
        wrong = np.flatnonzero((lengths != model).any(axis=1))
        for total in np.unique(totals[wrong]).tolist():
            reason = f"the row has {total} numbers; expected {width}"
            if total == width:
                reason = "the lists of the row differ in length from those of other rows"
            self._reject(wrong[totals[wrong] == total], reason)
        self._drop()

    def columns_of(self, width: int) -> tuple[str, ...]:
        """Return the column of each of an element's numbers."""
        if len(self.names) == width:
            return tuple(self.names)
        sizes = [int(_lengths(a)[0]) if is_list(a.type) and len(a) else 1 for a in self.arrays]
        return tuple(name for name, n in zip(self.names, sizes, strict=True) for _ in range(n))

    def _reject(self, places: np.ndarray, reason: str) -> None:
        """Record why the rows of these elements are bad. The first reason for a row is kept."""
        rows = places if self.kept is None else self.kept[places]
        for row in rows.tolist():
            self.reasons.setdefault(row, reason)

    def _drop(self) -> None:
        """Drop all elements of rejected rows."""
        if not self.reasons:
            return
        rows = np.arange(len(self.arrays[0])) if self.kept is None else self.kept
        good = ~np.isin(rows, list(self.reasons))
        if not good.all():
            self.arrays = [array.filter(good) for array in self.arrays]
            self.ids = {name: array.filter(good) for name, array in self.ids.items()}
            self.kept = rows[good]


def _lengths(array: pa.Array) -> np.ndarray:
    """Return the length of each list; 0 for a null, as in `flatten`."""
    return pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)


def _owners(array: pa.Array) -> np.ndarray:
    """Return, for each value in `flatten`, the position of the list that contains it."""
    return np.repeat(np.arange(len(array)), _lengths(array))


def _matrix(
    blocks: Sequence[np.ndarray], features: Sequence[Feature], dtype: np.dtype
) -> np.ndarray:
    """Stack columns, with offsets and factors. A single column is not copied if possible."""
    if len(blocks) == 1 and blocks[0].dtype == dtype and features[0] == Feature(features[0].name):
        return np.ascontiguousarray(blocks[0] if blocks[0].ndim == 2 else blocks[0][:, None])
    ends = np.cumsum([block.shape[1] if block.ndim == 2 else 1 for block in blocks]).tolist()
    # A plain column is assigned to an index, not to a slice, which is twice as fast in NumPy.
    targets = [
        slice(end - block.shape[1], end) if block.ndim == 2 else end - 1
        for block, end in zip(blocks, ends, strict=True)
    ]
    size = len(blocks[0])
    matrix = np.empty((size, ends[-1]), dtype)
    with np.errstate(over="ignore"):  # overflows become infinite, and are found later
        for start in range(0, size, BLOCK_ROWS):
            part = slice(start, start + BLOCK_ROWS)
            for block, feature, target in zip(blocks, features, targets, strict=True):
                numbers = block[part]
                if feature.offset:
                    numbers = np.subtract(numbers, feature.offset, dtype=np.float64)
                if feature.factor != 1:
                    numbers = np.multiply(numbers, feature.factor, dtype=np.float64)
                matrix[part, target] = numbers
    return matrix


def _block(array: pa.Array) -> np.ndarray:
    """Return a column without nulls as `(n,)`, or as `(n, d)` if it holds lists of one length."""
    if is_list(array.type):
        size = len(array)
        numbers = _block(array.flatten())
        return numbers.reshape(size, len(numbers) // max(size, 1))
    if pa.types.is_decimal(array.type) or pa.types.is_null(array.type):
        array = array.cast(pa.float64())
    return array.to_numpy(zero_copy_only=False)
