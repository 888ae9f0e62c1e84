"""Work that would block the event loop, in a bounded number of threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any, TypeVar

from setfold.live.service.messages import RETRY, RefusedError

Result = TypeVar("Result")
THREADS = 4  # that read
WAITING = 256  # calls that may wait for a thread
STREAMS = 2  # long answers at the same time: each holds a view of the store
AHEAD = 4  # parts of a long answer in memory


class Threads:
    """Runs functions in threads, so many that memory stays bounded.

    Args:
        timeout: Seconds that a call may take.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="setfold-read")
        self.streams = ThreadPoolExecutor(STREAMS, thread_name_prefix="setfold-stream")
        self.waiting = self.streaming = 0

    def close(self) -> None:
        """Wait until all threads have ended."""
        self.pool.shutdown()
        self.streams.shutdown()

    async def run(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Return what a function returns.

        Raises:
            RefusedError: Too many calls wait, or this one takes too long.
        """
        if self.waiting >= WAITING:
            raise RefusedError(429, "too many requests wait. Try again later.", RETRY)
        self.waiting += 1
        called = asyncio.get_running_loop().run_in_executor(self.pool, call, *arguments)
        called.add_done_callback(self._done)
        try:
            return await asyncio.wait_for(asyncio.shield(called), self.timeout)
        except TimeoutError as error:
            raise RefusedError(
                503, f"the store did not answer within {self.timeout:g} seconds.", RETRY
            ) from error

    def _done(self, called: asyncio.Future[Any]) -> None:
        self.waiting -= 1
        if not called.cancelled():
            called.exception()  # so that nobody complains about one that nobody waits for

    async def stream(self, make: Callable[[], Iterator[bytes]]) -> AsyncGenerator[bytes, None]:
        """Yield what a generator yields, which runs in a thread of its own, a few parts ahead.

        Raises:
            RefusedError: Other streams use all threads.
        """
        if self.streaming >= STREAMS:
            raise RefusedError(429, f"{STREAMS} streams are read already. Try again later.", RETRY)
        self.streaming += 1
        loop, stop = asyncio.get_running_loop(), Event()
        parts: asyncio.Queue[bytes | None] = asyncio.Queue(AHEAD)

        def produce() -> None:
            for part in make():
                put = asyncio.run_coroutine_threadsafe(parts.put(part), loop)
                while not stop.is_set() and not _wait(put, 0.1):
                    pass
                if stop.is_set():
                    put.cancel()
                    return

        produced = loop.run_in_executor(self.streams, produce)
        try:
            async for part in _until_done(parts, produced):
                yield part
        finally:
            stop.set()
            produced.add_done_callback(self._end_stream)

    def _end_stream(self, produced: asyncio.Future[None]) -> None:
        self.streaming -= 1
        if not produced.cancelled():
            produced.exception()


def _wait(put: Future[None], seconds: float) -> bool:
    """Whether a part was taken in time."""
    try:
        put.result(seconds)
    except TimeoutError:
        return False
    return True


async def _until_done(
    parts: asyncio.Queue[Any], produced: asyncio.Future[None]
) -> AsyncIterator[bytes]:
    """Yield parts from a queue until the one who puts them has ended, and raise its error."""
    while True:
        got = asyncio.ensure_future(parts.get())
        await asyncio.wait({got, produced}, return_when=asyncio.FIRST_COMPLETED)
        if got.done():
            yield got.result()
            continue
        got.cancel()
        while not parts.empty():
            yield parts.get_nowait()
        produced.result()
        return
