"""Batches of rows, and what became of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import pyarrow as pa

from setfold.errors import InputError
from setfold.files.columns import ColumnSpec
from setfold.files.kinds import Frame
from setfold.live.contents import ContentDigest
from setfold.live.times import ONLY_BUCKET, buckets_of

BUCKET = "setfold.bucket"  # a column that is added to the rows
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
                f"('orders', 17) or ('clicks', partition, offset); got {batch!r:.80}."
            )
        if any("\0" in text or not _is_utf8(text) for text in parts if isinstance(text, str)):
            raise InputError(
                "the identity of a batch must be text that UTF-8 can hold, without the character "
                f"NUL; got {batch!r:.80}."
            )
        # "1:2" and ("1", "2") must differ.
        key = ":".join(str(part).replace("\\", "\\\\").replace(":", "\\:") for part in parts[1:])
        return cls(parts[0], key)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False
    return True


class Applied(NamedTuple):
    """What became of a batch.

    Attributes:
        status: "applied", or "duplicate" if it was applied before.
        rows: The number of rows that count now.
        sets: The number of sets that they belong to.
        late: The number of rows that were dropped, because their bucket has expired.
        deleted: The number of rows that were dropped, because their set was deleted after them.
    """

    status: Literal["applied", "duplicate"]
    rows: int = 0
    sets: int = 0
    late: int = 0
    deleted: int = 0


DUPLICATE = Applied("duplicate")


@dataclass(frozen=True)
class Layout:
    """How rows are read: the columns of the set id, of the features, and of the time.

    Args:
        columns: The columns that a user asks for.
        time: The column of the time; None for a store without buckets.
        bucket: The size of a bucket in microseconds; None for a store without buckets.
    """

    columns: ColumnSpec
    time: str | None
    bucket: int | None

    def __post_init__(self) -> None:
        if not self.columns.set_names:
            raise InputError(
                "expected the column with the set id of each row. Pass its name as set."
            )
        if self.bucket is not None and self.time is None:
            raise InputError(
                "the store keeps buckets of time: pass the column with the time of each row as time."
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
        if parsed or self.time is None or columns.features is not None:
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


@dataclass(frozen=True)
class Batch:
    """A small batch, in memory.

    Args:
        identity: Its identity.
        digest: A digest of its rows.
        layout: How the rows are read.
        rows: The rows, with their buckets.
        types: The types of the columns of a set id.
    """

    identity: Identity
    digest: bytes
    layout: Layout
    rows: pa.RecordBatch
    types: tuple[str, ...]


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
    digest: ContentDigest = field(init=False)

    def __post_init__(self) -> None:
        columns = [self.frame.schema.field(name) for name in self.names]
        self.digest = ContentDigest(pa.schema(columns))

    def __iter__(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield rows, and the number of the first of them."""
        for batch in self.frame.batches(self.names):
            self.digest.add(batch)
            yield self.layout.with_buckets(batch, self.first), self.first
            self.first += batch.num_rows
