"""The building blocks of an experiment. Read this file first.

    Task      data, model, loss and metric of one problem; one module per task in tasks/
    Training  one fit of a task: seed, epochs, learning rate
    Run       one point of a table or curve: a training and a measurement
    Recipe    all runs behind one table or figure; one module per recipe in recipes/

All are frozen dataclasses. So `dataclasses.replace(...)` makes a variant, settings can be written
to a record, and recipes that need the same training share it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from setfold.learning.schedules import cosine

if TYPE_CHECKING:  # importing torch takes seconds, and --help should be fast
    from torch import Tensor, nn

    from experiments.records import Record
    from experiments.report import Section
    from experiments.statistics import Comparison

Metrics = dict[str, float | list[float] | str]


class Size(StrEnum):
    """How much of an experiment to run."""

    SMOKE = "smoke"  # seconds, on synthetic data
    SMALL = "small"  # minutes on two cores, on real data: the numbers in RESULTS.md
    PAPER = "paper"  # the paper's settings, for a GPU


class Outcome(StrEnum):
    """Whether a claim holds; statistics.judge has the rule."""

    HOLDS = "holds"
    WITH_SLOTS_APART = "holds only with slots apart"
    PARTLY = "holds in part"
    FAILS = "does not hold"
    NOT_SHOWN = "not shown"
    ONE_SEED = "one seed"


@dataclass(frozen=True)
class Task(ABC):
    """One problem. The fields of a subclass determine data and model completely.

    Random numbers come from torch's global generator. The training loop seeds it before every step,
    so a resumed run continues exactly where it was interrupted.
    """

    metric: ClassVar[str]  # key of `evaluate`'s result that selects the best weights
    larger_is_better: ClassVar[bool]

    made_up: bool = field(default=False, kw_only=True)  # use small synthetic data, for smoke runs

    @abstractmethod
    def items(self) -> int:
        """Return the number of training items in an epoch."""

    @abstractmethod
    def build(self) -> nn.Module:
        """Build the untrained model."""

    @abstractmethod
    def batch(self, items: Tensor) -> Any:
        """Return the input of `loss` for training items (B,): tensors on the CPU."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over the items of a batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module, split: str) -> Metrics:
        """Measure a model in eval mode, without gradients, on "validation" or "test"."""


TaskT = TypeVar("TaskT", bound=Task, covariant=True)


@dataclass(frozen=True)
class Schedule:
    """Multiplies the learning rate by `factor` at each milestone, a fraction of the training."""

    milestones: tuple[float, ...] = (0.2, 0.6, 0.8)
    factor: float = 0.1

    def at(self, progress: float) -> float:
        """Return the multiplier after this fraction of the training."""
        return self.factor ** sum(progress >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up of the learning rate, then cosine decay to zero."""

    warmup: float = 0.05

    def at(self, progress: float) -> float:
        """Return the multiplier after this fraction of the training."""
        return cosine(progress, self.warmup)


@dataclass(frozen=True)
class Training(Generic[TaskT]):
    """One fit of a task. The defaults are the paper's.

    Args:
        task: the task to learn.
        epochs: number of passes over the training items.
        batch_size: items per step, over all processes.
        rate: learning rate of Adam.
        weight_decay: L2 penalty of Adam.
        schedule: learning rate schedule.
        clip: largest gradient norm; None to disable clipping.
        validations: number of validations; the best weights are kept.
        patience: validations without improvement before early stopping; None to disable it.
        seed: seed of the initial weights and of all random draws.
        start: training of a model of the same shape; its weights are the initial weights.
    """

    task: TaskT
    epochs: int = 200
    batch_size: int = 256
    rate: float = 1e-3
    weight_decay: float = 5e-4
    schedule: Schedule | Cosine = Schedule()
    clip: float | None = None
    validations: int = 20
    patience: int | None = None
    seed: int = 0
    start: Training[TaskT] | None = None

    @property
    def key(self) -> str:
        """Hash of the settings; equal settings have the same key."""
        text = json.dumps(settings_of(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Run:
    """One point of a table or a curve.

    Args:
        method: name of the method in tables and figures (see style.METHODS).
        training: training to run first; None if there is nothing to train.
        measure: function of the trained model in eval mode (None without training).
        settings: what distinguishes this run from others of the method, such as {"points": 100}.
        seed: seed of the run, used by runs without training.
    """

    method: str
    training: Training[Task] | None
    measure: Callable[[Any], Metrics]
    settings: Mapping[str, str | int | float] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Recipe:
    """The runs behind one table or figure.

    Args:
        number: position in RESULTS.md.
        name: name on the command line.
        title: heading in RESULTS.md.
        claim: what the paper claims, with its numbers if it gives any.
        runs: function of size and seed that returns the runs.
        section: function of the records of one size that makes tables and figures.
        headline: function of the same records that returns the result in one line; the recipe's
            docstring repeats it.
        verdict: why the claim holds or does not; a paragraph of RESULTS.md, after the outcome.
        cut: differences of size "small" from the paper's setup.
        minutes: run time of size "small" on two cores, measured or estimated.
        summary: the claim in one line, for the first table of RESULTS.md; may only use numbers that
            the recipe's tables contain.
        comparisons: function of the records that returns the paired comparisons by which the claim
            is judged; the summary shows the first one. `against` and `changes` of recipes/common.py
            make them.
        outcome: whether the claim holds, for a recipe without comparisons only.
        new: whether the claim is ours, not the paper's.
        test_items: number of items of the test split, if the measure is an accuracy.
        seeds: number of seeds for each size; three at size "small" if a run takes more than three
            CPU minutes.
    """

    number: int
    name: str
    title: str
    claim: str
    runs: Callable[[Size, int], Sequence[Run]]
    section: Callable[[Sequence[Record]], Section]
    headline: Callable[[Sequence[Record]], str]
    verdict: str
    cut: str
    minutes: float
    summary: str = ""
    comparisons: Callable[[Sequence[Record]], Sequence[Comparison]] = lambda records: ()
    outcome: Outcome | None = None
    new: bool = False
    test_items: int | None = None
    seeds: Mapping[Size, int] = field(
        default_factory=lambda: {Size.SMOKE: 1, Size.SMALL: 5, Size.PAPER: 3}
    )


def as_json(value: Any) -> Any:
    """Return the settings as they appear in a record."""
    return json.loads(json.dumps(settings_of(value)))


def settings_of(value: Any) -> Any:
    """Convert a frozen dataclass to plain data for JSON, with class names.

    Fields that are None are left out. So adding an option with default None does not change the
    settings of older records.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: settings_of(getattr(value, f.name)) for f in dataclasses.fields(value)}
        there = {name: setting for name, setting in fields.items() if setting is not None}
        return {"kind": type(value).__name__, **there}
    if isinstance(value, tuple | list):
        return [settings_of(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): settings_of(item) for key, item in value.items()}
    return value
