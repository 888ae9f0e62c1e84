"""Server-sent events: which sets have changed.

A client that does not keep up is dropped, and told so, instead of making the service wait or use
more memory. It reads the sets that it needs, and listens again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson

from setfold.live.service.messages import RETRY, RefusedError
from setfold.live.service.metrics import Metrics

EVENTS = 256  # that may wait for a client
NAMES = 1000  # sets of an event
PULSE = 15.0  # seconds between signs of life: without them, proxies close connections
ALIVE = b": alive\n\n"


class Listener:
    """The events that wait for a client."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue(EVENTS + 2)
        self.dropped = False

    def put(self, event: bytes) -> bool:
        """Add an event; False if too many wait, and the client was dropped."""
        if self.dropped:
            return True
        if self.events.qsize() < EVENTS:
            self.events.put_nowait(event)
            return True
        self.end("dropped", f"more than {EVENTS} events waited. Listen again.")
        return False

    def end(self, kind: str, reason: str) -> None:
        """Add the last event."""
        if not self.dropped:
            self.dropped = True
            self.events.put_nowait(_format(kind, {"reason": reason}))
            self.events.put_nowait(None)


class Changes:
    """Tells clients which sets have changed.

    Args:
        limit: How many clients may listen.
        metrics: Where they are counted.

    >>> async def listen():
    ...     changes = Changes(10, Metrics())
    ...     events = changes.listen()
    ...     first = await anext(events)
    ...     changes.tell("changed", ["ann", "bob"])
    ...     return await anext(events)
    >>> print(asyncio.run(listen()).decode())
    event: changed
    data: {"sets":["ann","bob"]}
    <BLANKLINE>
    <BLANKLINE>
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self.limit, self.metrics = limit, metrics
        self.listeners: set[Listener] = set()
        self.stopping = False
        metrics.watch("listeners", lambda: len(self.listeners))

    def tell(self, kind: str, names: Sequence[Any]) -> None:
        """Send an event to all clients; several if many sets have changed."""
        if not self.listeners:
            return
        for start in range(0, len(names), NAMES):
            event = _format(kind, {"sets": names[start : start + NAMES]})
            for listener in self.listeners:
                if not listener.put(event):
                    self.metrics.count("dropped_listeners_total")

    def stop(self) -> None:
        """End all streams: the service stops."""
        self.stopping = True
        for listener in self.listeners:
            listener.end("stopped", "the service stops.")

    def check(self) -> None:
        """Raise RefusedError if nobody else may listen."""
        if len(self.listeners) >= self.limit or self.stopping:
            raise RefusedError(429, f"{len(self.listeners)} clients listen already.", RETRY)

    async def listen(self) -> AsyncGenerator[bytes, None]:
        """Yield the events for a client, and a sign of life if there are none."""
        listener = Listener()
        self.listeners.add(listener)
        try:
            yield ALIVE
            while True:
                try:
                    event = await asyncio.wait_for(listener.events.get(), PULSE)
                except TimeoutError:
                    event = ALIVE
                if event is None:
                    return
                yield event
        finally:
            self.listeners.discard(listener)


def _format(kind: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps(data, default=str))
