"""Small batches with the same columns are digested, admitted and absorbed together.

The work on a batch of one row is mostly that of a call; so many of them take one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from setfold.files.columns import ColumnSpec
from setfold.live.absorb import judge, names_of, needed_columns
from setfold.live.batches import Applied, Batch, Identity, Layout
from setfold.live.contents import digests_of
from setfold.live.database import Transaction
from setfold.live.models import LiveModel


@dataclass(frozen=True)
class Bundle:
    """Rows of several small batches with the same columns, one batch after the other.

    Args:
        rows: All rows.
        lengths: The number of rows of each batch.
        batches: The identity of each batch, as for `LiveSets.update`.
        set: The column that holds the set id of each row, or several.
        features: The columns to encode, as for `LiveSets.update`.
        time: The column that holds the time of each row.
    """

    rows: pa.RecordBatch
    lengths: Sequence[int]
    batches: Sequence[Sequence[str | int]]
    set: str | Sequence[str]
    features: str | Sequence[str] | None = None
    time: str | None = None

    def split(self) -> list[Bundle]:
        """Return each batch as a bundle of its own."""
        ends = pairwise(accumulate(self.lengths, initial=0))
        own = (self.rows.slice(start, end - start) for start, end in ends)
        more = (self.set, self.features, self.time)
        return [
            Bundle(rows, [length], [batch], *more)
            for rows, length, batch in zip(own, self.lengths, self.batches, strict=True)
        ]


def prepare(bundle: Bundle, layout: Layout, models: Sequence[LiveModel]) -> list[Batch]:
    """Return the batches of a bundle, each with its digest.

    Raises:
        InputError: A column is missing or has the wrong type, an identity is no identity, or a row
            of any batch has a bad time.
    """
    identities = [Identity.of(batch) for batch in bundle.batches]
    rows = bundle.rows.select(needed_columns(models, layout, bundle.rows.schema))
    digests = digests_of(rows, bundle.lengths)
    keyed, types = layout.with_buckets(rows, 0), types_of(layout.columns, rows.schema)
    starts = accumulate(bundle.lengths, initial=0)
    return [
        Batch(identity, digest, layout, keyed.slice(start, length), types)
        for identity, digest, start, length in zip(
            identities, digests, starts, bundle.lengths, strict=False
        )
    ]


class Admission(NamedTuple):
    """Rows of several batches that count, and what becomes of each batch, by its number."""

    rows: pa.RecordBatch
    layout: Layout
    applied: dict[int, Applied]


def admit_all(batches: dict[int, Batch], view: Transaction, horizon: int | None) -> list[Admission]:
    """Drop rows that must not count, as `admit` does; batches with the same columns in one call.

    Args:
        batches: Small batches that are new, by their numbers.
        view: A view of the store.
        horizon: The first bucket that has not expired; None if none has.
    """
    groups: dict[tuple[Layout, pa.Schema], list[int]] = {}
    for number, batch in batches.items():
        groups.setdefault((batch.layout, batch.rows.schema), []).append(number)
    found = []
    for (layout, _), numbers in groups.items():
        parts = [batches[number].rows for number in numbers]
        rows = pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
        keep, late = judge(rows, layout, view, horizon)
        sets = names_of(rows, layout).to_numpy(zero_copy_only=False)
        applied, start = {}, 0
        for number, part in zip(numbers, parts, strict=True):
            own = slice(start, start := start + part.num_rows)
            applied[number] = _count(keep[own], late[own], sets[own])
        left = rows if keep.all() else rows.filter(pa.array(keep))
        found.append(Admission(left, layout, applied))
    return found


def _count(keep: np.ndarray, late: np.ndarray, sets: np.ndarray) -> Applied:
    """Return what becomes of a batch."""
    if len(keep) == 1 and keep[0]:
        return Applied("applied", 1, 1)
    rows, dropped = int(keep.sum()), int(late.sum())
    return Applied("applied", rows, len({*sets[keep]}), dropped, len(keep) - rows - dropped)


def types_of(columns: ColumnSpec, schema: pa.Schema) -> tuple[str, ...]:
    """Return the types of the columns of a set id, as the store keeps them."""
    return tuple(str(columns.column_type(name, schema)) for name in columns.set_names)
