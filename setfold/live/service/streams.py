"""Arrow streams from clients, which may hold anything.

What is accepted takes about as much memory as the body that holds it: no compression, and no types
whose values are stored once and used often. The content is validated before it is used.
"""

from __future__ import annotations

import struct

import pyarrow as pa

from setfold.errors import InputError

RECORD_BATCH = 3  # in the enumeration of headers of a message
COMPRESSION = 3  # the number of the field in the table of a record batch


def read_stream(body: bytes) -> pa.RecordBatch:
    """Return the rows of an Arrow stream.

    Raises:
        InputError: It is no stream, or it is compressed, or a column has another type than plain
            numbers, text, times or lists of numbers.

    >>> sink = pa.BufferOutputStream()
    >>> table = pa.table({"user": ["ann"], "x": [1.0]})
    >>> with pa.ipc.new_stream(sink, table.schema) as writer:
    ...     writer.write_table(table)
    >>> read_stream(sink.getvalue().to_pybytes()).num_rows
    1
    """
    try:
        schema, batches = _read(pa.BufferReader(body))
    except (pa.ArrowException, OSError, struct.error, IndexError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the body is not an Arrow stream: {error!s:.200}.") from error
    rows = pa.Table.from_batches(batches, schema).combine_chunks().to_batches()
    if not rows:
        raise InputError("the Arrow stream has no rows.")
    return rows[0]


def _read(source: pa.BufferReader) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Return the schema of a stream, and its batches up to the mark of its end."""
    messages = pa.ipc.MessageReader.open_stream(source)
    first = next(messages, None)
    if first is None:
        raise ValueError("it is empty")
    if first.type != "schema":  # Arrow would read any other message as one, and crash
        raise ValueError(f"it begins with a message of type {first.type}")
    schema, batches, end = pa.ipc.read_schema(first), [], source.tell()
    _check_types(schema)
    for message in messages:
        if message.type != "record batch" or _is_compressed(message.metadata.to_pybytes()):
            raise InputError("the Arrow stream is compressed or has dictionaries. Write it plain.")
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
        batches.append(batch)
        end = source.tell()
    if source.tell() == end:
        raise ValueError("its end is missing. Close the writer before you send it")
    if source.tell() < source.size():
        raise ValueError("bytes follow its end. Send each stream as a batch of its own")
    return schema, batches


def _check_types(schema: pa.Schema) -> None:
    if len({*schema.names}) != len(schema.names):
        raise InputError("two columns of the Arrow stream have the same name. Rename one of them.")
    for field in schema:
        kind = field.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or _is_fixed(kind):
            kind = kind.value_type
        if not _is_plain(kind):
            raise InputError(
                f"the column {field.name!r} is {field.type}; expected numbers, text, times, or "
                "lists of numbers. Convert it, or leave it out."
            )


def _is_fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind))


def _is_plain(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
    )


def _is_compressed(metadata: bytes) -> bool:
    """Whether the flatbuffer of a message says that a record batch is compressed.

    pyarrow does not tell, and decompressing a small body can take any amount of memory.
    """
    message = struct.unpack_from("<I", metadata, 0)[0]
    kind = _field(metadata, message, 1)
    header = _field(metadata, message, 2)
    if kind is None or header is None or metadata[kind] != RECORD_BATCH:
        raise ValueError("a message is not a record batch")
    batch = header + struct.unpack_from("<I", metadata, header)[0]
    return _field(metadata, batch, COMPRESSION) is not None


def _field(content: bytes, table: int, number: int) -> int | None:
    """Return where a field of a table of a flatbuffer is; None if the table does not have it."""
    fields = table - struct.unpack_from("<i", content, table)[0]
    size = struct.unpack_from("<H", content, fields)[0]
    entry = 4 + 2 * number
    offset = struct.unpack_from("<H", content, fields + entry)[0] if entry < size else 0
    return table + offset if offset else None
