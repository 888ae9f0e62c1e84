"""The engine that is always there: this process, which reads ahead if it may use two cores."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from setfold.files.engines.task import Batch, Piece, Step, Task


def steps(task: Task, pieces: Sequence[Piece], first: int, done: int) -> Iterator[Step]:
    """The steps of all pieces in order, from one piece on.

    Args:
        task: what to do with a piece.
        pieces: all of them.
        first: the number of the piece to begin with.
        done: rows of it that are done.
    """

    def batches() -> Iterator[Batch]:
        for number in range(first, len(pieces)):
            yield from task.batches(number, pieces[number], done if number == first else 0)

    threads = torch.get_num_threads()
    # Two threads on one core take a fifth longer than one.
    ahead = threads > 1 or task.device.type != "cpu"
    torch.set_num_threads(max(1, threads - 1))
    try:
        for batch in _read_ahead(batches()) if ahead else batches():
            yield task.step(batch, pieces[batch.piece])
    finally:
        torch.set_num_threads(threads)


def _read_ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The same items; the next one is made in a thread while the last one is used."""
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(1)
    stop = threading.Event()

    def put(item: Any, error: BaseException | None) -> None:
        while not stop.is_set():
            try:
                return ready.put((item, error), timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(item, None)
                if stop.is_set():
                    return
            put(None, StopIteration())
        except BaseException as error:  # is raised where it can be seen
            put(None, error)

    thread = threading.Thread(target=work, daemon=True)
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
