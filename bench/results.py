"""Dataclasses for measurements and targets."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any, NamedTuple

from bench.peers import OURS
from bench.plan import Plan, Shape, power
from bench.timing import Timings

MEGABYTE = 1e6
TORCH_KERNELS = "torch kernels"


@dataclass(frozen=True)
class Cell:
    """Timings of all contenders for one shape and set size, with or without backward pass.

    Attributes:
        shape, length, backward: what was timed.
        timings: times of all contenders.
        base: the contender that the others are compared with.
    """

    shape: Shape
    length: int
    backward: bool
    timings: Timings
    base: str = OURS

    @property
    def column(self) -> str:
        """Return the heading of its column: f or f+b, and n."""
        return f"{'f+b' if self.backward else 'f'} {power(self.length)}"

    def described(self) -> dict[str, Any]:
        names = list(self.timings.samples)
        return {
            "shape": self.shape._asdict(),
            "n": self.length,
            "pass": pass_name(self.backward),
            "rounds": self.timings.rounds,
            "seconds": {name: self.timings.seconds(name) for name in names},
            f"time / {self.base}": {name: self.timings.ratio(name, self.base) for name in names},
        }


@dataclass(frozen=True)
class Roofline:
    """Arithmetic and reading of one pass, compared with the limits of the core.

    Attributes:
        shape, length, backward: what was encoded.
        operations, bytes_read: counted work of one pass.
        seconds: time of one pass.
        peak_operations, peak_bytes: limits per second, measured in the same rounds.
    """

    shape: Shape
    length: int
    backward: bool
    operations: float
    bytes_read: float
    seconds: float
    peak_operations: float
    peak_bytes: float

    @property
    def intensity(self) -> float:
        """Return operations per byte."""
        return self.operations / self.bytes_read

    @property
    def arithmetic_share(self) -> float:
        return self.operations / self.seconds / self.peak_operations

    @property
    def reading_share(self) -> float:
        return self.bytes_read / self.seconds / self.peak_bytes

    def described(self) -> dict[str, Any]:
        shares = {
            "share of peak arithmetic": self.arithmetic_share,
            "share of read bandwidth": self.reading_share,
        }
        return {**asdict(self), "shape": self.shape._asdict(), **shares}


class Way(StrEnum):
    """How a set is processed: in one call or in chunks.

    Like `TRAINED`, the ways after it are training steps; they differ in the kind of gradient, or
    train on many sets at once.
    """

    WHOLE = "forward+backward"
    STREAMED = "fold, forward"
    TRAINED = "fold, forward+backward"
    EXACT = "fold, exact"
    TENSOR = "fold, exact, one tensor"
    UNBIASED_1 = "fold, unbiased, 1 chunk"
    UNBIASED_4 = "fold, unbiased, 4 chunks"
    UNBIASED_16 = "fold, unbiased, 16 chunks"
    SUBSET = "fold, subset of 1 chunk"
    EQUAL = "equal groups"
    SKEWED = "skewed groups"


class MemoryCase(NamedTuple):
    """A memory measurement: module, way and number of elements."""

    name: str
    way: Way
    length: int


@dataclass(frozen=True)
class FoldCost:
    """Timings of an encoder on a set in chunks ("fold") and in one call ("whole")."""

    name: str
    passes: int
    length: int
    forward: Timings
    training: Timings

    def described(self) -> dict[str, Any]:
        both = {pass_name(False): self.forward, pass_name(True): self.training}
        return {
            "name": self.name,
            "passes": self.passes,
            "n": self.length,
            "whole, seconds": {name: timings.seconds("whole") for name, timings in both.items()},
            "fold / whole": {
                name: timings.ratio("fold", "whole") for name, timings in both.items()
            },
        }


@dataclass(frozen=True)
class StepCost:
    """Timings of the training steps of one model on sets of one size."""

    model: str
    length: int
    timings: Timings

    def described(self) -> dict[str, Any]:
        names = list(self.timings.samples)
        return {
            "model": self.model,
            "n": self.length,
            "rounds": self.timings.rounds,
            "seconds": {name: self.timings.seconds(name) for name in names},
            f"time / {Way.EXACT}": {name: self.timings.ratio(name, Way.EXACT) for name in names},
        }


@dataclass(frozen=True)
class FilesCost:
    """Timings and memory of all contenders on sets in files."""

    rows: int
    files: int
    timings: Timings
    megabytes: dict[str, float]  # peak of the whole process

    def described(self) -> dict[str, Any]:
        names = list(self.timings.samples)
        return {
            "elements": self.rows,
            "files": self.files,
            "rounds": self.timings.rounds,
            "seconds": {name: self.timings.seconds(name) for name in names},
            "megabytes": self.megabytes,
        }


@dataclass(frozen=True)
class FramesCost:
    """Timings of all contenders on sets in data frames."""

    rows: int
    timings: Timings

    def described(self) -> dict[str, Any]:
        names = list(self.timings.samples)
        return {
            "elements": self.rows,
            "rounds": self.timings.rounds,
            "seconds": {name: self.timings.seconds(name) for name in names},
        }


@dataclass(frozen=True)
class GroupsCost:
    """Timings of all aggregations on rows in groups."""

    layout: Way
    groups: int
    backward: bool
    timings: Timings

    def described(self) -> dict[str, Any]:
        names = list(self.timings.samples)
        return {
            "groups": self.groups,
            "layout": self.layout,
            "pass": pass_name(self.backward),
            "rounds": self.timings.rounds,
            "seconds": {name: self.timings.seconds(name) for name in names},
        }


@dataclass(frozen=True)
class LiveCost:
    """Seconds of a batch of live sets, by contender, one number per round.

    Attributes:
        database: the database.
        kept, touched: numbers of sets that are kept, and that a batch touches.
        wall, cpu: the time, and the CPU time of this process and of the database.
    """

    database: str
    kept: int
    touched: int
    wall: Timings
    cpu: Timings

    def described(self) -> dict[str, Any]:
        names = list(self.wall.samples)
        return {
            "database": self.database,
            "sets kept": self.kept,
            "sets touched": self.touched,
            "seconds": {name: self.wall.seconds(name) for name in names},
            "CPU seconds": {name: self.cpu.seconds(name) for name in names},
        }


class Rate(NamedTuple):
    """What one core does in a second."""

    what: str
    per_second: float


@dataclass(frozen=True)
class Load:
    """What a service did under load.

    Attributes:
        clients: the number of clients that sent updates.
        updates: the seconds of each update.
        seconds: the duration.
        service_cpu, client_cpu: CPU seconds of the service, and of all clients.
        before, after: memory of the service in MB.
        reads: the seconds of each read of one set, by one client.
        failed: answers of requests that failed.
    """

    clients: int
    updates: list[float]
    seconds: float
    service_cpu: float
    client_cpu: float
    before: float
    after: float
    reads: list[float]
    failed: list[str]

    @property
    def rate(self) -> float:
        """Return the updates per second."""
        return len(self.updates) / self.seconds

    def described(self) -> dict[str, Any]:
        return {
            "clients": self.clients,
            "updates per second": self.rate,
            "median update, seconds": median(self.updates),
            "CPU seconds of an update": self.service_cpu / len(self.updates),
            "megabytes": [self.before, self.after],
            "median read, seconds": median(self.reads),
            "failed": len(self.failed),
        }


TITLES = {
    1: "Speed on whole sets, sum and mean",
    2: "Peak memory above the input",
    3: "Speed on whole sets, max and min",
    4: "Cost and error of float64 states",
    5: "Speed on many short sets at once",
    6: "Speed of small updates in a chain",
    7: "Cost of a softmax over elements",
    8: "Growth of memory with the set size, folds with backward pass",
    9: "Exact gradients of sets larger than memory",
    10: "Sets in files",
    11: "Speed from one element to a million, and on one small set",
    12: "Cost of an element with many slots on a grid",
    13: "Speed of PyG's modules in setfold",
    14: "Sets in data frames",
    15: "Groups of rows, compared with PyG's aggregations",
    16: "Live sets",
}


@dataclass(frozen=True)
class Target:
    """A performance target and its result.

    Attributes:
        number: number of its title in TITLES.
        claim: what is measured.
        measured: measured value; the worst if there are several.
        bound: bound of the target.
        unit: "x" for a multiple of speed or cost, such as "MB", or "" for a relative error.
        at_least: whether the bound is a lower bound.
        shape: (d, K, d_out), if the target is for one shape.
        detail: all values if there are several.
    """

    number: int
    claim: str
    measured: float
    bound: float
    unit: str = "x"
    at_least: bool = True
    shape: Shape | None = None
    detail: str = ""

    @property
    def holds(self) -> bool:
        return (self.measured >= self.bound) if self.at_least else (self.measured <= self.bound)

    @property
    def shown(self) -> str:
        return self._with_unit(self.measured)

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self._with_unit(self.bound)}"

    def _with_unit(self, value: float) -> str:
        if self.unit == "x":
            return f"{value:.2f}×"
        if not self.unit:
            return f"{value:.1e}"
        digits = 2 if self.unit == "ms" else 1 if value < 1_000 else 0
        return f"{value:,.{digits}f} {self.unit}"

    def described(self) -> dict[str, Any]:
        shape = None if self.shape is None else self.shape._asdict()
        return {**asdict(self), "shape": shape, "holds": self.holds}


@dataclass
class Results:
    """All measurements of a run.

    Attributes:
        plan: sizes and effort of the run.
        cells: timings of the peers.
        encoder_cells: timings of every encoder.
        instruction_sets: timings of compiled kernels and of torch kernels.
        rooflines: arithmetic and reading, compared with the limits of the core.
        recycling: whether the allocator kept freed memory where time was measured.
        folds: timings of folds.
        memory: peak memory above the input after warm-up, in megabytes.
        training_steps: timings of training steps.
        files: measurements of sets in files.
        frames: measurements of sets in data frames.
        groups: timings of aggregations.
        live: timings of batches of live sets.
        rates: what one core does with live sets.
        load: the service of live sets under load; None if it was not measured.
        omissions: measurements that were left out, and why.
        durations: name and seconds of each step of the run.
        targets: the targets and their results.
    """

    plan: Plan
    cells: list[Cell] = field(default_factory=list)
    encoder_cells: list[Cell] = field(default_factory=list)
    instruction_sets: list[Cell] = field(default_factory=list)
    rooflines: list[Roofline] = field(default_factory=list)
    recycling: bool = False
    folds: list[FoldCost] = field(default_factory=list)
    memory: dict[MemoryCase, float] = field(default_factory=dict)
    training_steps: list[StepCost] = field(default_factory=list)
    files: list[FilesCost] = field(default_factory=list)
    frames: list[FramesCost] = field(default_factory=list)
    groups: list[GroupsCost] = field(default_factory=list)
    live: list[LiveCost] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    load: Load | None = None
    omissions: list[str] = field(default_factory=list)
    durations: list[tuple[str, float]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def megabytes(self, name: str, way: Way, length: int) -> float:
        """Return the peak memory of a case; NaN if it was not measured."""
        return self.memory.get(MemoryCase(name, way, length), math.nan)


def pass_name(backward: bool) -> str:
    return "forward+backward" if backward else "forward"
