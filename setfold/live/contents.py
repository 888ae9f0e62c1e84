"""Digests of rows, by which a batch that arrives again is recognized."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

DIGEST_BYTES = 16
NAME_BYTES, VALUE_BYTES = 4, 8  # of an entry for a column
ENTRY_BYTES = NAME_BYTES + VALUE_BYTES
VALID = b"\1"  # a row whose value is not missing


class ContentDigest:
    """A digest of the rows of a table. It does not depend on how they are divided into batches.

    It has an entry for each column. So rows are recognized when a model is added that reads more
    columns than those before: see `agree`.

    Args:
        schema: The columns.

    >>> table = pa.table({"user": ["a", "b"], "x": [1.0, None]})
    >>> whole, parts = ContentDigest(table.schema), ContentDigest(table.schema)
    >>> for batch in table.to_batches():
    ...     whole.add(batch)
    >>> for batch in table.to_batches(max_chunksize=1):
    ...     parts.add(batch)
    >>> whole.result() == parts.result()
    True
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.rows = 0
        self.fields = [(field.name, _plain(field.type)) for field in schema]
        self.columns: list[list[hashlib.blake2b]] = [[] for _ in schema]

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows."""
        self.rows += batch.num_rows
        for column, hashes in zip(batch.columns, self.columns, strict=True):
            for number, content in enumerate(_contents(column)):
                if number == len(hashes):
                    hashes.append(hashlib.blake2b(digest_size=DIGEST_BYTES))
                hashes[number].update(content)

    def result(self) -> bytes:
        """Return the digest of all rows so far."""
        entries = []
        for (name, kind), hashes in zip(self.fields, self.columns, strict=True):
            value = hashlib.blake2b(repr((self.rows, kind)).encode(), digest_size=VALUE_BYTES)
            for one in hashes:
                value.update(one.digest())
            head = hashlib.blake2b(name.encode(), digest_size=NAME_BYTES).digest()
            entries.append(head + value.digest())
        return b"".join(sorted(entries))


def agree(one: bytes, other: bytes) -> bool:
    """Whether two digests are of the same rows, as far as both have read the same columns.

    >>> def digest(**columns):
    ...     batch = pa.record_batch(columns)
    ...     found = ContentDigest(batch.schema)
    ...     found.add(batch)
    ...     return found.result()
    >>> rows = {"user": ["a", "b"], "x": [1, 2]}
    >>> agree(digest(**rows), digest(**rows, y=[3, 4])), agree(digest(**rows), digest(x=[1, 3]))
    (True, False)
    """
    left, right = _entries(one), _entries(other)
    common = left.keys() & right.keys()
    return bool(common) and all(left[name] == right[name] for name in common)


def _entries(digest: bytes) -> dict[bytes, bytes]:
    parts = [digest[n : n + ENTRY_BYTES] for n in range(0, len(digest), ENTRY_BYTES)]
    return {part[:NAME_BYTES]: part[NAME_BYTES:] for part in parts}


def digests_of(rows: pa.RecordBatch, lengths: Sequence[int]) -> list[bytes]:
    """Return the digests of several batches whose rows follow one another.

    They are those that `ContentDigest` gives, in a fraction of the time if the batches are small.

    Args:
        rows: The rows of all batches.
        lengths: The number of rows of each.

    >>> rows = pa.record_batch({"user": ["a", "b", "b"], "x": [1.0, 2.0, 3.0]})
    >>> alone = ContentDigest(rows.schema)
    >>> alone.add(rows.slice(1, 2))
    >>> digests_of(rows, [1, 2])[1] == alone.result()
    True
    """
    columns = [_slices_of(column) for column in rows.columns]
    whole = ContentDigest(rows.schema)
    found = []
    for start, end in pairwise(accumulate(lengths, initial=0)):
        whole.rows = end - start
        whole.columns = [
            [hashlib.blake2b(part, digest_size=DIGEST_BYTES) for part in contents(start, end)]
            for contents in columns
        ]
        found.append(whole.result())
    return found


def _slices_of(column: pa.Array) -> Callable[[int, int], list[bytes]]:
    """Return what gives the bytes of some rows of a column, as `_contents` does."""
    kind = column.type
    if column.null_count == 0 and pa.types.is_primitive(kind):
        numbers = column.to_numpy(zero_copy_only=False)
        size, content = numbers.itemsize, numbers.tobytes()
        return lambda start, end: [VALID * (end - start), content[start * size : end * size]]
    if column.null_count == 0 and _plain(kind) == "text" and not pa.types.is_dictionary(kind):
        texts = column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()
        sizes = [len(text).to_bytes(8, sys.byteorder) for text in texts]
        return lambda start, end: [
            VALID * (end - start),
            b"".join(sizes[start:end]),
            b"".join(texts[start:end]),
        ]
    return lambda start, end: _contents(column.slice(start, end - start))


def digest_of_file(path: Path) -> bytes:
    """Return the digest of the bytes of a file, or of all files in a folder, with their names."""
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        if file != path:
            name = str(file.relative_to(path)).encode()
            whole.update(len(name).to_bytes(8, "little") + name)
            whole.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            while content := opened.read(1 << 20):
                whole.update(content)
    return whole.digest()


def _plain(kind: pa.DataType) -> str:
    """Return the type of a column as text: text and bytes have several types that mean the same."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view():
        return "text"
    if pa.types.is_nested(kind) and hasattr(kind, "value_type"):
        return f"list of {_plain(kind.value_type)}"
    return str(kind)


def _contents(array: pa.Array) -> list[bytes]:
    """Return the bytes of a column, in several streams; each grows with the rows."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if array.null_count == 0 and pa.types.is_primitive(kind):  # the most frequent case, at once
        return [VALID * len(array), array.to_numpy(zero_copy_only=False).tobytes()]
    valid = array.is_valid().to_numpy(zero_copy_only=False).tobytes()
    if pa.types.is_nested(kind) and hasattr(kind, "value_type"):
        lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
        return [valid, lengths.to_numpy().tobytes(), *_contents(pc.list_flatten(array))]
    if pa.types.is_struct(kind):
        return [valid, *(part for child in array.flatten() for part in _contents(child))]
    if pa.types.is_primitive(kind):
        return [valid, array.drop_null().to_numpy(zero_copy_only=False).tobytes()]
    is_binary = pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind)
    is_binary |= pa.types.is_large_binary(kind) or kind == pa.binary_view()
    binary = (array if is_binary else array.cast(pa.large_string())).cast(pa.large_binary())
    lengths = pc.fill_null(pc.binary_length(binary), 0).cast(pa.int64())
    return [valid, lengths.to_numpy().tobytes(), b"".join(binary.drop_null().to_pylist())]
