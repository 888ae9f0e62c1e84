"""Which columns of a file hold the features, and which one holds the set id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from setfold.errors import InputError
from setfold.files.features import (
    Feature,
    format_features,
    parse_features,
    parse_names,
    suggest_shift,
)
from setfold.files.ids import TYPES, check_type, show
from setfold.files.readers.reader import listed, suggest
from setfold.files.readers.slides import VECTORS, holds_vectors
from setfold.preprocessing.columns import Column, Columns, elements_in, is_jagged, is_list
from setfold.preprocessing.kinds import CategoryColumn

ROW_ID = [("file", pa.large_string()), ("row", pa.int64())]  # the id of a row that is a set
OPTIONAL = ("excluded", "types")  # not written if empty


@dataclass(frozen=True)
class ColumnSpec:
    """Which columns of a file hold the features and the set id.

    Args:
        features: The features of an element; None for the column `features` if it holds vectors and
            each file is a set, else for all columns of numbers and of lists of numbers except the
            set column, in the order of the file.
        set: The column, or the key of a key=value folder, that holds the set id of each row, or
            several of them. If None, each file is one set, or each row if `explode` is set.
        explode: Whether each row holds many elements, stored as lists of one length.
        root: The folder to which the names of files are relative, where they are set ids. If None,
            these names are absolute paths.
        excluded: Columns that are not features, if `features` is None.
        types: The types of the columns of a set id that has several; empty if not known yet.
    """

    features: tuple[Feature, ...] | None
    set: str | tuple[str, ...] | None
    explode: bool = False
    root: str | None = None
    excluded: tuple[str, ...] = ()
    types: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls,
        features: str | Sequence[str] | None,
        set: str | Sequence[str] | None,
        explode: bool = False,
        root: str | None = None,
    ) -> ColumnSpec:
        """Return the columns that a user asks for, as in `parse_features` and `parse_names`."""
        chosen, excluded = parse_features(features)
        names = () if set is None else parse_names(set)
        one_or_none = names[0] if names else None
        return cls(chosen, names if len(names) > 1 else one_or_none, explode, root, excluded)

    def describe(self) -> dict[str, Any]:
        """Return the same as a dictionary that can be saved as JSON."""
        entries = asdict(self)
        return {name: value for name, value in entries.items() if name not in OPTIONAL or value}

    @property
    def set_names(self) -> tuple[str, ...]:
        """The columns of a set id; empty if it is not in columns."""
        if self.set is None:
            return ()
        return (self.set,) if isinstance(self.set, str) else self.set

    @property
    def id_fields(self) -> list[tuple[str, pa.DataType]]:
        """Names and types of the columns of an id that `ids.pack` makes; empty for other ids."""
        if self.set is None and self.explode:
            return ROW_ID
        return [(name, TYPES[kind]) for name, kind in zip(self.set_names, self.types, strict=False)]

    def show_id(self, value: pa.Scalar) -> str:
        """Return a set id as text, for messages."""
        if not self.id_fields:
            return str(value)
        names, types = zip(*self.id_fields, strict=True)
        return show(value.as_py(), names, types)

    @property
    def _depth(self) -> int:
        """How deep the lists of a feature may be nested."""
        return 2 if self.explode else 1

    @property
    def named(self) -> list[str]:
        """The names of the features, if they were given."""
        return [feature.name for feature in self.features or ()]

    def numbers(self, parser: Columns | None) -> list[str]:
        """Return the features to read as numbers, in formats without types."""
        if parser is None:
            return self.named
        return [column.name for column in parser.all if column.fits(pa.float64())]

    def texts(self, parser: Columns | None) -> list[str]:
        """Return the columns to read as text, in formats without types: set ids and categories."""
        columns = () if parser is None else parser.all
        categories = [column.name for column in columns if isinstance(column, CategoryColumn)]
        return [*self.set_names, *categories]

    def chosen(self, schema: pa.Schema) -> tuple[Feature, ...]:
        """Return the features, with the default resolved to columns of the file.

        Args:
            schema: The columns of the file, or of a batch of `needed` columns.
        """
        if self.features is not None:
            return self.features
        if self.set is None and not self.explode and not self.excluded and holds_vectors(schema):
            return (Feature(VECTORS),)
        others, deepest = {*self.set_names, *self.excluded}, self._depth
        return tuple(
            Feature(field.name)
            for field in schema
            if field.name not in others and 0 <= depth_of(field.type) <= deepest
        )

    def exploded(self, schema: pa.Schema) -> ColumnSpec:
        """Return the same for a file whose rows are sets: exploded if a feature is jagged.

        Args:
            schema: The columns of the file.
        """
        found = replace(self, explode=True)
        names = [feature.name for feature in found.chosen(schema)]
        kinds = [schema.field(name).type for name in names if name in schema.names]
        return found if any(map(is_jagged, kinds)) else self

    def needed(
        self,
        schema: pa.Schema,
        partition: Mapping[str, str],
        path: Path,
        parser: Columns | None = None,
    ) -> list[str]:
        """Validate the columns of a file, and return those that must be read.

        Args:
            schema: The columns of the file.
            partition: The key=value folders in its path.
            path: The file, for error messages.
            parser: The columns of the model, if it parses them itself.

        Raises:
            InputError: A column is missing or has the wrong type.
        """
        for name in self.excluded:
            check_present(name, schema.names, path)
        features = self.chosen(schema)
        if not features:
            if not self.explode and any(depth_of(field.type) > self._depth for field in schema):
                raise InputError(
                    f"{path} has only nested lists; expected numbers or plain lists in one of "
                    f"{listed(schema.names)}. If each row is a whole set, pass --explode."
                )
            left_out = "the set column" if not self.excluded else "those that are left out"
            raise InputError(
                f"{path} has no numeric column except {left_out}; it has "
                f"{listed(schema.names)}. Pass a file with features."
            )
        names = [feature.name for feature in features]
        for name in names:
            check_present(name, schema.names, path)
        exploded = self._exploded(schema)
        for name in names:
            if parser is None:
                self._check_numbers(schema.field(name), path)
            else:
                self._check_parsed(parser[name], schema.field(name), path, name in exploded)
        if self.explode and not any(depth_of(schema.field(name).type) for name in names):
            raise InputError(
                f"{path} has no lists to explode: {listed(names)} have one number in each row. "
                "Omit --explode, or select columns of lists with --features."
            )
        for name in self.set_names:
            check_present(name, [*schema.names, *partition], path)
        try:
            self.set_type(schema, partition)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        stored = [name for name in self.set_names if name in schema.names]
        return list(dict.fromkeys([*names, *stored]))

    def _check_numbers(self, field: pa.Field, path: Path) -> None:
        depth = depth_of(field.type)
        if depth < 0 and not pa.types.is_null(field.type):
            raise InputError(
                f"column {field.name!r} of {path} is {field.type}; a feature must be a number or a "
                "list of numbers. Select other columns with --features."
            )
        if depth > self._depth:
            raise InputError(
                f"column {field.name!r} of {path} is {field.type}; expected numbers or plain "
                "lists. If each row is a whole set, pass --explode."
            )

    def _check_parsed(self, column: Column, field: pa.Field, path: Path, is_exploded: bool) -> None:
        kind = field.type
        if is_exploded:
            kind = kind.value_type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (column.fits(kind) or pa.types.is_null(kind)):
            raise InputError(
                f"column {field.name!r} of {path} is {field.type}; the model was trained with "
                f"{column.expected()}. Convert the column."
            )

    def width(self, schema: pa.Schema) -> int | None:
        """Return the number of features of an element; None if it depends on the rows.

        Args:
            schema: The columns of the file.
        """
        exploded = self._exploded(schema)
        widths = [
            self._width(schema.field(f.name).type, f.name in exploded) for f in self.chosen(schema)
        ]
        return None if None in widths else sum(width for width in widths if width is not None)

    def _exploded(self, schema: pa.Schema) -> list[str]:
        """Return the features whose lists are exploded."""
        kinds = {f.name: schema.field(f.name).type for f in self.chosen(schema)}
        return elements_in(kinds) if self.explode else []

    def _width(self, kind: pa.DataType, is_exploded: bool) -> int | None:
        if is_exploded:
            kind = kind.value_type
        if depth_of(kind) <= 0:
            return 1
        return kind.list_size if pa.types.is_fixed_size_list(kind) else None

    def check_width(self, schema: pa.Schema, expected: int, path: Path) -> None:
        """Raise InputError if the elements of a file do not have the width of the model.

        Args:
            schema: The columns of the file.
            expected: The number of features that the model expects.
            path: The file, for the error message.
        """
        width = self.width(schema)
        if width not in (None, expected):
            names = listed([feature.name for feature in self.chosen(schema)])
            raise InputError(
                f"{path} has elements of {width} numbers ({names}); the model expects {expected}. "
                "Select the features with --features."
            )

    def set_type(self, schema: pa.Schema, partition: Mapping[str, str]) -> pa.DataType | None:
        """Return the type of set ids: a struct if they have several columns; None for whole files.

        Args:
            schema: The columns of the file, or of a batch.
            partition: The key=value folders in its path. Their values are text, even if they look
                like numbers.
        """
        if self.set is None:
            return pa.struct(ROW_ID) if self.explode else None
        kinds = [(name, self.column_type(name, schema)) for name in self.set_names]
        if isinstance(self.set, str):
            return kinds[0][1]
        return pa.struct([(name, check_type(name, kind)) for name, kind in kinds])

    def column_type(self, name: str, schema: pa.Schema) -> pa.DataType:
        """Return the type to which a column of the set id is converted."""
        if name in schema.names:
            return _id_type(name, schema.field(name).type)
        return pa.large_string()


class Validated(NamedTuple):
    """The columns of a file that was validated: most others have the same.

    Args:
        schema: The columns of the file; None before the first one.
        keys: The keys of the key=value folders in its path.
        names: The columns that must be read.
    """

    schema: pa.Schema | None = None
    keys: frozenset[str] = frozenset()
    names: Sequence[str] = ()

    def holds(self, schema: pa.Schema, partition: Mapping[str, str]) -> bool:
        """Whether another file has the same columns."""
        same = self.schema is not None and self.schema.equals(schema)
        return same and self.keys == partition.keys()


def stored_type(set_type: pa.DataType) -> pa.DataType:
    """Return the type of set ids in tables, given that of `ColumnSpec.set_type`."""
    return pa.large_binary() if pa.types.is_struct(set_type) else set_type


def parsed_by(parser: Columns | None, columns: ColumnSpec) -> ColumnSpec:
    """Return the columns with the features that a model reads by itself.

    Args:
        parser: The columns of the model; None if it takes any features.
        columns: The columns that were requested.

    Raises:
        InputError: Other features were requested.
    """
    if parser is None:
        return columns
    own = tuple(Feature(name) for name in parser.names)
    if columns.features not in (None, own) or columns.excluded:
        raise InputError(
            f"the model reads its own columns, {format_features(own)}; got "
            f"{format_features(columns.features or ())}. Omit --features."
        )
    return replace(columns, features=own)


def depth_of(kind: pa.DataType) -> int:
    """Return how deep the lists of a column are nested; -1 if it does not hold numbers.

    Args:
        kind: The type of the column.

    >>> depth_of(pa.int8()), depth_of(pa.list_(pa.list_(pa.float32(), 3))), depth_of(pa.string())
    (0, 2, -1)
    """
    if is_list(kind):
        inner = depth_of(kind.value_type)
        return inner + 1 if inner >= 0 else -1
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return 0 if is_number or pa.types.is_boolean(kind) or pa.types.is_decimal(kind) else -1


def _id_type(name: str, kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind):
        return kind if kind == pa.uint64() else pa.int64()
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view():
        return pa.large_string()
    if (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or kind == pa.binary_view()
    ):
        return pa.large_binary()
    if pa.types.is_floating(kind) or pa.types.is_nested(kind) or not _can_be_sorted(kind):
        raise InputError(
            f"the set column {name!r} is {kind}; expected integers or text. Convert it to one "
            "of them."
        )
    return kind


def _can_be_sorted(kind: pa.DataType) -> bool:
    """Whether Arrow can group and sort values of a type."""
    empty = pa.array([], kind)
    try:
        pc.array_sort_indices(empty.dictionary_encode().dictionary)
    except pa.ArrowNotImplementedError:  # such as lists and structs
        return False
    return True


def check_present(name: str, names: list[str], path: str | Path) -> None:
    """Raise InputError unless a column is there, once."""
    if names.count(name) == 1:
        return
    if name in names:
        raise InputError(
            f"{path} has several columns {name!r}. Rename them so that each is unique."
        )
    raise InputError(
        f"{path} has no column {name!r}.{suggest_shift(name, names) or suggest(name, names)}"
    )
