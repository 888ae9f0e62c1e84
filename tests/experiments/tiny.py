"""The smallest tasks, to try the machinery on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from rich.console import Console
from torch import nn

import setfold
from experiments import training
from experiments.recipe import Recipe, Run, Size, Task, Training
from experiments.training import train
from setfold.learning import loop


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
