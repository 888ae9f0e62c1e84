"""The default engine: this process. It reads ahead in a thread if it may use two cores."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from setfold.files.engines.task import Batch, Shard, Step, Task


def steps(task: Task, shards: Sequence[Shard], first: int, done: int) -> Iterator[Step]:
    """Yield the steps of all shards in order, starting at one of them.

    Args:
        task: How to process a shard.
        shards: All shards.
        first: The index of the shard to start with.
        done: How many of its rows are already done.
    """

    def batches() -> Iterator[Batch]:
        for number in range(first, len(shards)):
            yield from task.batches(number, shards[number], done if number == first else 0)

    threads = torch.get_num_threads()
    # On a single core, reading in a second thread is a fifth slower.
    ahead = threads > 1 or task.device.type != "cpu"
    torch.set_num_threads(max(1, threads - 1))
    try:
        for batch in _read_ahead(batches()) if ahead else batches():
            yield task.step(batch, shards[batch.shard])
    finally:
        torch.set_num_threads(threads)


def _read_ahead(items: Iterator[Any]) -> Iterator[Any]:
    """Yield the same items. A thread computes the next item while the caller uses the last one."""
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(1)
    stop = threading.Event()

    def put(item: Any, error: BaseException | None) -> None:
        while not stop.is_set():
            try:
                return ready.put((item, error), timeout=0.1)
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for item in items:
                put(item, None)
                if stop.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:  # raised again in the consuming thread
            put(None, error)

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        stop.set()
        thread.join()
