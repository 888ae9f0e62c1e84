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
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(body))
        schema = pa.ipc.read_schema(messages.read_next_message())
        _check_types(schema)
        batches = []
        for message in messages:
            if message.type != "record batch" or _is_compressed(message.metadata.to_pybytes()):
                raise InputError(
                    "the Arrow stream is compressed or has dictionaries. Write it plain."
                )
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            batches.append(batch)
    except (pa.ArrowException, OSError, StopIteration, struct.error, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = str(error) or "it is empty"
        raise InputError(f"the body is not an Arrow stream: {reason:.200}.") from error
    rows = pa.Table.from_batches(batches, schema).combine_chunks().to_batches()
    if not rows:
        raise InputError("the Arrow stream has no rows.")
    return rows[0]


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
