"""Runs what test_distributed.py wants to know in several processes.

Processes are slow to start, so one launch runs many cases, each in a process group of its own, and
every process writes its failures to a file. Run by torchrun, or with RANK and WORLD_SIZE set:

    python -m tests.folding.distributed_jobs FOLDER CASE...

A case is a function of rank and world that fails by raising. To add one, decorate it with @case()
in one of MODULES.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

MODULES = tuple(f"tests.folding.distributed_{part}" for part in ("gradients", "failures", "folds"))
# Seconds after which a watchdog ends the process with a traceback: something hangs, however busy
# the machine is. Process groups wait longer than that, so no case can end by their timeout. Cases
# that are about timeouts call short_timeout once all are connected.
HANG = 3600
NEVER = timedelta(seconds=2 * HANG)
SHORT = timedelta(seconds=1)
CASES = {}  # by name, functions of rank and world
DEADLY = []  # names of cases in which the last process dies; the others go on without it


class Here:
    """The case that runs in this process: the store that its processes share."""

    store = None


def case(name=None, *, deadly=False):
    def register(function):
        chosen = name or function.__name__
        assert chosen not in CASES
        CASES[chosen] = function
        if deadly:
            DEADLY.append(chosen)
        return function

    return register


def all_cases():
    """The names of all cases in which nobody dies."""
    for module in MODULES:
        import_module(module)
    return [name for name in CASES if name not in DEADLY]


def raises(kind, part, call, *args, **options):
    """The text of what a call raises, which must have a certain part."""
    text = None
    try:
        call(*args, **options)
    except kind as error:
        text = str(error)
    assert text is not None, f"expected {kind.__name__}; nothing was raised"
    assert part in text, f"expected {part!r} in {text!r}"
    return text


# ---- what processes tell each other without the group ------------------------------------------


def arrive(place):
    """Tell the other processes that this one has come to a place."""
    Here.store.add(place, 1)


def wait_for(place, number):
    """Wait until a number of processes have come to a place, or one of them has failed."""
    while Here.store.add(place, 0) < number and not Here.store.add("failed", 0):
        time.sleep(0.01)


def meet(place, number):
    """Go on when a number of processes have come to a place."""
    arrive(place)
    wait_for(place, number)


def short_timeout(world):
    """Give the group a short timeout from here on, in all processes."""
    meet("short timeout", world)
    dist.distributed_c10d._set_pg_timeout(SHORT)


# ---- running them ------------------------------------------------------------------------------


def main(folder, *names):
    """Run cases one after the other, and write what came of each."""
    faulthandler.dump_traceback_later(HANG, exit=True)
    torch.set_num_threads(1)
    all_cases()
    gc.collect()
    gc.freeze()  # what is imported stays, so that collecting is quick; cases import more
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "TORCHELASTIC_RUN_ID" in os.environ:  # as users do it, once
        Here.store = dist.FileStore(str(Path(folder, "launch.store")), world)
        dist.init_process_group("gloo")
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
        meet("connected", world)  # who leaves before closes connections that others still open
        dist.destroy_process_group()
    failures = {}
    for name in names:
        failures[name] = failure_of(folder, name, rank, world)
        Path(folder, f"{rank}.json").write_text(json.dumps(failures))
        world -= name in DEADLY


def failure_of(folder, name, rank, world):
    """The traceback of a case that failed in this process, or None."""
    Here.store = store = dist.FileStore(str(Path(folder, f"{name}.store")), world)
    store.set_timeout(NEVER)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=NEVER)
    meet("ready", world)  # all are connected before one of them dies
    failure = None
    try:
        CASES[name](rank, world)
    except Exception:
        failure = traceback.format_exc()
    if failure is None:  # who leaves early closes connections that others still read from
        meet("done", world - (name in DEADLY))
    else:  # which is how the others learn of a failure: they need not wait for a timeout
        arrive("failed")
    # A DistributedDataParallel keeps its group, and the group's threads, until it is collected. A
    # thread that is still busy when the interpreter ends aborts the process.
    gc.collect()
    gc.freeze()
    dist.destroy_process_group()
    return failure


if __name__ == "__main__":
    from tests.folding import distributed_jobs  # where the cases register

    distributed_jobs.main(*sys.argv[1:])
