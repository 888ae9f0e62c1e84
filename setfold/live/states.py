"""The states of a model as rows of a database, each with a checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import islice

import pyarrow as pa
import torch

from setfold.core.encoder import StreamingSetEncoder
from setfold.core.state_files import check_field
from setfold.errors import StoreError
from setfold.files.partials import digest_of_schema
from setfold.files.tables.packing import pack, pack_parts, unpack, unpack_parts
from setfold.files.tables.sparse import Rows, from_columns, num_slots
from setfold.files.tables.table import StateTable
from setfold.live.database import StateRow

BUCKET_BYTES = 8
SIGN = 1 << 63
CHECKSUM_BYTES = 8
KEYS = pa.large_binary()
DAMAGED = (
    "the state of a set is damaged: its checksum differs. Run setfold live verify, and restore a "
    "backup."
)


def join_key(name: bytes, bucket: int) -> bytes:
    """Return the key of a set in a bucket: keys compare as (name, bucket) do.

    It is what `setfold.files.ids.pack` makes of the columns of a set id and a bucket.

    >>> split_key(join_key(b"ann", -3))
    (b'ann', -3)
    """
    return name + (bucket + SIGN).to_bytes(BUCKET_BYTES, "big")


def split_key(key: bytes) -> tuple[bytes, int]:
    """Return the name of the set and the bucket of a key."""
    return key[:-BUCKET_BYTES], bucket_of_key(key)


def bucket_of_key(key: bytes) -> int:
    """Return the bucket of a key."""
    return int.from_bytes(key[-BUCKET_BYTES:], "big") - SIGN


class StateCodec:
    """Converts tables of states to rows and back.

    Args:
        encoder: The encoder of the states, in evaluation mode.

    Attributes:
        digest: The digest of what shapes states: weights, slots, aggregates. A head does not.

    >>> import setfold
    >>> codec = StateCodec(setfold.Pool(2, "mean").eval())
    >>> keys = pa.array([join_key(b"ann", 0)], KEYS)
    >>> rows = codec.to_rows(StateTable.of(codec.encoder, keys, torch.ones(1, 2)))
    >>> rows[0].name, rows[0].count, codec.to_table(rows).count.tolist()
    (b'ann', 1, [1])
    """

    def __init__(self, encoder: StreamingSetEncoder) -> None:
        self.encoder = encoder
        empty = StateTable.of_state(pa.array([], KEYS), encoder.initial_state(0).to("cpu"))
        self.shared, self.empty = empty.shared, empty.rows
        schema = empty.to_arrow().schema
        self.digest = digest_of_schema(schema)
        self.schema = schema.remove_metadata()
        # Without lists of slots, tensors become bytes directly, which takes half of the time.
        self.is_plain = all(num_slots(field) is None for field in self.shared.fields.values())

    def to_rows(self, table: StateTable) -> list[StateRow]:
        """Return the rows of a table whose sets are keys."""
        keys, counts, states = table.sets.to_pylist(), table.count.tolist(), [*self._pack(table)]
        checksums = self._checksums(keys, counts, states)
        names, buckets = [key[:-BUCKET_BYTES] for key in keys], map(bucket_of_key, keys)
        return list(map(StateRow, names, buckets, counts, checksums, states))

    def _pack(self, table: StateTable) -> Iterable[bytes]:
        if self.is_plain:
            return pack_parts([part for name in table.fields for part in table.rows[name].parts])
        return pack(table.to_arrow().columns[1:-1])  # between set and count

    def to_table(self, rows: Sequence[StateRow]) -> StateTable:
        """Return the table of some rows.

        Raises:
            StoreError: A row is damaged.
        """
        names, buckets, counts, checksums, states = zip(*rows, strict=True) if rows else [()] * 5
        keys = list(map(join_key, names, buckets))
        if self._checksums(keys, counts, states) != list(checksums):
            raise StoreError(DAMAGED)
        sets, count = pa.array(keys, KEYS), torch.tensor(counts, dtype=torch.int64)
        parts = self._unpack(states) if self.is_plain else self._unpack_lists(sets, count, states)
        return StateTable(sets, self.shared, count, parts)

    def _unpack(self, states: Sequence[bytes]) -> dict[str, Rows]:
        like = [part for name in self.shared.fields for part in self.empty[name].parts]
        parts, places = iter(unpack_parts(states, like)), torch.arange(len(states))
        found = {}
        for name, field in self.shared.fields.items():
            own = tuple(islice(parts, len(field.statistic.empty)))
            check_field(name, field, own, len(states))
            found[name] = Rows(places, own)
        return found

    def _unpack_lists(
        self, sets: pa.Array, count: torch.Tensor, states: Sequence[bytes]
    ) -> dict[str, Rows]:
        columns = unpack(states, self.schema.types[1:-1])
        arrow = pa.table([sets, *columns, count.numpy()], schema=self.schema)
        fields = self.shared.fields.items()
        return {name: from_columns(name, field, arrow) for name, field in fields}

    def check(self, rows: Sequence[StateRow]) -> None:
        """Raise StoreError if a row is damaged."""
        if self.find_damaged(rows):
            raise StoreError(DAMAGED)

    def find_damaged(self, rows: Sequence[StateRow]) -> list[StateRow]:
        """Return the rows whose checksum differs."""
        keys = [join_key(row.name, row.bucket) for row in rows]
        counts, states = [row.count for row in rows], [row.state for row in rows]
        found = self._checksums(keys, counts, states)
        return [row for row, own in zip(rows, found, strict=True) if row.checksum != own]

    def _checksums(
        self, keys: Sequence[bytes], counts: Sequence[int], states: Sequence[bytes]
    ) -> list[bytes]:
        join, digest, blake2b = b"".join, self.digest, hashlib.blake2b
        return [
            blake2b(
                join((digest, b"%d %d " % (len(key), count), key, state)),
                digest_size=CHECKSUM_BYTES,
            ).digest()
            for key, count, state in zip(keys, counts, states, strict=True)
        ]
