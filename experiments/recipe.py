"""READ FIRST: what an experiment is made of.

    Task      data, model, loss and metric of one problem; tasks/ has one file for each
    Training  a task fitted once: with one seed, for so many epochs, at such a rate
    Run       one point of a table or a curve: what is trained, and what is then measured
    Recipe    all runs behind one table or figure of the paper; recipes/ has one file for each

All of them are frozen dataclasses, so that a variant is `dataclasses.replace(...)`, settings can be
written into a record, and two recipes that ask for the same training share it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not wait for it
    from torch import Tensor, nn

    from experiments.records import Record
    from experiments.report import Section

Metrics = dict[str, float | list[float] | str]


class Size(StrEnum):
    """How much of an experiment to run."""

    SMOKE = "smoke"  # seconds, on made-up data
    SMALL = "small"  # minutes on two cores, on real data: the numbers of RESULTS.md
    PAPER = "paper"  # the paper's own setting, for a GPU


@dataclass(frozen=True)
class Task(ABC):
    """One problem. Fields of subclasses are all that decides data and model.

    Whatever is random draws from torch's global generator, which the training loop seeds anew for
    every step: so a run that is resumed goes on as if it had never stopped.
    """

    metric: ClassVar[str]  # of `evaluate`: decides which weights are kept
    larger_is_better: ClassVar[bool]

    made_up: bool = field(default=False, kw_only=True)  # the data's small double, for smoke runs

    @abstractmethod
    def items(self) -> int:
        """How many training items there are in an epoch."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The model, untrained."""

    @abstractmethod
    def batch(self, items: Tensor) -> Any:
        """What `loss` needs of some training items (B,): tensors, on the CPU."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch, a mean over its items.

        The model is wrapped for several processes and mixed precision: call it, once, and reach for
        nothing else of it. What a loss needs beyond one forward pass belongs into `forward`.
        """

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
        """The multiplier when this fraction of the training is done."""
        return self.factor ** sum(progress >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class Cosine:
    """Warms the learning rate up linearly, then lets it fall along half a cosine to zero."""

    warmup: float = 0.05

    def at(self, progress: float) -> float:
        """The multiplier when this fraction of the training is done."""
        if progress < self.warmup:
            return progress / self.warmup
        return 0.5 * (1 + math.cos(math.pi * (progress - self.warmup) / (1 - self.warmup)))


@dataclass(frozen=True)
class Training(Generic[TaskT]):
    """A task fitted once. The defaults are the paper's.

    Args:
        task: what is learned.
        epochs: times that every training item is seen.
        batch_size: items in a step, over all processes.
        rate: learning rate of Adam.
        weight_decay: added to the gradient, as Adam has it.
        schedule: of the learning rate.
        clip: largest norm of the gradient; None for any.
        validations: how often the model is validated; the best weights are kept.
        patience: validations without improvement after which training stops; None to go on.
        seed: of the initial weights and all that is drawn.
        start: another training of a model of the same shape, whose weights this one begins with.
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
        """A name for the weights that come of this, the same for equal settings."""
        text = json.dumps(settings_of(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Run:
    """One point of a table or a curve.

    Args:
        method: whose it is, as tables and figures name it (see style.METHODS).
        training: what is trained first; None where nothing is.
        measure: what is then measured; gets the trained model in eval mode (None without training).
        settings: what distinguishes this run from others of the method, such as {"points": 100}.
        seed: of the run, for those without training.
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
        number: its place in RESULTS.md.
        name: as the command line has it.
        title: as RESULTS.md has it.
        claim: what the paper says, in its own sense, and its numbers where it gives some; the first
            sentence stands for it in the table at a glance.
        runs: the runs of a size with a seed.
        seeds: how many seeds each size is run with.
        section: draws the figure and sets the table, from the records of one size.
        headline: our result in one line, from the same records; stands in the recipe's docstring.
        verdict: does the claim hold here, and why: the paragraph that RESULTS.md prints.
        cut: what the small size leaves out against the paper.
        minutes: cost of the small size on two cores: as seen, or estimated before it was run.
        holds: the verdict in a word or a few, such as "yes" or "only with slots apart".
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
    holds: str = "open"
    seeds: Mapping[Size, int] = field(
        default_factory=lambda: {Size.SMOKE: 1, Size.SMALL: 3, Size.PAPER: 3}
    )


def as_json(value: Any) -> Any:
    """The settings as they are when read from a record."""
    return json.loads(json.dumps(settings_of(value)))


def settings_of(value: Any) -> Any:
    """A frozen dataclass as plain data for JSON, with the names of classes.

    What is None is left out: it is not there. So an option that comes later, and is None where nobody
    asks for it, leaves the settings of older records as they are.
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
