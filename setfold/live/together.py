"""Small batches with the same columns are digested, admitted and absorbed together.

The work on a batch of one row is mostly that of a call; so many of them take one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import pyarrow as pa

from setfold.files.request import make_columns
from setfold.live.absorb import judge, names_of, needed_columns
from setfold.live.batches import Applied, Batch, Identity, Layout
from setfold.live.commit import GroupCommit
from setfold.live.contents import digests_of
from setfold.live.database import Transaction
from setfold.live.models import LiveModel
from setfold.live.opened import OpenStore
from setfold.live.retry import repeated

TOGETHER_BYTES = 1 << 16  # batches up to this size are absorbed together


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


class Bundling(OpenStore):
    """The part of `LiveSets` that takes many small batches at once."""

    group: GroupCommit[Batch, Applied]

    def update_many(self, bundles: Sequence[Bundle]) -> list[list[Applied | BaseException]]:
        """Apply many small batches in one transaction; those that fail do not affect the others.

        Returns:
            For each batch of each bundle what `update` returns, or the error that it raises.
        """
        models = repeated(self._current_models)
        prepared = [self._unbundle(bundle, models) for bundle in bundles]
        batches = [batch for own in prepared for batch in own if isinstance(batch, Batch)]
        results = iter(self.group.submit_all(batches))
        return [
            [next(results) if isinstance(batch, Batch) else batch for batch in own]
            for own in prepared
        ]

    def _unbundle(self, bundle: Bundle, models: Sequence[LiveModel]) -> list[Batch | Exception]:
        """Return the batches of a bundle, or for each that cannot be read why."""
        try:
            columns = make_columns(bundle.set, bundle.features, False, None)
            return [*prepare(bundle, Layout(columns, bundle.time, self.bucket), models)]
        except Exception as error:  # it is not known of which batch
            if len(bundle.lengths) == 1:
                return [error]
        return [batch for one in bundle.split() for batch in self._unbundle(one, models)]


def prepare(bundle: Bundle, layout: Layout, models: Sequence[LiveModel]) -> list[Batch]:
    """Return the batches of a bundle, each with its digest.

    Raises:
        InputError: A column is missing or has the wrong type, an identity is no identity, or a row
            of any batch has a bad time.
    """
    identities = [Identity.of(batch) for batch in bundle.batches]
    rows = bundle.rows.select(needed_columns(models, layout, bundle.rows.schema))
    digests = digests_of(rows, bundle.lengths)
    keyed = layout.with_buckets(rows, 0)
    starts = accumulate(bundle.lengths, initial=0)
    return [
        Batch(identity, digest, layout, keyed.slice(start, length))
        for identity, digest, start, length in zip(
            identities, digests, starts, bundle.lengths, strict=False
        )
    ]


class Admission(NamedTuple):
    """Rows of several batches that count, one batch after the other.

    Attributes:
        rows: The rows.
        layout: How they are read.
        counts: How many of them are of each batch, by its number, and how many do not count.
    """

    rows: pa.RecordBatch
    layout: Layout
    counts: dict[int, Applied]

    def applied(self, left: pa.RecordBatch) -> dict[int, Applied]:
        """Return what becomes of each batch.

        Args:
            left: The rows without bad ones. Batches whose bad rows are skipped are alone.
        """
        columns, bad = self.layout.columns.set_names, self.rows.num_rows - left.num_rows
        names = left[columns[0]] if len(columns) == 1 else names_of(left, self.layout)
        names = names.to_pylist()  # of a single column as they are: equal ids have equal values
        found, start = {}, 0
        for number, one in self.counts.items():
            own = names[start : (start := start + one.rows - bad)]
            found[number] = one._replace(rows=len(own), sets=len({*own}), skipped=one.skipped + bad)
        return found


def admit_all(batches: dict[int, Batch], view: Transaction, horizon: int | None) -> list[Admission]:
    """Drop rows that must not count, as `admit` does; batches with the same columns in one call.

    Args:
        batches: Small batches that are new, by their numbers.
        view: A view of the store.
        horizon: The first bucket that has not expired; None if none has.
    """
    groups: dict[tuple[Layout, pa.Schema, int | None], dict[int, Batch]] = {}
    for number, batch in batches.items():
        is_alone = batch.layout.skip or batch.rows.nbytes > TOGETHER_BYTES
        key = (batch.layout, batch.rows.schema, number if is_alone else None)
        groups.setdefault(key, {})[number] = batch
    found = []
    for (layout, _, _), group in groups.items():
        rows = _joined([batch.rows for batch in group.values()])
        keep, late = judge(rows, layout, view, horizon)
        counts, start = {}, 0
        for number, batch in group.items():
            own = slice(start, start := start + batch.rows.num_rows)
            left, dropped = int(keep[own].sum()), int(late[own].sum())
            deleted = batch.rows.num_rows - left - dropped
            counts[number] = Applied("applied", left, 0, dropped, deleted, batch.skipped)
        found.append(Admission(rows if keep.all() else rows.filter(pa.array(keep)), layout, counts))
    return found


def _joined(parts: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    if len(parts) == 1:
        return parts[0]
    joined = pa.Table.from_batches(parts).combine_chunks().to_batches()
    return joined[0] if joined else parts[0]  # no rows at all
