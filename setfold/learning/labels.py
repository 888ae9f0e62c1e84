"""Targets: read from a table of labels, or from a column of the rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from setfold.errors import InputError
from setfold.files.inputs import open_reader
from setfold.learning.sources import BATCH_ROWS, Source, text_ids
from setfold.preprocessing.columns import as_text, decoded, is_text
from setfold.preprocessing.kinds import NumberColumn
from setfold.preprocessing.targets import Classes, Quantity, Target

FEW_CLASSES = 20  # whole numbers with at most so many different values are classes
SHOWN = 5  # names in an error message


@dataclass(frozen=True)
class Labels:
    """The label of each set.

    Args:
        values: By set id: text, numbers or booleans.
        groups: By set id, if there are groups: sets that must not be split.
    """

    values: dict[str, Any]
    groups: dict[str, str] | None = None

    def of(self, names: Collection[str]) -> Labels:
        """The labels of some sets."""
        chosen = {name: value for name, value in self.values.items() if name in names}
        groups = self.groups and {name: self.groups[name] for name in chosen}
        return Labels(chosen, groups)


def read_labels(
    path: str | Path, target: str, keys: Sequence[str], group: str | None, sets: Sequence[str]
) -> Labels:
    """Read a table of labels, with one row per set.

    Args:
        path: The table.
        target: The column with the labels.
        keys: The columns of the set ids; none if sets are files. A column of text then names them,
            by path, name or name without suffix: the one that names most of them. All columns of a
            CSV file may be text, so that 007 names 007.h5.
        group: A column with groups, or None.
        sets: The ids of the sets, if they are files.

    Raises:
        InputError: A column is missing, a set has two labels, or a name or the column of names is
            ambiguous.
    """
    with open_reader(Path(path)) as reader:
        others = [name for name in reader.schema.names if name != target]
    with open_reader(Path(path), keys or others) as reader:
        names = reader.schema.names
        own = list(keys) or _text_columns(reader.schema, target, path)
        for name in (*own, target, *([group] if group else [])):
            if name not in names:
                raise InputError(f"{path} has no column {name!r}; it has {', '.join(names)}.")
        wanted = list(dict.fromkeys([*own, target, *([group] if group else [])]))
        table = pa.Table.from_batches(list(reader.read(wanted, rows=BATCH_ROWS)))
    _check_kind(target, table.schema.field(target).type)
    if keys:
        ids = text_ids(own, [_plain(table[name]) for name in own]).to_pylist()
    else:
        ids = _as_files({name: _plain(table[name]).to_pylist() for name in own}, sets, path)
    values = _plain(table[target]).to_pylist()
    groups = as_text(_plain(table[group])).to_pylist() if group else None
    found: dict[str, Any] = {}
    for name, value in zip(ids, values, strict=True):
        if name is None or _is_missing(value):
            continue
        if found.setdefault(name, value) != value:
            raise InputError(
                f"{path} has two labels for the set {name!r}: {found[name]!r} and {value!r}. Keep "
                "one row per set."
            )
    if groups is None:
        return Labels(found)
    by_set: dict[str, str] = {}
    for name, own in zip(ids, groups, strict=True):
        if name in found:
            _add_group(by_set, name, own, str(group))
    return Labels(found, by_set)


def labels_in_rows(source: Source, target: str, group: str | None) -> Labels:
    """Read labels that are constant within each set, in a column of the rows.

    Raises:
        InputError: A set has two labels.
    """
    found: dict[str, Any] = {}
    groups: dict[str, str] = {}
    columns = [target, *([group] if group else [])]
    for sets, table in source.tables(columns):
        pairs = pa.table({"set": sets, **{n: _plain(a) for n, a in table.items()}})
        _check_kind(target, pairs.schema.field(target).type)
        for row in pairs.group_by(["set", *columns]).aggregate([]).to_pylist():
            value, name = row[target], row["set"]
            if name is None or _is_missing(value):
                continue
            if found.setdefault(name, value) != value:
                raise InputError(
                    f"the set {name!r} has two labels in column {target!r}: {found[name]!r} and "
                    f"{value!r}. Labels must be constant within a set, or in a file of their own "
                    "(--labels)."
                )
            if group:
                _add_group(groups, name, row[group], group)
    return Labels(found, groups if group else None)


def target_from(name: str, values: Sequence[Any], task: str | None) -> Target:
    """Return what is to be predicted, from the labels of the training sets.

    Args:
        name: The name of the target.
        values: The labels.
        task: "classification", "multiple-instance" or "regression"; None to infer it: text,
            booleans, and whole numbers with few different values are classes.

    Raises:
        InputError: There is a single class, or the labels are not numbers.
    """
    different = {*values}
    texts = any(isinstance(value, str) for value in different)
    flags = all(isinstance(value, bool) for value in different)
    whole = all(isinstance(value, int) for value in different)
    if task is None:
        few = whole and len(different) <= FEW_CLASSES
        task = "classification" if texts or flags or few else "regression"
    if task != "regression":
        if not (flags or whole):
            different = {str(value) for value in different}
        if len(different) < 2:
            raise InputError(
                f"all sets have the same {name}, {next(iter(different), None)!r}: there is nothing "
                "to learn. Add sets of another class."
            )
        if len(different) > max(2, len(values) // 2):
            raise InputError(
                f"{name} has {len(different)} classes for {len(values)} sets. If it is a quantity, "
                "pass --task regression."
            )
        return Classes(name, sorted(different))
    if texts:
        raise InputError(f"{name} is text, so it cannot be a quantity. Omit --task regression.")
    numbers = np.array([float(value) for value in values])
    if not np.isfinite(numbers).all():
        raise InputError(f"{name} must be finite; found NaN or infinity.")
    if numbers.std() == 0:
        raise InputError(f"all sets have the same {name}, {numbers[0]}: there is nothing to learn.")
    return Quantity(name, float(numbers.mean()), float(numbers.std()))


def encode_targets(target: Target, values: Sequence[Any]) -> np.ndarray:
    """Return class numbers (int64), or quantities (float64)."""
    if isinstance(target, Quantity):
        return np.array([float(value) for value in values])
    exact = {str(label): place for place, label in enumerate(target.labels)}
    loose: dict[str, list[int]] = {}
    for place, label in enumerate(target.labels):
        loose.setdefault(_plain_text(label), []).append(place)
    found = []
    for value in values:
        alike = loose.get(_plain_text(value), [])
        known = exact.get(str(value), alike[0] if len(alike) == 1 else None)
        if known is None:
            raise InputError(
                f"{target.name} has a class that is not in the training sets: {value!r}. Expected "
                f"{', '.join(map(repr, target.labels[:SHOWN]))}"
                f"{', ...' if len(target.labels) > SHOWN else ''}."
            )
        found.append(known)
    return np.array(found, np.int64)


def _plain_text(value: Any) -> str:
    """Return a label as text that does not depend on the type in which a file keeps it.

    >>> [_plain_text(value) for value in (1, 1.0, "1", True, "true", "oak")]
    ['1.0', '1.0', '1.0', '1.0', '1.0', 'oak']
    """
    text = str(value).strip()
    if text.casefold() in ("true", "false"):
        return str(float(text.casefold() == "true"))
    try:
        return repr(float(text))
    except ValueError:
        return text


def match_labels(
    lengths: Mapping[str, int], labels: Labels, *, skip: bool
) -> tuple[list[str], int]:
    """Return the sets that have a label, sorted, and the number of sets and labels left out.

    Args:
        lengths: The number of elements of each set.
        labels: The labels.
        skip: Whether to leave out sets without a label and labels without a set.

    Raises:
        InputError: There are such, and they are not to be left out.
    """
    unlabelled = sorted(name for name in lengths if name not in labels.values)
    absent = sorted(name for name in labels.values if name not in lengths)
    for names, what in ((unlabelled, "have no label"), (absent, "have a label, but no elements")):
        if names and not skip:
            shown = ", ".join(map(repr, names[:SHOWN])) + (", ..." if len(names) > SHOWN else "")
            raise InputError(
                f"{len(names)} sets {what}: {shown}. Correct the set ids, or leave these out with "
                "--on-error skip."
            )
    kept = sorted(name for name in lengths if name in labels.values)
    if not kept:
        raise InputError("no set has a label: the set ids of rows and labels do not match.")
    return kept, len(unlabelled) + len(absent)


def _is_missing(value: Any) -> bool:
    """Whether a label is null, NaN or blank."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def _check_kind(target: str, kind: pa.DataType) -> None:
    """Raise InputError unless labels are text, numbers or booleans."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (is_text(kind) or NumberColumn("x").fits(kind)):
        raise InputError(
            f"the labels {target!r} are {kind}; expected text, numbers or booleans. Convert them."
        )


def _add_group(groups: dict[str, str], name: str, own: Any, column: str) -> None:
    """Note the group of a set.

    Raises:
        InputError: It has no group, or another one already.
    """
    if _is_missing(own):
        raise InputError(f"the set {name!r} has no group in column {column!r}.")
    if groups.setdefault(name, str(own)) != str(own):
        raise InputError(
            f"the set {name!r} is in two groups of column {column!r}: {groups[name]!r} and "
            f"{str(own)!r}. A group must contain whole sets."
        )


def _plain(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column in one piece, without a dictionary."""
    return decoded(values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values)


