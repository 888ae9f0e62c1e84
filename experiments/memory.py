"""Measure time and memory in a separate process, on the CPU, with one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from experiments.recipe import Task
from setfold.files.budget import peak_memory

P = ParamSpec("P")
T = TypeVar("T")


class Cost(NamedTuple):
    """The cost of a training step, or of something else that is repeated."""

    megabytes: float  # peak memory above the memory before it
    seconds: float  # median CPU time


def cost_of_step(task: Task, batch_size: int, steps: int = 5) -> Cost:
    """Measure the cost of a training step of a task.

    Args:
        task: task whose loss and gradients are computed.
        batch_size: items per step.
        steps: number of steps; time is the median and memory the peak over all of them.
    """
    return in_new_process(_cost_of_step, task, batch_size, steps)


def in_new_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function of a module in a process that has done nothing else, with one thread."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        process.submit(torch.set_num_threads, 1).result()
        return process.submit(function, *args, **kwargs).result()


def seconds_of(act: Callable[[], object], times: int) -> float:
    """Return the median CPU time of a call."""
    found = []
    for _ in range(times):
        start = time.process_time()
        act()
        found.append(time.process_time() - start)
    return median(found)


def _cost_of_step(task: Task, batch_size: int, steps: int) -> Cost:
    torch.manual_seed(0)
    model = task.build()
    batch = task.batch(torch.arange(batch_size))
    _settle()
    before = peak_memory()
    seconds = seconds_of(lambda: task.loss(model, batch).backward(), steps)
    return Cost((peak_memory() - before) / 1e6, seconds)


def _settle() -> None:
    """Leave out of the measurement what happened before, and what happens only once."""
    one = torch.ones((), requires_grad=True)
    torch.autograd.grad(one.exp(), one, torch.ones(()))  # the first time, it imports 20 MB
    with suppress(OSError):  # without Linux, an earlier peak hides smaller ones
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the current memory
