"""Processes to try things in: copies of this one, alone or with the environment of torchrun."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

HANG = 3600  # seconds; ends a process that hangs, however busy the machine is


def fork(function, *arguments, **environment):
    """Run a function in a process of its own, which begins as a copy of this one."""

    def run():
        os.environ.update({name: str(value) for name, value in environment.items()})
        torch.set_num_threads(1)
        function(*arguments)
        sys.stdout.flush()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def finish(processes):
    """The exit codes of processes, when all have ended."""
    for process in processes:
        process.join(HANG)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def as_torchrun(function, *arguments, processes=2):
    """Run a function in processes with the environment that torchrun would give them.

    They find each other by a file: a port that is free now may be taken when they start.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "store"))
        started = [
            fork(
                _as_one_of,
                processes,
                file,
                function,
                *arguments,
                RANK=rank,
                LOCAL_RANK=rank,
                GROUP_RANK=0,
                WORLD_SIZE=processes,
                LOCAL_WORLD_SIZE=processes,
                MASTER_ADDR="unused",
                MASTER_PORT=0,
                TORCHELASTIC_RUN_ID="test",
            )
            for rank in range(processes)
        ]
        return finish(started)


def _as_one_of(processes, file, function, *arguments):
    store = dist.FileStore(file, processes)
    store.set_timeout(timedelta(seconds=HANG))
    dist.init_process_group = partial(
        dist.init_process_group, store=store, rank=int(os.environ["RANK"]), world_size=processes
    )
    try:
        function(*arguments)
    except BaseException:
        store.add("failed", 1)
        raise
    store.add("done", 1)  # who leaves early closes connections that others still read from
    while store.add("done", 0) < processes and not store.add("failed", 0):
        time.sleep(0.01)
    # A DistributedDataParallel keeps its group, and the group's threads, until it is collected. A
    # thread that is still busy when the process ends aborts it.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
