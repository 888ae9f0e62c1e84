"""Connections to a database that wait for their next use."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

KEPT = 16  # connections that wait; more are closed


class Closeable(Protocol):
    """A connection."""

    def close(self) -> None:
        """Close it."""


Connection = TypeVar("Connection", bound=Closeable)


class Pool(Generic[Connection]):
    """Lends connections, each to one thread at a time, and never to another process.

    Args:
        connect: A function that returns a new connection.
        is_usable: Whether a connection that comes back can be lent again.

    >>> pool = Pool(lambda: open(os.devnull), lambda file: not file.closed)
    >>> with pool.lent() as first, pool.lent() as second:
    ...     assert first is not second
    >>> with pool.lent() as again:
    ...     assert again in (first, second)
    >>> pool.close()
    """

    def __init__(
        self, connect: Callable[[], Connection], is_usable: Callable[[Connection], bool]
    ) -> None:
        self.connect, self.is_usable = connect, is_usable
        self.waiting: list[Connection] = []
        self.process = os.getpid()
        self.inherited: list[list[Connection]] = []

    @contextmanager
    def lent(self) -> Iterator[Connection]:
        """Return a context with a connection."""
        connection = self.take()
        try:
            yield connection
        finally:
            self.give_back(connection)

    def take(self) -> Connection:
        """Return a connection that has waited, or a new one."""
        if self.process != os.getpid():  # forked: the parent still uses these, so keep them open
            self.inherited.append(self.waiting)
            self.waiting, self.process = [], os.getpid()
        try:
            return self.waiting.pop()  # the last one is the warmest; lists are thread-safe
        except IndexError:
            return self.connect()

    def give_back(self, connection: Connection) -> None:
        """Let a connection wait for its next use, or close it."""
        if self.is_usable(connection) and len(self.waiting) < KEPT:
            self.waiting.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the connections that wait."""
        while self.process == os.getpid() and self.waiting:
            self.waiting.pop().close()
