"""The states of a model as rows of a database, each with a checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import pyarrow as pa
import torch

from setfold.core.encoder import StreamingSetEncoder
from setfold.errors import StoreError
from setfold.files.partials import digest_of_schema
from setfold.files.tables.packing import pack, unpack
from setfold.files.tables.sparse import from_columns
from setfold.files.tables.table import StateTable
from setfold.live.database import StateRow

BUCKET_BYTES = 8
SIGN = 1 << 63
CHECKSUM_BYTES = 8
KEYS = pa.large_binary()


def join_key(name: bytes, bucket: int) -> bytes:
    """Return the key of a set in a bucket: keys compare as (name, bucket) do.

    It is what `setfold.files.ids.pack` makes of the columns of a set id and a bucket.

    >>> split_key(join_key(b"ann", -3))
    (b'ann', -3)
    """
    return name + (bucket + SIGN).to_bytes(BUCKET_BYTES, "big")


def split_key(key: bytes) -> tuple[bytes, int]:
    """Return the name of the set and the bucket of a key."""
    return key[:-BUCKET_BYTES], int.from_bytes(key[-BUCKET_BYTES:], "big") - SIGN


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
        self.shared = empty.shared
        schema = empty.to_arrow().schema
        self.digest = digest_of_schema(schema)
        self.schema = schema.remove_metadata()

    def to_rows(self, table: StateTable) -> list[StateRow]:
        """Return the rows of a table whose sets are keys."""
        columns = table.to_arrow().columns  # set, statistics, count
        states, counts = pack(columns[1:-1]), table.count.tolist()
        found = []
        for key, count, state in zip(columns[0].to_pylist(), counts, states, strict=True):
            checksum = self._checksum(key, count, state)
            found.append(StateRow(*split_key(key), count, checksum, state))
        return found

    def to_table(self, rows: Sequence[StateRow]) -> StateTable:
        """Return the table of some rows.

        Raises:
            StoreError: A row is damaged.
        """
        keys = [join_key(row.name, row.bucket) for row in rows]
        for key, row in zip(keys, rows, strict=True):
            if self._checksum(key, row.count, row.state) != row.checksum:
                raise StoreError(
                    "the state of a set is damaged: its checksum differs. Run setfold live verify, "
                    "and restore a backup."
                )
        columns = unpack([row.state for row in rows], self.schema.types[1:-1])
        counts = [row.count for row in rows]
        arrow = pa.table([pa.array(keys, KEYS), *columns, counts], schema=self.schema)
        fields = self.shared.fields
        parts = {name: from_columns(name, field, arrow) for name, field in fields.items()}
        count = torch.tensor(counts, dtype=torch.int64)
        return StateTable(pa.array(keys, KEYS), self.shared, count, parts)

    def find_damaged(self, rows: Iterable[StateRow]) -> list[StateRow]:
        """Return the rows whose checksum differs."""
        return [
            row
            for row in rows
            if self._checksum(join_key(row.name, row.bucket), row.count, row.state) != row.checksum
        ]

    def _checksum(self, key: bytes, count: int, state: bytes) -> bytes:
        head = b"%d %d " % (len(key), count)
        return hashlib.blake2b(
            b"".join((self.digest, head, key, state)), digest_size=CHECKSUM_BYTES
        ).digest()