def _text_columns(schema: pa.Schema, target: str, path: str | Path) -> list[str]:
    kinds = {field.name: field.type for field in schema if field.name != target}
    plain = {n: k.value_type if pa.types.is_dictionary(k) else k for n, k in kinds.items()}
    found = [name for name, kind in plain.items() if is_text(kind)]
    if not found:
        raise InputError(f"{path} has no column of text that could name the files.")
    return found


def _as_files(
    columns: Mapping[str, Sequence[str | None]], sets: Sequence[str], path: str | Path
) -> list[str]:
    """Return the files that a column names: by path, by name, or by name without suffix.

    Args:
        columns: Columns that may name the files. A table of slides often has patients, too.
        sets: The paths of the files.
        path: The table.
    """
    exact, plain, short = defaultdict(list), defaultdict(list), defaultdict(list)  # by name
    for file in sets:
        full = Path(file)
        for name in {full.as_posix(), full.name}:
            exact[name].append(file)
        for name in {full.stem, Path(full.name.removesuffix(".gz")).stem}:
            plain[name].append(file)
        short[full.name.split(".")[0]].append(file)
    folder = Path(path).resolve().parent

    @cache
    def candidates(name: str | None) -> list[str]:
        if not name or "\0" in name:  # no path has it
            return []
        paths = (name, (folder / name).resolve().as_posix(), Path(name).resolve().as_posix())
        found = (exact.get(one) for one in paths)
        return next(filter(None, (*found, plain.get(name), short.get(name))), [])

    def count(column: str) -> tuple[int, int]:
        """Return how many files a column names alone, and how many it may name."""
        found = [candidates(name) for name in {*columns[column]}]
        alone = {files[0] for files in found if len(files) == 1}
        return len(alone), len({file for files in found for file in files})

    counts = {column: count(column) for column in columns}
    best = max(counts, key=lambda column: counts[column])
    for other in columns if any(counts[best]) else ():
        pairs = zip(columns[best], columns[other], strict=True)
        if counts[other] == counts[best] and any(candidates(a) != candidates(b) for a, b in pairs):
            raise InputError(
                f"the columns {best!r} and {other!r} of {path} name the same files, in different "
                "rows. Leave out the column that does not name the file of each row."
            )
    found = list[str]()
    for own in columns[best]:
        if own is None:
            raise InputError(f"{path} has a row without the name of a file.")
        files = candidates(own) or [own]
        if len(files) > 1:
            raise InputError(f"{own!r} in {path} may be {files[0]} or {files[1]}. Write the path.")
        found.append(files[0])
    return found
