"""Arrow streams from files that may come from anywhere.

Arrow trusts a stream: without the checks here, wrong offsets crash the process, and compressed or
nested data takes any amount of memory. setfold writes plain columns, so anything else is refused
before Arrow reads it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from setfold.errors import FileError, SetfoldError
from setfold.files.readers.messages import is_compressed
from setfold.files.sealed import SealedFile

STREAM_START = 8  # an Arrow file begins with its magic and padding, then a stream follows
EXTENSION = b"ARROW:extension"  # some versions of Arrow parse such metadata by recursion


class Stream:
    """An Arrow stream. Iterating over it yields its record batches, each validated.

    Args:
        source: A buffer, or an open file at the position where the stream begins.

    Attributes:
        schema: The columns.

    Raises:
        ValueError: It is not a stream that setfold wrote. Arrow raises other errors as well;
            `reading` turns all of them into FileErrors.
    """

    def __init__(self, source: Any) -> None:
        self._messages = pa.ipc.MessageReader.open_stream(source)
        first = next(self._messages, None)
        if first is None or first.type != "schema":
            raise ValueError("the stream does not begin with a schema")
        if EXTENSION in first.metadata.to_pybytes():
            raise ValueError("a column has an extension type")
        self.schema = pa.ipc.read_schema(first)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for message in self._messages:
            if message.type != "record batch":
                raise ValueError(f"expected a record batch; got a {message.type}")
            if is_compressed(message):
                raise ValueError("a record batch is compressed")
            batch = pa.ipc.read_record_batch(message, self.schema)
            batch.validate(full=True)
            yield batch

    def read_all(self) -> pa.Table:
        """Return all record batches as one table."""
        return pa.Table.from_batches(list(self), self.schema)


def open_arrow(file: SealedFile) -> Stream:
    """Return the stream in an Arrow file."""
    file.seek(STREAM_START)
    return Stream(file)


@contextmanager
def reading(where: object, advice: str) -> Iterator[None]:
    """Turn whatever goes wrong while a file or table is parsed into a FileError.

    Args:
        where: The name of the file or table in the message.
        advice: What to do, a sentence.
    """
    try:
        yield
    except SetfoldError:
        raise
    except Exception as error:  # Arrow, JSON, safetensors and torch raise many kinds
        is_arrow = isinstance(error, pa.ArrowException)
        if isinstance(error, MemoryError) and not is_arrow:
            raise  # the content cannot cause it, because nothing larger than the file is read
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # from the operating system; EINVAL if the content says where to seek
        raise FileError(f"{where} is corrupt: {error}. {advice}") from error
