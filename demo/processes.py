"""Run jobs in separate processes, so that the peak memory of each can be measured."""

import signal
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
Job = Callable[[Any], Result]  # called with a counter; sets its `value` to show progress

# Each process is a fork of one that has imported everything: imports take seconds.
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["demo.__main__"])


def run(jobs: Sequence[Job[Result]], show: Callable[[list[int]], None]) -> list[Result]:
    """Run all jobs in parallel, one process each, and show their progress."""
    counters = [FORKS.Value("q", 0) for _ in jobs]
    workers, receivers = [], []
    # Workers ignore Ctrl-C; this process handles it and terminates them.
    answer = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for job, done in zip(jobs, counters, strict=True):
        receiver, sender = FORKS.Pipe(duplex=False)
        workers.append(FORKS.Process(target=work, args=(job, done, sender), daemon=True))
        workers[-1].start()
        sender.close()  # so that the pipe closes if the worker dies
        receivers.append(receiver)
    signal.signal(signal.SIGINT, answer)
    try:
        while not all(receiver.poll(0.05) for receiver in receivers):
            show([done.value for done in counters])
        return [receiver.recv() for receiver in receivers]
    except EOFError:
        raise ChildProcessError("a worker process died; see the messages above.") from None
    finally:
        for worker in workers:
            worker.terminate()


def work(job: Job[Any], done: Any, sender: Connection) -> None:
    """Run a job with one thread, so that run times are comparable."""
    torch.set_num_threads(1)
    sender.send(job(done))
