"""Measure time and memory of a training step in a separate process."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from experiments.recipe import Task
from setfold.files.budget import peak_memory


class Cost(NamedTuple):
    """The cost of a training step."""

    megabytes: float  # peak memory above the memory before the step
    seconds: float  # median CPU time


def cost_of_step(task: Task, batch_size: int, steps: int = 5) -> Cost:
    """Measure the cost of a training step of a task on the CPU, with one thread.

    Args:
        task: task whose loss and gradients are computed.
        batch_size: items per step.
        steps: number of steps; time is the median and memory the peak over all of them.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_measured, task, batch_size, steps).result()


def _measured(task: Task, batch_size: int, steps: int) -> Cost:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = task.build()
    batch = task.batch(torch.arange(batch_size))
    _settle()
    before, seconds = peak_memory(), []
    for _ in range(steps):
        start = time.process_time()
        task.loss(model, batch).backward()
        seconds.append(time.process_time() - start)
    return Cost((peak_memory() - before) / 1e6, median(seconds))


def _settle() -> None:
    """Leave out of the measurement what happened before, and what happens only once."""
    one = torch.ones((), requires_grad=True)
    torch.autograd.grad(one.exp(), one, torch.ones(()))  # the first time, it imports 20 MB
    with suppress(OSError):  # without Linux, an earlier peak hides smaller ones
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the current memory
