"""What a training step costs, measured in a process of its own."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import NamedTuple

import torch

from experiments.recipe import Task
from setfold.files.budget import peak_memory


class Cost(NamedTuple):
    """Of a training step."""

    megabytes: float  # peak memory above what the process had before
    seconds: float  # of one core, the median


def cost_of_step(task: Task, batch_size: int, steps: int = 5) -> Cost:
    """What a step of a task costs, with one thread, on the CPU.

    Args:
        task: whose loss is computed and differentiated.
        batch_size: items in the step.
        steps: how many are timed; memory is the peak over all of them.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_measured, task, batch_size, steps).result()


def _measured(task: Task, batch_size: int, steps: int) -> Cost:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = task.build()
    batch = task.batch(torch.arange(batch_size))
    before, seconds = peak_memory(), []
    for _ in range(steps):
        start = time.process_time()
        task.loss(model, batch).backward()
        seconds.append(time.process_time() - start)
    return Cost((peak_memory() - before) / 1e6, median(seconds))
