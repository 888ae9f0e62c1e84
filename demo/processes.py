"""Jobs in processes of their own, so that a peak of memory belongs to one of them."""

import signal
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
Job = Callable[[Any], Result]  # called with a counter, whose `value` says how far it is

SPAWN = get_context("spawn")


def run(jobs: Sequence[Job[Result]], show: Callable[[list[int]], None]) -> list[Result]:
    """Do all jobs at once, one process each, and show how far each of them is."""
    counters = [SPAWN.Value("q", 0) for _ in jobs]
    workers, receivers = [], []
    # Processes inherit that Ctrl-C is ignored: only this one answers to it, and ends the others.
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for job, done in zip(jobs, counters, strict=True):
        receiver, sender = SPAWN.Pipe(duplex=False)
        workers.append(SPAWN.Process(target=work, args=(job, done, sender), daemon=True))
        workers[-1].start()
        sender.close()  # the worker has the only other one, so its death ends the pipe
        receivers.append(receiver)
    signal.signal(signal.SIGINT, answer)
    try:
        while not all(receiver.poll(0.05) for receiver in receivers):
            show([done.value for done in counters])
        return [receiver.recv() for receiver in receivers]
    except EOFError:
        raise ChildProcessError("a process ended before its job was done; see above.") from None
    finally:
        for worker in workers:
            worker.terminate()


def work(job: Job[Any], done: Any, sender: Connection) -> None:
    """What a process does: with one thread, so that ways and workers can be compared."""
    torch.set_num_threads(1)
    sender.send(job(done))
