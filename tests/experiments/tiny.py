"""The smallest tasks, to try the machinery on, and processes to try it in."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

import setfold
from experiments import training
from experiments.recipe import Recipe, Run, Size, Task, Training
from experiments.training import train
from setfold.learning import loop

HANG = 3600  # seconds; ends a process that hangs, however busy the machine is


def quiet():
    return Console(quiet=True)


def fit(wanted, out, **options):
    return train(wanted, out=out, device="cpu", console=quiet(), **options)


def checkpoint(folder):
    return folder / training.NAME


def interrupt_at(monkeypatch, step):
    """Stop trainings before a step, with a checkpoint after each that they do."""
    monkeypatch.setattr(loop, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(loop, "LOOK_EVERY", 0.0)
    original = loop.Loop._step

    def interrupted(self, batch):
        if self.standing.step == step:
            raise KeyboardInterrupt
        original(self, batch)

    monkeypatch.setattr(loop.Loop, "_step", interrupted)


@dataclass(frozen=True)
class Line(Task):
    """Least squares: the same 24 points in every epoch, one weight for each coordinate."""

    metric: ClassVar[str] = "error"
    larger_is_better: ClassVar[bool] = False

    count: int = 24
    idle: bool = False  # with a parameter that has no gradient

    def points(self):
        points = torch.randn(self.count, 3, generator=torch.Generator().manual_seed(0))
        return points, points @ torch.tensor([[1.0], [-2.0], [3.0]])

    def items(self):
        return self.count

    def build(self):
        model = nn.Linear(3, 1, bias=False)
        if self.idle:
            model.unused = nn.Parameter(torch.ones(2))
        return model

    def batch(self, items):
        points, values = self.points()
        return points[items], values[items]

    def loss(self, model, batch):
        assert model.training
        points, values = batch
        return (model(points) - values).square().mean()

    def evaluate(self, model, split):
        assert not model.training
        assert not torch.is_grad_enabled()
        points, values = self.points()
        return {"error": (model(points) - values).square().mean().item()}


@dataclass(frozen=True)
class Noise(Task):
    """Everything that draws or remembers: random sets and slots, dropout, BatchNorm."""

    metric: ClassVar[str] = "nearness"
    larger_is_better: ClassVar[bool] = True

    def items(self):
        return 50

    def build(self):
        encoder = setfold.SlotSetEncoder(3, num_slots=2, dim_slot=4, dim_out=4)
        head = nn.Sequential(
            nn.Flatten(), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        return setfold.Composition(encoder=encoder, head=head)

    def batch(self, items):
        sets = torch.rand(len(items), 5, 3) + items[:, None, None] / 50
        return sets, sets.amax((1, 2))[:, None]

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def evaluate(self, model, split):
        sets, values = self.batch(torch.arange(50))
        return {"nearness": -(model(sets) - values).square().mean().item()}


def recipe(**changes):
    """A recipe of two methods, each at two points; both points share a training."""

    def runs(size, seed):
        for method, rate in (("slow", 0.01), ("quick", 0.1)):
            task = Line(made_up=size is Size.SMOKE)
            training = Training(task, 2, 8, rate, validations=2, seed=seed)
            for power in (1, 2):
                yield Run(
                    method,
                    training,
                    lambda model, power=power: {"size": float(model.weight.norm() ** power)},
                    {"power": power},
                )
        yield Run("count", None, lambda model: {"draws": torch.rand(3).tolist()})

    return Recipe(
        number=changes.get("number", 1),
        name=changes.get("name", "tiny"),
        title="A tiny recipe",
        claim="None.",
        runs=lambda size, seed: list(runs(size, seed)),
        section=lambda records: None,
        headline=lambda records: "",
        verdict="",
        cut="",
        minutes=0.1,
        seeds={Size.SMOKE: 1, Size.SMALL: 2, Size.PAPER: 2},
    )


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
