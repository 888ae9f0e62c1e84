"""Which columns of a file are features, and which one tells the set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from setfold.errors import InputError


class Feature(NamedTuple):
    """A column, and what its numbers are multiplied by."""

    name: str
    factor: float = 1.0


def parse_features(text: str) -> tuple[Feature, ...]:
    """Features as they are written in a command.

    Args:
        text: names of columns with commas between them, each with a factor where one is wanted.

    >>> parse_features("x*0.01, y*0.01,intensity")
    (Feature(name='x', factor=0.01), Feature(name='y', factor=0.01), Feature(name='intensity', factor=1.0))
    """
    features = tuple(_parse(part.strip()) for part in text.split(","))
    names = [feature.name for feature in features]
    if len(set(names)) < len(names):
        raise InputError(f"the features {text!r} name a column twice; name each once.")
    return features


def shown_features(features: Sequence[Feature]) -> str:
    """Features as they are written in a command.

    >>> shown_features([Feature("x"), Feature("y", 0.5)])
    'x,y*0.5'
    """
    return ",".join(f.name if f.factor == 1 else f"{f.name}*{f.factor:g}" for f in features)


def features_of(features: str | Sequence[str] | None) -> tuple[Feature, ...] | None:
    """Features as they are given to a function: as in a command, or each by itself.

    >>> features_of(["x", "y*2"])
    (Feature(name='x', factor=1.0), Feature(name='y', factor=2.0))
    """
    if features is None:
        return None
    return parse_features(features if isinstance(features, str) else ",".join(features))


def _parse(part: str) -> Feature:
    name, star, factor = part.rpartition("*")
    if not star:
        name, factor = part, "1"
    try:
        value = float(factor)
    except ValueError:
        value = math.nan
    if not name.strip() or not math.isfinite(value):
        raise InputError(
            f"cannot read the feature {part!r}; expected the name of a column, or name*factor with a "
            "finite number, with commas between features."
        )
    return Feature(name.strip(), value)


@dataclass(frozen=True)
class Columns:
    """Which columns of a file are what.

    Args:
        features: what an element is made of; None for all columns of numbers and of lists of numbers
            but the set's, in the file's order.
        set: the column, or the key=value folder, that tells which set a row belongs to; None if the
            file is one set (or each row is, with `explode`).
        explode: each row holds many elements: its lists, all of one length, are their features.
    """

    features: tuple[Feature, ...] | None
    set: str | None
    explode: bool = False

    @property
    def _depth(self) -> int:
        """How deep numbers may stand in lists."""
        return 2 if self.explode else 1

    @property
    def named(self) -> list[str]:
        """The columns that were named as features."""
        return [feature.name for feature in self.features or ()]

    def chosen(self, schema: pa.Schema) -> tuple[Feature, ...]:
        """The features, where "all" has become names.

        Args:
            schema: the file's columns, or those of a batch of `needed` ones.
        """
        if self.features is not None:
            return self.features
        return tuple(
            Feature(field.name)
            for field in schema
            if field.name != self.set and 0 <= depth_of(field.type) <= self._depth
        )

    def needed(self, schema: pa.Schema, partition: Mapping[str, str], path: Path) -> list[str]:
        """The columns that must be read.

        Args:
            schema: the file's columns.
            partition: the key=value parts of its path.
            path: the file, for messages.
        """
        features = self.chosen(schema)
        if not features:
            raise InputError(
                f"{path} has no column of numbers but the set's; it has {_listed(schema.names)}."
            )
        names = [feature.name for feature in features]
        for name in names:
            _check_present(name, schema.names, path)
            self._check_numbers(schema.field(name), path)
        if self.explode and not any(depth_of(schema.field(name).type) for name in names):
            raise InputError(
                f"{path} has no lists to explode: {_listed(names)} hold one number in each row. Leave "
                "out --explode, or name columns of lists."
            )
        if self.set is None or (self.set not in schema.names and self.set in partition):
            return names
        _check_present(self.set, [*schema.names, *partition], path)
        try:
            self.set_type(schema, partition)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
        return names if self.set in names else [*names, self.set]

    def _check_numbers(self, field: pa.Field, path: Path) -> None:
        depth = depth_of(field.type)
        if depth < 0 and not pa.types.is_null(field.type):
            raise InputError(
                f"column {field.name!r} of {path} is {field.type}; a feature must be a number or a list "
                "of numbers."
            )
        if depth > self._depth:
            raise InputError(
                f"column {field.name!r} of {path} is {field.type}, lists in lists. If each row "
                "is a whole set, explode it (--explode)."
            )

    def width(self, schema: pa.Schema) -> int | None:
        """How many numbers an element has; None if only the rows tell.

        Args:
            schema: the file's columns.
        """
        widths = [self._width(schema.field(f.name).type) for f in self.chosen(schema)]
        return None if None in widths else sum(width for width in widths if width is not None)

    def _width(self, kind: pa.DataType) -> int | None:
        if self.explode and depth_of(kind) > 0:
            kind = kind.value_type
        if depth_of(kind) <= 0:
            return 1
        return kind.list_size if pa.types.is_fixed_size_list(kind) else None

    def check_width(self, schema: pa.Schema, expected: int, path: Path) -> None:
        """Refuse a file whose elements are wider or narrower than the model's.

        Args:
            schema: the file's columns.
            expected: how many numbers an element of the model has.
            path: the file, for the message.
        """
        width = self.width(schema)
        if width not in (None, expected):
            names = _listed(feature.name for feature in self.chosen(schema))
            raise InputError(
                f"{path} has elements of {width} numbers ({names}); the model expects {expected}. Name "
                "the features (--features)."
            )

    def set_type(self, schema: pa.Schema, partition: Mapping[str, str]) -> pa.DataType | None:
        """The type of the sets' ids, once they are made alike; None where the file is one set.

        Args:
            schema: the file's columns, or those of a batch.
            partition: the key=value parts of its path. Their values are text, even if it is digits.
        """
        if self.set is None:
            return pa.int64() if self.explode else None
        if self.set in schema.names:
            return _id_type(self.set, schema.field(self.set).type)
        return pa.large_string()


def depth_of(kind: pa.DataType) -> int:
    """In how many lists the numbers stand; -1 if it is no numbers that stand there.

    Args:
        kind: the type of a column.

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


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists, of one length or of any.

    Args:
        kind: its type.
    """
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


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
    if pa.types.is_floating(kind) or pa.types.is_nested(kind):
        raise InputError(
            f"the set's column {name!r} is {kind}; expected integers or text. Write it as one of them."
        )
    return kind


def _check_present(name: str, names: list[str], path: Path) -> None:
    if names.count(name) == 1:
        return
    if name in names:
        raise InputError(f"{path} has several columns {name!r}; give them names of their own.")
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise InputError(f"{path} has no column {name!r}.{meant} It has {_listed(names)}.")


def _listed(names: Iterable[str], most: int = 20) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more if names else "no columns"
