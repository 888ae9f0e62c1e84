"""The default engine: this process, in one thread or several.

A thread reads a batch of a shard and turns it into a step. Each thread reads a shard of its own, as
long as there are enough; then several share one, and take turns at reading it. A step depends on
its rows only and steps are yielded in order, so the number of threads changes nothing but the time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from setfold.files.budget import WAITING
from setfold.files.engines.task import Batch, Shard, Step, Task


def steps(
    task: Task, shards: Sequence[Shard], first: int, done: int
) -> Generator[Step, None, None]:
    """Yield the steps of all shards in order, starting at one of them.

    Args:
        task: How to process a shard.
        shards: All shards.
        first: The index of the shard to start with.
        done: How many of its rows are already done.
    """
    sources = [
        _Source(
            shards[number], task.batches(number, shards[number], done if number == first else 0)
        )
        for number in range(first, len(shards))
    ]
    if task.threads > 1:
        yield from _Workers(task, sources).steps()
        return
    for source in sources:
        for batch in source.batches:
            yield task.step(batch, source.shard)


_runs: list[tuple[int, int]] = []  # the thread of each run, and what torch used before all of them
_runs_lock = threading.Lock()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let an operation of torch use one thread, because batches are processed in several.

    It also adds numbers in the same order then, however many threads there are. Runs may overlap.
    Torch keeps the setting for each thread that has computed something, so each restores its own.
    """
    with _runs_lock:
        before = _runs[0][1] if _runs else torch.get_num_threads()
        run = threading.get_ident(), before
        _runs.append(run)
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _runs_lock:
            _runs.remove(run)
            if run not in _runs:
                torch.set_num_threads(before)


class _Source:
    """The batches of a shard, which one thread at a time may read."""

    def __init__(self, shard: Shard, batches: Generator[Batch, None, None]) -> None:
        self.shard, self.batches = shard, batches
        self.reading = threading.Lock()
        self.is_read = False
        self.steps: queue.SimpleQueue[Future[Step] | None] = queue.SimpleQueue()  # None at the end
        self.unused = 0  # steps that were begun and not yielded


class _Workers:
    """Threads that turn batches into steps.

    Args:
        task: How a batch becomes a step.
        sources: All batches, by shard.
    """

    def __init__(self, task: Task, sources: Sequence[_Source]) -> None:
        self._task, self._sources, self._limit = task, sources, task.threads * WAITING
        self._unopened = iter(sources)
        self._current = next(iter(sources), None)  # whose steps are yielded
        self._unused = 0  # the same, of all shards
        self._stopped = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, daemon=True) for _ in range(task.threads)
        ]

    def steps(self) -> Iterator[Step]:
        """Yield all steps, in order, or raise the first error."""
        try:
            for thread in self._threads:
                thread.start()
            for source in self._sources:
                with self._changed:
                    self._current = source
                    self._changed.notify_all()
                while (future := source.steps.get()) is not None:
                    step = future.result()
                    self._count(source, -1)
                    yield step
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            for thread in self._threads:
                if thread.ident is not None:  # it was started
                    thread.join()
            for source in self._sources:
                source.batches.close()  # and with it the file

    def _count(self, source: _Source, change: int) -> None:
        """Add to the number of steps that were begun and not yielded."""
        with self._changed:
            source.unused += change
            self._unused += change
            self._changed.notify_all()

    @torch.no_grad()
    def _work(self) -> None:
        torch.set_num_threads(1)  # another run may have ended, and restored the setting
        while not self._stopped and (own := self._choose()) is not None:
            while (source := self._reserve(own)) is not None:
                self._advance(source)

    def _choose(self) -> _Source | None:
        """Return a shard that no thread reads, or else the first that is not read to its end."""
        with self._changed:
            unopened = next(self._unopened, None)
        return unopened or next((each for each in self._sources if not each.is_read), None)

    def _reserve(self, own: _Source) -> _Source | None:
        """Wait until one more step fits in memory, and count it.

        Returns:
            The shard of the step: that of the thread or, if it must wait, the current one. None if
            its shard is read to its end, or the run has ended.
        """
        with self._changed:
            while not self._stopped and not own.is_read:
                for source in (own, self._current):
                    if source is not None and not source.is_read and self._has_room(source):
                        source.unused += 1
                        self._unused += 1
                        return source
                self._changed.wait()
        return None

    def _has_room(self, source: _Source) -> bool:
        """Whether one more step of a shard fits in memory.

        A step for which the consumer waits must not wait for the consumer. Shards ahead leave room
        for a step of each thread, so that all threads can help with the current one.
        """
        if source is self._current:
            return not source.unused or self._unused < self._limit
        ahead = self._unused - (self._current.unused if self._current is not None else 0)
        return ahead < self._limit - self._task.threads and self._unused < self._limit

    def _advance(self, source: _Source) -> None:
        """Read a batch of a shard, and turn it into a step. There must be room for it."""
        with source.reading:
            if self._stopped:
                return
            future: Future[Step] = Future()
            try:
                batch = next(source.batches, None)  # None again if it is read to its end
            except BaseException as error:  # raised again where the steps are consumed
                batch = None
                future.set_exception(error)
            source.is_read = batch is None
            if batch is None and not future.done():
                source.steps.put(None)
                self._count(source, -1)
                return
            source.steps.put(future)
        if batch is None:
            return
        try:
            future.set_result(self._task.step(batch, source.shard))
        except BaseException as error:  # likewise
            future.set_exception(error)
