"""The states of a database joined with others, and with some elements removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
import pyarrow as pa
import torch

from setfold.core.statistic import clear, remove
from setfold.errors import InputError
from setfold.files.tables.table import StateTable, merged, merged_at
from setfold.live.absorb import check_states
from setfold.live.database import StateRow, Transaction
from setfold.live.models import LiveModel
from setfold.live.states import KEYS, split_key

AT_ONCE = 4096  # states that are read or changed at a time
READ_BYTES = 1 << 25  # of states that are read at a time


def states_at_once(model: LiveModel) -> int:
    """Return how many states of a model are read at a time."""
    return max(16, min(AT_ONCE, READ_BYTES // model.state_nbytes))


def write_states(transaction: Transaction, model: LiveModel, tables: Iterable[StateTable]) -> None:
    """Merge tables of states, sorted by key, into the states of a model.

    Raises:
        NonFiniteError: The state of a set overflows.
    """
    for table in tables:
        keys = [split_key(key) for key in table.sets.to_pylist()]
        rows = transaction.fetch(model.number, keys)
        if rows:
            number_of = {key: number for number, key in enumerate(keys)}
            places = torch.tensor([number_of[row[:2]] for row in rows])
            table = check_states(merged_at(table, model.codec.to_table(rows), places))
        transaction.put(model.number, model.codec.to_rows(table))


def check_removable(model: LiveModel) -> None:
    """Raise NotRemovableError if elements cannot be removed from the states of a model."""
    empty = model.codec.shared
    remove(empty.fields, empty.statistics, empty.statistics)


def subtract_states(
    transaction: Transaction,
    model: LiveModel,
    tables: Iterable[StateTable],
    show: Callable[[bytes], str],
    emptied: set[bytes] | None,
) -> set[bytes]:
    """Remove the elements of tables of states, sorted by key, from the states of a model.

    A set that has no element left is exactly empty, and is removed. In a model that was not filled
    completely yet, the elements that are removed may be others than those that it has seen. What
    is left is needed then, even if it has as many elements as none.

    Args:
        transaction: The transaction.
        model: The model.
        tables: The states of the elements.
        show: Returns the name of a set as text.
        emptied: The keys that are empty in the active model; None if this is the active one.

    Returns:
        The keys that are empty now.

    Raises:
        InputError: A set has fewer elements.
    """
    empty: set[bytes] = set()
    for table in _slices(tables):
        keys = table.sets.to_pylist()
        rows = transaction.fetch(model.number, [split_key(key) for key in keys])
        if len(rows) < len(keys):
            have = {(row.name, row.bucket) for row in rows}
            lacking = next(key for key in keys if split_key(key) not in have)
            raise _lacking_error(model, show(split_key(lacking)[0]), 0)
        old, less = model.codec.to_table(rows).state, table.state
        count = old.count - less.count
        if bool((count < 0).any()):
            place = int(count.argmin())
            raise _lacking_error(model, show(rows[place].name), rows[place].count)
        none = {key for key, left in zip(keys, count.tolist(), strict=True) if not left}
        gone = none if emptied is None else none & emptied
        where = torch.tensor([key in gone for key in keys])
        left = clear(old.fields, remove(old.fields, old.statistics, less.statistics), where)
        new = check_states(StateTable.of_state(table.sets, old.with_statistics(left, count)))
        kept = np.flatnonzero(~where.numpy())
        if len(kept):
            transaction.put(model.number, model.codec.to_rows(new.take(kept)))
        transaction.drop(model.number, [split_key(key) for key in keys if key in gone])
        empty |= gone
    return empty


def _slices(tables: Iterable[StateTable]) -> Iterator[StateTable]:
    for table in tables:
        for start in range(0, len(table), AT_ONCE):
            yield table.take(np.arange(start, min(start + AT_ONCE, len(table))))


def _lacking_error(model: LiveModel, name: str, count: int) -> InputError:
    advice = "Remove only what was added."
    if not model.row.active:
        advice = f"Model {model.number} may not be filled yet: fill it first, or drop it."
    return InputError(
        f"cannot remove more elements than a set has: the set {name} has {count} (in this bucket "
        f"of time, if the store has buckets). {advice}"
    )


def table_of_sets(model: LiveModel, rows: Sequence[StateRow]) -> StateTable:
    """Return the states of sets, merged over their buckets; the rows of a set are consecutive."""
    layers: list[list[StateRow]] = []  # each lists a set once
    for _, own in groupby(rows, key=lambda row: row.name):
        for number, row in enumerate(own):
            if number == len(layers):
                layers.append([])
            layers[number].append(row)
    tables = []
    for layer in layers:
        table = model.codec.to_table(layer)
        table.sets = pa.array([row.name for row in layer], KEYS)
        tables.append(table)
    return merged(tables)


def tables_of_all(view: Transaction, model: LiveModel, since: int | None) -> Iterator[StateTable]:
    """Yield the states of all sets, merged over their buckets, sorted by name."""
    pending: list[StateRow] = []
    size = states_at_once(model)
    for rows in view.scan(model.number, since, size):
        whole = len(pending) if len(pending) >= size else 0
        while whole and pending[whole - 1].name == pending[-1].name:
            whole -= 1  # not the last set: some of its buckets may be among the rows that follow
        if whole:
            yield table_of_sets(model, pending[:whole])
            pending = pending[whole:]
        pending += rows
    if pending:
        yield table_of_sets(model, pending)
