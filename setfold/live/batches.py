"""Batches of rows, and what became of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from setfold.errors import BatchConflictError, InputError
from setfold.files.columns import ColumnSpec
from setfold.files.kinds import Frame
from setfold.live.contents import ContentDigest
from setfold.live.times import ONLY_BUCKET, buckets_of, usable_times

BUCKET = "setfold.bucket"  # a column that is added to the rows
PART_BYTES = 1000  # of a text in an identity: an index of PostgreSQL takes 2,700 in all
SMALL_ROWS = 1 << 16  # batches up to this size are kept in memory, and applied together


class Identity(NamedTuple):
    """The identity of a batch: batches with the same identity count once.

    Attributes:
        source: Where it comes from, such as the name of a topic.
        key: Which batch of the source it is.
    """

    source: str
    key: str

    @classmethod
    def of(cls, batch: object) -> Identity:
        """Return the identity that a user passes, such as ("orders", 17).

        Raises:
            InputError: It is not a source, a text, with one or more texts or integers.

        >>> Identity.of(("orders", 3, 17))
        Identity(source='orders', key='3:17')
        """
        parts = list(batch) if isinstance(batch, tuple | list) else []
        named = len(parts) > 1 and isinstance(parts[0], str)
        if not named or not all(type(part) in (int, str) and part != "" for part in parts):
            raise InputError(
                "batch must be a source and what identifies a batch of it, such as "
                f"('orders', 17) or ('clicks', partition, offset); got {_shown(batch)}."
            )
        for part in parts:
            check_part(part)
        # "1:2" and ("1", "2") must differ.
        key = ":".join(str(part).replace("\\", "\\\\").replace(":", "\\:") for part in parts[1:])
        return cls(parts[0], key)


def check_part(part: str | int) -> None:
    """Raise InputError unless every database can hold a part of the identity of a batch.

    >>> check_part("orders")
    >>> check_part(2**64)
    Traceback (most recent call last):
    setfold.errors.InputError: an integer in the identity of a batch must have at most 64 bits.
    """
    if isinstance(part, int):
        if part.bit_length() > 64:
            raise InputError("an integer in the identity of a batch must have at most 64 bits.")
        return
    try:
        length = len(part.encode())
    except UnicodeEncodeError:  # half of a pair of surrogates
        length = -1
    if "\0" in part or not 0 <= length <= PART_BYTES:
        raise InputError(
            f"a text in the identity of a batch must be UTF-8 of at most {PART_BYTES:,} bytes, "
            f"without the character NUL; got {part!r:.80}."
        )


def _shown(batch: object) -> str:
    try:
        return f"{batch!r:.80}"
    except ValueError:  # an integer of thousands of digits
        return type(batch).__name__


class Offsets(NamedTuple):
    """The identity of a batch of a source whose records are numbered: which of them it holds.

    The store notes the number after the last one, together with the states, and takes a batch only
    if it continues there. So no list of batches grows. `LiveSets.positions` returns where to go on.

    Attributes:
        source: Where the batch comes from, such as the name of a topic.
        ranges: For each part of the source, such as a partition of the topic: the number of the
            first record, and the number after the last.

    >>> Offsets("clicks", {0: (120, 180)}).ranges[0]
    (120, 180)
    """

    source: str
    ranges: Mapping[int | str, tuple[int, int]]

    def check(self) -> Offsets:
        """Return the same, with texts for the parts.

        Raises:
            InputError: The source is no text, or a range is not a range.
        """
        Identity.of((self.source, *self.ranges) if self.ranges else (self.source, 0))
        if not self.ranges or not isinstance(self.ranges, Mapping):
            raise InputError(
                f"the offsets of a batch of {self.source} must be a range for each part, such as "
                f"{{0: (120, 180)}}; got {_shown(self.ranges)}."
            )
        for part, own in self.ranges.items():
            if not _is_range(own):
                raise InputError(
                    f"the offsets of part {part} of {self.source} must be the first one and the one "
                    f"after the last, below 2**63; got {_shown(own)}."
                )
        ranges: dict[int | str, tuple[int, int]] = {
            str(part): own for part, own in self.ranges.items()
        }
        if len(ranges) < len(self.ranges):
            raise InputError(f"a part of {self.source} has two ranges, as number and as text.")
        return Offsets(self.source, ranges)

    def is_known(self, positions: Mapping[str, int]) -> bool:
        """Whether a batch was applied before.

        Args:
            positions: For each part, the first offset that was not applied yet.

        Raises:
            BatchConflictError: The batch does not begin where the store goes on.
        """
        known = []
        for part, (first, after) in self.ranges.items():
            position = positions.get(str(part), first)
            known.append(position >= after)
            if position not in (first, after) and position < after:
                raise self.conflict(str(part), position)
        if any(known) and not all(known):
            part = next(part for part, is_known in zip(self.ranges, known, strict=True) if is_known)
            raise self.conflict(str(part), positions[str(part)])
        return all(known)

    def conflict(self, part: str, position: int) -> BatchConflictError:
        """Return the error about a batch that does not begin where the store goes on."""
        first, after = {str(name): own for name, own in self.ranges.items()}[part]
        return BatchConflictError(
            f"the store continues part {part} of {self.source} at {position}; got {first} to "
            f"{after - 1}. Another process may have read it: continue at the stored position."
        )


def _is_range(own: object) -> bool:
    """Whether offsets are the first one and the one after the last."""
    pair = own if isinstance(own, tuple | list) and len(own) == 2 else (1, 0)
    return all(type(each) is int for each in pair) and 0 <= pair[0] < pair[1] < 2**63


class Applied(NamedTuple):
    """What became of a batch.

    Attributes:
        status: "applied", or "duplicate" if it was applied before.
        rows: The number of rows that count now.
        sets: The number of sets that they belong to.
        late: The number of rows that were dropped, because their bucket has expired.
        deleted: The number of rows that were dropped, because their set was deleted after them.
        skipped: The number of bad rows that were skipped, if `skip_errors` was set.
    """

    status: Literal["applied", "duplicate"]
    rows: int = 0
    sets: int = 0
    late: int = 0
    deleted: int = 0
    skipped: int = 0


DUPLICATE = Applied("duplicate")


@dataclass(frozen=True)
class Layout:
    """How rows are read: the columns of the set id, of the features, and of the time.

    Args:
        columns: The columns that a user asks for.
        time: The column of the time; None for a store without buckets.
        bucket: The size of a bucket in microseconds; None for a store without buckets.
        skip: Whether bad rows are skipped.
    """

    columns: ColumnSpec
    time: str | None
    bucket: int | None
    skip: bool = False

    def __post_init__(self) -> None:
        if not self.columns.set_names:
            raise InputError(
                "expected the column with the set id of each row. Pass its name as set."
            )
        if self.bucket is not None and self.time is None:
            raise InputError(
                "the store keeps buckets of time: pass the column with the time of each row as time.",
                command="the store keeps buckets of time: pass the column with the time of each row "
                "as --time.",
            )
        if self.bucket is None and self.time is not None:
            raise InputError(
                f"the store has no buckets, so the time {self.time!r} has no use. Omit it, or create "
                "a store with buckets."
            )

    def keyed(self, *, parsed: bool) -> ColumnSpec:
        """Return the columns of the rows with their buckets, which are part of the set id.

        Args:
            parsed: Whether the model reads its own columns.
        """
        columns = replace(self.columns, set=(*self.columns.set_names, BUCKET))
        if parsed:  # the features are for the other models
            return replace(columns, features=None, excluded=())
        if self.time is None or columns.features is not None:
            return columns
        return replace(columns, excluded=(*columns.excluded, self.time))

    def with_buckets(self, batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
        """Return rows with the column of their buckets.

        Args:
            batch: The rows.
            first: The number of the first one, for messages.
        """
        if self.time is None or self.bucket is None:
            buckets = pa.repeat(pa.scalar(ONLY_BUCKET, pa.int64()), batch.num_rows)
        else:
            buckets = buckets_of(batch[self.time], self.bucket, self.time, first)
        return batch.append_column(BUCKET, buckets)

    def usable(self, batch: pa.RecordBatch) -> np.ndarray:
        """Return which rows have a set id and a time, (N,)."""
        found = np.ones(batch.num_rows, bool)
        for name in self.columns.set_names:
            found &= batch[name].is_valid().to_numpy(zero_copy_only=False)
        if self.time is not None:
            found &= usable_times(batch[self.time], self.time)
        return found


@dataclass(frozen=True)
class Batch:
    """A small batch, in memory.

    Args:
        identity: Its identity.
        digest: A digest of its rows.
        layout: How the rows are read.
        rows: The rows, with their buckets.
        skipped: The number of rows that were skipped.
    """

    identity: Identity | Offsets
    digest: bytes
    layout: Layout
    rows: pa.RecordBatch
    skipped: int = 0


@dataclass
class RowReader:
    """Reads the rows of a frame once, with their buckets, and digests them on the way.

    Args:
        frame: The rows.
        names: The columns to read.
        layout: How they are read.
    """

    frame: Frame
    names: list[str]
    layout: Layout
    first: int = 0
    skipped: int = 0
    digest: ContentDigest = field(init=False)

    def __post_init__(self) -> None:
        columns = [self.frame.schema.field(name) for name in self.names]
        self.digest = ContentDigest(pa.schema(columns))

    def __iter__(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield rows, and the number of the first of them."""
        for batch in self.frame.batches(self.names):
            self.digest.add(batch)
            read = batch.num_rows
            if self.layout.skip and not (usable := self.layout.usable(batch)).all():
                batch = batch.filter(pa.array(usable))
                self.skipped += read - batch.num_rows
            yield self.layout.with_buckets(batch, self.first), self.first
            self.first += read
