"""Compare `setfold train` with what one would do without a set encoder, on real data.

    python -m experiments run own-data --size small     # about 45 minutes on one core

Not in the paper.
Measured: TODO.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

from experiments import report
from experiments.recipe import Metrics, Outcome, Recipe, Run, Size
from experiments.records import Record
from experiments.report import Section
from experiments.tasks.own_data import AUTO, TESTS, cross_validate

METHOD = "setfold train"
BAGS = (
    "musk1",
    "musk2",
    "elephant",
    "corel_dogs",
    "birds_brown_creeper",
    "protein",
    "ucsb_breast_cancer",
)
PLACED = ("digits", "mnist", "modelnet40")
BASELINES = (
    "logistic regression on statistics",
    "gradient boosting on statistics",
    "the most frequent class",
)
EPOCHS = {Size.SMOKE: 1, Size.SMALL: 15, Size.PAPER: 100}
MOST = {Size.SMOKE: 60, Size.SMALL: 400, Size.PAPER: 10_000}  # sets with positions


def measure(model: nn.Module, name: str, size: Size, seed: int) -> Metrics:
    """Cross-validate on one data set."""
    most = MOST[size] if name in PLACED else MOST[Size.PAPER]
    with torch.enable_grad():  # measurements usually need no gradients
        return cross_validate(name, size is Size.SMOKE, most, EPOCHS[size], seed)


def runs(size: Size, seed: int) -> list[Run]:
    """Run `setfold train` on each data set."""
    names = ("musk1", "digits") if size is Size.SMOKE else (*BAGS, *PLACED)
    return [
        Run(METHOD, None, partial(measure, name=name, size=size, seed=seed), {"data": name}, seed)
        for name in names
    ]


def section(records: Sequence[Record]) -> Section:
    raise NotImplementedError


RECIPE = Recipe(
    number=24,
    name="own-data",
    title="Own data: set encoders and plain statistics",
    claim="",
    runs=runs,
    section=section,
    headline=lambda records: "",
    outcome=None,
    verdict="",
    cut="",
    minutes=45,
)
