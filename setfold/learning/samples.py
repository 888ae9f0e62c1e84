"""Sets and labels as scikit-learn's estimators get them: X and y."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from sklearn.utils.validation import column_or_1d

from setfold.errors import InputError
from setfold.files.kinds import open_frame
from setfold.preprocessing.columns import Columns, decoded, is_text
from setfold.preprocessing.fitting import can_be_fitted

FRAME_ROWS = 1 << 20


@dataclass(frozen=True)
class Samples:
    """Sets as columns of a table.

    Args:
        ids: The set ids.
        offsets: `(number of sets + 1,)`: where each set begins.
        table: The columns; all elements of the first set, then those of the second.
    """

    ids: Sequence[Any]
    offsets: np.ndarray
    table: dict[str, pa.Array]

    def first(self) -> Samples:
        """The first set alone."""
        table = {name: array.slice(0, self.offsets[1]) for name, array in self.table.items()}
        return Samples(self.ids[:1], self.offsets[:2], table)


def samples_of(arrays: Sequence[np.ndarray]) -> Samples:
    """Return sets that are arrays (n_i, d).

    >>> samples_of([np.ones((3, 2)), np.zeros((1, 2))]).offsets
    array([0, 3, 4])
    """
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in arrays])]).astype(np.int64)
    rows = np.concatenate(arrays)
    table = {f"x{place}": pa.array(rows[:, place]) for place in range(rows.shape[1])}
    return Samples(range(len(arrays)), offsets, table)


def check_arrays(sets: Sequence[Any]) -> bool:
    """Return whether a list has arrays (n_i, d), and not the rows of one array.

    Raises:
        InputError: They are empty, or differ in width; or there are no sets.

    >>> check_arrays([np.ones((3, 2)), np.zeros((1, 2))]), check_arrays([[1.0, 2.0], [3.0, 4.0]])
    (True, False)
    """
    if not len(sets):
        raise InputError("X has no sets. Pass at least one.")
    if np.ndim(sets[0]) != 2:
        shapes = {np.shape(one) for one in sets}
        if len(shapes) > 1:
            raise InputError(
                f"X must be a list of arrays (n, d); set 0 has the shape {np.shape(sets[0])}. If "
                "elements are single numbers, pass arrays (n, 1)."
            )
        return False
    width = np.shape(sets[0])[1]
    for number, one in enumerate(sets):
        shape = np.shape(one)
        if len(shape) != 2 or not shape[0] or shape[1] != width:
            raise InputError(
                f"set {number} of X has the shape {shape}; expected (n, {width}), with at least "
                "one element. Leave out empty sets."
            )
    return True


def samples_in_frame(frame: Any, set: str, columns: Columns | None) -> Samples:
    """Return the sets of a frame, sorted by id.

    Args:
        frame: A frame of any kind.
        set: The column of set ids.
        columns: The columns to read; None for all that can be features.

    Raises:
        InputError: A column is missing, is there twice, or has another type than in `fit`.
    """
    opened = open_frame(frame, FRAME_ROWS, "X")
    known = opened.schema.names
    if not isinstance(set, str):
        raise InputError(f"set must be the name of one column; got {set!r}.")
    opened.check([set])
    wanted = [set] if columns is None else [set, *columns.names]
    missing = [name for name in wanted if name not in known]
    if missing:
        raise InputError(f"the frame has no column {missing[0]!r}; it has {known}.")
    twice = [name for name in known if known.count(name) > 1]
    if twice:
        raise InputError(f"the frame has several columns {twice[0]!r}. Rename them.")
    schema = opened.schema
    if columns is None:
        wanted += [name for name in known if name != set and can_be_fitted(schema.field(name).type)]
        if len(wanted) == 1:
            raise InputError(f"no column can be a feature except {set!r}; there are {known}.")
    for column in [] if columns is None else columns.all:
        kind = schema.field(column.name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (column.fits(kind) or pa.types.is_null(kind)):
            raise InputError(
                f"column {column.name!r} is {kind}; expected {column.expected()}, as in fit."
            )
    read = pa.schema([schema.field(name) for name in wanted])
    table = pa.Table.from_batches(opened.batches(wanted), read)
    table = pa.table({name: _plain(table[name]) for name in wanted})
    table = table.take(pc.sort_indices(table, [(set, "ascending")]))
    ids = table[set].combine_chunks()
    if ids.null_count:
        raise InputError(f"column {set!r} has {ids.null_count} nulls; every row needs a set id.")
    runs = pc.run_end_encode(ids)
    ends = runs.run_ends.to_numpy(zero_copy_only=False).astype(np.int64)
    arrays = {name: table[name].combine_chunks() for name in wanted[1:]}
    return Samples(runs.values.to_pylist(), np.concatenate([[0], ends]), arrays)


def _plain(values: pa.ChunkedArray) -> pa.Array:
    array = decoded(values.combine_chunks())
    return array.cast(pa.large_string()) if is_text(array.type) else array


def labels_for(sets: Samples, y: Any) -> np.ndarray:
    """Return one label for each set.

    Raises:
        ValueError: A label is missing, or there are too few or too many.
    """
    if y is None:
        raise ValueError("this estimator requires y to be passed, but the target y is None.")
    if isinstance(y, Mapping):
        missing = [name for name in sets.ids if name not in y]
        if missing:
            raise InputError(f"y has no label for the set {missing[0]!r}.")
        y = [y[name] for name in sets.ids]
    labels: np.ndarray = column_or_1d(y, warn=True)
    if len(labels) != len(sets.ids):
        raise ValueError(
            f"Found input variables with inconsistent numbers of samples: {len(sets.ids)} sets and "
            f"{len(labels)} labels."
        )
    if labels.dtype == object:
        for name, label in zip(sets.ids, labels.tolist(), strict=True):
            if _is_missing(label):
                raise InputError(f"y has no label for the set {name!r}: {label}. Leave it out.")
    return labels


def _is_missing(label: object) -> bool:
    """Whether a label is None, NaN, NaT or NA."""
    try:
        return label is None or bool(label != label)
    except TypeError:  # pandas' NA is neither equal nor different
        return True


def plain_labels(classes: np.ndarray) -> list[str] | list[int] | list[bool]:
    """Return labels as a model keeps them."""
    if classes.dtype.kind in "iu":
        return [int(label) for label in classes]
    if classes.dtype.kind == "b":
        return [bool(label) for label in classes]
    return [str(label) for label in classes]
