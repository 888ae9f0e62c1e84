"""Messages of Arrow files and streams: what their metadata says before anything is decompressed.

Arrow allocates what a compressed buffer declares as its size, and does not tell it beforehand. The
metadata of a message, and the footer of a file, are flatbuffers, whose few fields are read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa

FOOTER_END = struct.Struct("<i6s")  # length of the footer, magic
BLOCK = struct.Struct("<qi4xq")  # of a footer: position, length of the metadata, of the body


class _Table:
    """A table of a flatbuffer.

    Args:
        data: The flatbuffer.
        place: The position of the table.
    """

    def __init__(self, data: memoryview, place: int) -> None:
        self.data, self.place = data, place

    @classmethod
    def root(cls, buffer: pa.Buffer) -> _Table:
        data = memoryview(buffer)
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def field(self, number: int) -> int:
        """Return the position of a field; 0 if the table has no such field."""
        vtable = self.place - struct.unpack_from("<i", self.data, self.place)[0]
        (size,) = struct.unpack_from("<H", self.data, vtable)
        entry = 4 + 2 * number
        offset = struct.unpack_from("<H", self.data, vtable + entry)[0] if entry < size else 0
        return self.place + offset if offset else 0

    def follow(self, number: int) -> int:
        """Return the position that a field refers to."""
        position = self.field(number)
        return int(position + struct.unpack_from("<I", self.data, position)[0])

    def table(self, number: int) -> _Table:
        return _Table(self.data, self.follow(number))

    def number(self, number: int) -> int:
        """Return a field that is a 64-bit integer."""
        position = self.field(number)
        return int(struct.unpack_from("<q", self.data, position)[0]) if position else 0

    def structs(self, number: int, form: struct.Struct) -> list[tuple[int, ...]]:
        """Return a field that is a vector of structs."""
        if not self.field(number):
            return []
        start = self.follow(number)
        (length,) = struct.unpack_from("<I", self.data, start)
        content = self.data[start + 4 : start + 4 + length * form.size]
        return list(form.iter_unpack(content))


def _record_batch(message: pa.Message) -> _Table:
    """Return the metadata of a record batch, or of the one in a dictionary batch."""
    header = _Table.root(message.metadata).table(2)
    return header.table(1) if message.type == "dictionary" else header


def is_compressed(message: pa.Message) -> bool:
    """Whether the buffers of a record batch are compressed.

    Args:
        message: Arrow has verified its metadata.

    >>> def written(compression):
    ...     batch, sink = pa.record_batch({"x": [1.0]}), pa.BufferOutputStream()
    ...     options = pa.ipc.IpcWriteOptions(compression=compression)
    ...     with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
    ...         writer.write(batch)
    ...     _, message = pa.ipc.MessageReader.open_stream(sink.getvalue())
    ...     return message
    >>> is_compressed(written(None)), is_compressed(written("zstd"))
    (False, True)
    >>> num_rows(written("zstd")), declared_sizes(written("zstd"))
    (1, [0, 8])
    """
    return _record_batch(message).field(3) != 0


def num_rows(message: pa.Message) -> int:
    """Return the number of rows of a record batch.

    Raises:
        ValueError: It is negative.
    """
    rows = _record_batch(message).number(0)
    if rows < 0:
        raise ValueError(f"a record batch has {rows} rows")
    return rows


def declared_sizes(message: pa.Message) -> list[int]:
    """Return the memory that Arrow allocates for each buffer of a record batch.

    Raises:
        ValueError: A buffer is not in the message, or its size is negative.
    """
    places = _record_batch(message).structs(2, struct.Struct("<qq"))
    if not is_compressed(message):
        return [0] * len(places)  # they are used where they are
    body = memoryview(message.body) if message.body is not None else memoryview(b"")
    sizes = []
    for offset, length in places:
        (size,) = struct.unpack_from("<q", body, offset) if length else (0,)
        if offset < 0 or size < -1:
            raise ValueError("a buffer has a negative size")
        sizes.append(max(size, 0))  # -1 if this buffer is not compressed
    return sizes


def messages_of(content: pa.Buffer, is_file: bool) -> Iterator[pa.Message]:
    """Yield the dictionaries and record batches that Arrow would read, in order.

    Args:
        content: An Arrow file or stream.
        is_file: Whether it has a footer, which says where they are.
    """
    if not is_file:
        for message in pa.ipc.MessageReader.open_stream(content):
            if message.type != "schema":
                yield message
        return
    length, _ = FOOTER_END.unpack(content.slice(content.size - FOOTER_END.size))
    start = content.size - FOOTER_END.size - length
    footer = _Table.root(content.slice(start, length))
    for number in (2, 3):  # dictionaries, record batches
        for offset, _, _ in footer.structs(number, BLOCK):
            yield pa.ipc.read_message(content.slice(offset))


def buffers_of(kind: pa.DataType) -> int:
    """Return the number of buffers of a column in a message.

    >>> buffers_of(pa.list_(pa.string())), buffers_of(pa.list_(pa.float32(), 3))
    (5, 3)
    """
    if isinstance(kind, pa.BaseExtensionType):
        return buffers_of(kind.storage_type)
    if pa.types.is_null(kind):
        return 0
    inner = 0 if pa.types.is_dictionary(kind) else kind.num_fields
    return int(kind.num_buffers) + sum(buffers_of(kind.field(i).type) for i in range(inner))
