"""Rows of tables that can be read several times, batch by batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from setfold.errors import FileError, InputError
from setfold.files.columns import ColumnSpec
from setfold.files.features import Feature, parse_names
from setfold.files.ids import unpack
from setfold.files.inputs import Input, find_inputs, open_reader
from setfold.files.readers.slides import VECTORS, holds_vectors
from setfold.files.rows import rows_of
from setfold.preprocessing.columns import (
    Columns,
    as_text,
    decoded,
    elements_in,
    is_jagged,
    is_list,
    is_text,
)
from setfold.preprocessing.fitting import can_be_fitted
from setfold.preprocessing.kinds import NumberColumn, TimeColumn, VectorColumn

BATCH_ROWS = 1 << 16


@dataclass(frozen=True)
class Elements:
    """Some rows, parsed.

    Args:
        sets: The set id of each element, as text.
        values: `(n, width)`, float32.
    """

    sets: pa.Array
    values: np.ndarray


class Source:
    """The rows of files, with a set id for each.

    Args:
        names: Files, folders and glob patterns.
        set: The column with the set ids, or several: "run,event"; None if each file is a set.
        explode: Whether each row holds many elements, as lists. In formats whose rows are sets,
            that is so if a feature is a list of variable length.
        skip: Whether to skip bad rows instead of raising an error.
    """

    def __init__(
        self,
        names: Sequence[str | Path],
        set: str | Sequence[str] | None,
        *,
        explode: bool = False,
        skip: bool = False,
    ) -> None:
        self.skip = skip
        self.keys = () if set is None else parse_names(set)
        if not names:
            raise InputError("there is nothing to read. Pass at least one file, folder or pattern.")
        self.inputs = find_inputs(names, None, self.keys)
        self.skipped = 0
        self.unusable: dict[str, str] = {}  # columns that are no features, and why
        self.empty: dict[str, int] = {}  # of rows without elements that were read: set ids, and 0
        self._exploded: list[str] = []  # columns
        first = self.inputs[0]
        with open_reader(first.path, self.keys) as reader:
            self.schema, self._holds_sets = reader.schema, reader.holds_sets
        self._begin_exploding(explode)
        self._check_set_column(first)

    def _check_set_column(self, first: Input) -> None:
        for name in self.keys:
            if name not in (*self.schema.names, *first.partition):
                raise InputError(
                    f"{first.path} has no column {name!r}; it has {self.schema.names}."
                )
        self._spec(()).set_type(self.schema, first.partition)

    def _begin_exploding(self, explode: bool) -> None:
        self.explode = explode
        if explode and not self.keys:
            raise InputError(
                "each row holds many elements, as lists: name the columns of set ids with --set."
            )

    def choose(self, names: Collection[str]) -> None:
        """Decide which lists are exploded, given the features.

        Raises:
            InputError: They are not lists of the same elements.
        """
        kinds = {field.name: field.type for field in self.schema if field.name in names}
        if self._holds_sets and any(map(is_jagged, kinds.values())):
            self._begin_exploding(True)
            with open_reader(self.inputs[0].path, self.keys) as reader:
                reader.check(list(kinds))
        self._exploded = elements_in(kinds) if self.explode else []

    def _spec(self, features: Sequence[str]) -> ColumnSpec:
        names = self.keys if len(self.keys) > 1 else next(iter(self.keys), None)
        return ColumnSpec(tuple(Feature(name) for name in features), names, self.explode)

    def kinds(
        self, features: Sequence[str] | None, without: Collection[str]
    ) -> dict[str, pa.DataType]:
        """Return the columns that are features, with their types.

        Args:
            features: Their names; None for the column `features` if it holds vectors and each file
                is a set, else for all columns that can be features.
            without: Columns that are not features, such as the target.

        Raises:
            InputError: A column is missing, or is the target.
        """
        left = {*without, *self.keys}
        self.choose({*self.schema.names} - left if features is None else features)
        known = {field.name: self._kind(field.name, field.type) for field in self.schema}
        names = list(known) if features is None else list(features)
        for name in names:
            if name not in known:
                raise InputError(f"there is no column {name!r}; there are {', '.join(known)}.")
            if features is not None and name in left:
                raise InputError(
                    f"{name!r} cannot be a feature, because it is the target, the set id or the "
                    "group. Leave it out of --features."
                )
        why = "not of a type that can be a feature"
        if features is None and self._holds_vectors() and VECTORS not in left:
            names, why = [VECTORS], f"beside the vectors in {VECTORS!r}; choose with --features"
        elif features is None:
            names = [name for name in names if name not in left and can_be_fitted(known[name])]
        if features is None:
            self.unusable = {name: why for name in known if name not in (*names, *left)}
        if not names:
            raise InputError(f"no column can be a feature; there are {', '.join(known)}.")
        return {name: known[name] for name in names}

    def _holds_vectors(self) -> bool:
        """Whether each file is a set that names its features, as files of slides do."""
        return not self.keys and not self.explode and holds_vectors(self.schema)

    def _kind(self, name: str, kind: pa.DataType) -> pa.DataType:
        return kind.value_type if name in self._exploded and is_list(kind) else kind

    def tables(
        self, columns: Sequence[str], numbers: Sequence[str] = ()
    ) -> Iterator[tuple[pa.Array, dict[str, pa.Array]]]:
        """Yield set ids and columns as they are stored, batch by batch."""
        for found in self.inputs:
            for batch in self._batches(found, columns, numbers):
                table = {name: batch.column(name) for name in columns}
                sets = self._sets(found, batch)
                yield self._explode(sets, table)

    def _explode(
        self, sets: pa.Array, table: dict[str, pa.Array]
    ) -> tuple[pa.Array, dict[str, pa.Array]]:
        """Return one row for each place of the lists, without rows whose lists differ in length."""
        lists = [array for name, array in table.items() if name in self._exploded]
        if not lists:
            return sets, table
        lengths = np.stack([pc.list_value_length(array).fill_null(-1) for array in lists])
        empty = sets.filter(pa.array((lengths == 0).all(0))).drop_null()
        self.empty |= dict.fromkeys(empty.to_pylist(), 0)
        alike = pa.array((lengths == lengths[0]).all(0) & (lengths[0] >= 0))
        owners = pc.list_parent_indices(lists[0].filter(alike))
        found = {name: array.filter(alike) for name, array in table.items()}
        return sets.filter(alike).take(owners), {
            name: array.flatten() if name in self._exploded else array.take(owners)
            for name, array in found.items()
        }

    def elements(self, columns: Columns) -> Iterator[Elements]:
        """Yield parsed elements, batch by batch.

        Raises:
            FileError: A row is bad, and bad rows are not skipped.
        """
        spec = self._spec(columns.names)
        numbers = spec.numbers(columns)
        self.skipped = 0
        for found in self.inputs:
            first = 0
            with open_reader(found.path, spec.texts(columns), numbers) as reader:
                names = spec.needed(reader.schema, found.partition, found.path, columns)
                for batch in reader.read(names, rows=BATCH_ROWS):
                    unread = reader.take_bad_rows()
                    first += len(unread)
                    rows = rows_of(
                        batch,
                        spec,
                        first=first,
                        dtype=np.dtype(np.float32),
                        width=columns.width,
                        partition=found.partition,
                        parser=columns,
                    )
                    first += batch.num_rows
                    finite = np.isfinite(rows.elements).all(1)
                    bad = [(bad.row, bad.reason) for bad in (*unread, *rows.bad)]
                    wrong = rows.numbers[~finite].tolist()
                    bad += [(row, "a number is NaN or infinite") for row in wrong]
                    self._report(found, bad)
                    kinds = [spec.column_type(name, batch.schema) for name in self.keys]
                    ids = self._parsed_ids(found, rows.sets, len(rows.elements), kinds)
                    kept = pa.array(finite)
                    yield Elements(ids.filter(kept), rows.elements[finite])

    def _report(self, found: Input, bad: list[tuple[int, str]]) -> None:
        self.skipped += len(bad)
        if bad and not self.skip:
            row, reason = min(bad)
            raise FileError(
                f"{found.path}, row {row} (counting from 0): {reason}. Correct the row, or skip "
                "bad rows with --on-error skip."
            )

    def _batches(
        self, found: Input, columns: Sequence[str], numbers: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        with open_reader(found.path, self.keys, numbers) as reader:
            missing = [name for name in columns if name not in reader.schema.names]
            if missing:
                raise InputError(
                    f"{found.path} has no column {missing[0]!r}; it has {reader.schema.names}."
                )
            for name in columns:
                self._check_kind(name, reader.schema.field(name).type, found)
            own = [name for name in self.keys if name not in found.partition]
            yield from reader.read(list(dict.fromkeys([*columns, *own])), rows=BATCH_ROWS)

    def _check_kind(self, name: str, kind: pa.DataType, found: Input) -> None:
        """Raise InputError if a column is of another kind than in the first file."""
        before = self._kind(name, self.schema.field(name).type)
        if _family(self._kind(name, kind)) not in (_family(before), pa.null()):
            raise InputError(
                f"column {name!r} of {found.path} is {kind}; in {self.inputs[0].path} it is "
                f"{before}. Convert it to one type."
            )

    def _sets(self, found: Input, batch: pa.RecordBatch) -> pa.Array:
        size = batch.num_rows
        if not self.keys:
            return _repeated(found.name, size)
        columns = [
            batch.column(name)
            if name in batch.schema.names
            else _repeated(found.partition[name], size)
            for name in self.keys
        ]
        return self._text_ids(found, columns)

    def _parsed_ids(
        self, found: Input, sets: pa.Array | None, size: int, kinds: Sequence[pa.DataType]
    ) -> pa.Array:
        """Return the set ids of parsed rows as text."""
        if sets is None:
            return _repeated(found.name, size)
        if len(kinds) == 1:
            return self._text_ids(found, [sets])
        codes = sets.dictionary_encode()
        return self._text_ids(found, unpack(codes.dictionary, kinds)).take(codes.indices)

    def _text_ids(self, found: Input, columns: Sequence[pa.Array]) -> pa.Array:
        try:
            return text_ids(self.keys, columns)
        except pa.ArrowInvalid as error:
            kinds = ", ".join(str(column.type) for column in columns)
            raise InputError(
                f"the set ids of {found.path} are {kinds} and not valid text. Convert them."
            ) from error


def text_ids(names: Sequence[str], columns: Sequence[pa.Array]) -> pa.Array:
    r"""Return set ids as text, so that those of rows and of a table of labels match.

    >>> text_ids(["run", "event"], [pa.array([2, 2]), pa.array(["7", "a,b"])]).to_pylist()
    ['run=2, event=7', 'run=2, event=a\\,b']
    """
    texts = [as_text(decoded(column)) for column in columns]
    if len(texts) == 1:
        return texts[0]
    for old in ("\\", ","):  # so that different ids have different texts
        texts = [pc.replace_substring(text, old, "\\" + old) for text in texts]
    empty, separator = (pa.scalar(text, pa.large_string()) for text in ("", ", "))
    named = [
        pc.binary_join_element_wise(pa.scalar(f"{name}=", pa.large_string()), text, empty)
        for name, text in zip(names, texts, strict=True)
    ]
    return pc.binary_join_element_wise(*named, separator)


def _repeated(name: str, size: int) -> pa.Array:
    return pa.repeat(pa.scalar(name, pa.large_string()), size)


def _family(kind: pa.DataType) -> object:
    """Return what types that are read alike have in common."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    columns = (NumberColumn("x"), TimeColumn("x"), VectorColumn("x", [0.0], [1.0]))
    found = next((type(column) for column in columns if column.fits(kind)), None)
    if pa.types.is_null(kind):
        return pa.null()
    return found or ("text" if is_text(kind) else kind)
