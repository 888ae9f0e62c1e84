"""Runs what test_distributed.py wants to know in several processes.

Processes are slow to start, so one launch runs many cases, each in a process group of its own, and
every process writes its verdicts to a file. Run by torchrun, or with RANK and WORLD_SIZE set:

    python -m tests.folding.distributed_jobs FOLDER CASE...

A case is a function of rank and world that fails by raising. To add one, decorate it with @case()
in one of MODULES.
"""

from __future__ import annotations

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
PATIENCE = 90.0  # seconds until a case that went wrong in one process ends in the others
CASES = {}  # by name, functions of rank and world
TIMEOUTS = {}  # by name, seconds
DEADLY = []  # names of cases in which the last process dies; the others go on without it


def case(name=None, *, timeout=PATIENCE, deadly=False):
    def register(function):
        chosen = name or function.__name__
        assert chosen not in CASES
        CASES[chosen], TIMEOUTS[chosen] = function, timeout
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


def main(folder, *names):
    """Run cases one after the other, and write what came of each."""
    torch.set_num_threads(1)
    all_cases()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "TORCHELASTIC_RUN_ID" in os.environ:  # as users do it, once
        dist.init_process_group("gloo")
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
        dist.destroy_process_group()
    verdicts = {}
    for name in names:
        verdicts[name] = verdict(folder, name, rank, world)
        Path(folder, f"{rank}.json").write_text(json.dumps(verdicts))
        world -= name in DEADLY


def verdict(folder, name, rank, world):
    """How long a case took in this process, and its traceback if it failed."""
    store = dist.FileStore(str(Path(folder, f"{name}.store")), world)
    patience = timedelta(seconds=TIMEOUTS[name])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    began, failure = time.monotonic(), None
    try:
        CASES[name](rank, world)
    except Exception:
        failure = traceback.format_exc()
    seconds = time.monotonic() - began
    store.add("done", 1)
    while store.add("done", 0) < world - (name in DEADLY) and time.monotonic() < began + PATIENCE:
        time.sleep(0.01)  # who leaves early closes connections that others still read from
    dist.destroy_process_group()
    return {"failure": failure, "seconds": seconds}


if __name__ == "__main__":
    from tests.folding import distributed_jobs  # where the cases register

    distributed_jobs.main(*sys.argv[1:])
