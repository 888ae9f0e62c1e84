"""What was measured, and what had been promised, as values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from bench.peers import OURS
from bench.plan import Shape
from bench.timing import Timings

MEGABYTE = 1e6


@dataclass(frozen=True)
class Cell:
    """The peers side by side on sets of one size: one shape, one n, with or without backward."""

    shape: Shape
    length: int
    backward: bool
    timings: Timings

    def described(self) -> dict[str, Any]:
        names = list(self.timings.samples)
        return {
            "shape": self.shape._asdict(),
            "n": self.length,
            "pass": pass_name(self.backward),
            "rounds": self.timings.rounds,
            "seconds": {name: self.timings.seconds(name) for name in names},
            f"time / {OURS}": {name: self.timings.ratio(name, OURS) for name in names},
        }


@dataclass(frozen=True)
class MemoryPoint:
    """Peak memory above the input and the warmed-up process, in megabytes, one per process."""

    name: str
    length: int
    samples: tuple[float, ...]

    @property
    def megabytes(self) -> float:
        return median(self.samples)


TITLES = {
    1: "Speed on whole sets, sum and mean",
    2: "Peak memory above the input",
    3: "Speed on whole sets, max and min",
    4: "Cost and error of float64 states",
    5: "Speed on many short sets at once",
    6: "Speed of small updates in a chain",
}


@dataclass(frozen=True)
class Target:
    """A promise and what became of it.

    Attributes:
        number: which of the six titles it belongs to.
        claim: what is measured.
        measured: the value; of several, the one that is furthest from the promise.
        bound: what was promised.
        unit: "x" for a multiple of speed or cost, "MB", or "" for a relative error.
        at_least: whether the bound is a lower one.
        shape: (d, K, d_out), where it is about one.
        by_default: the same with the C library's allocator left to itself, where that matters.
        detail: all of the several values.
    """

    number: int
    claim: str
    measured: float
    bound: float
    unit: str = "x"
    at_least: bool = True
    shape: Shape | None = None
    by_default: float | None = None
    detail: str = ""

    @property
    def holds(self) -> bool:
        return self.met_by(self.measured)

    def met_by(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound

    @property
    def shown(self) -> str:
        return self._with_unit(self.measured)

    @property
    def shown_by_default(self) -> str:
        if self.by_default is None:
            return ""
        verdict = "holds" if self.met_by(self.by_default) else "does not"
        return f"{self._with_unit(self.by_default)} {verdict}"

    @property
    def wanted(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self._with_unit(self.bound)}"

    def _with_unit(self, value: float) -> str:
        if self.unit == "x":
            return f"{value:.2f}×"
        return f"{value:.1f} {self.unit}" if self.unit else f"{value:.1e}"

    def described(self) -> dict[str, Any]:
        shape = None if self.shape is None else self.shape._asdict()
        return {**asdict(self), "shape": shape, "holds": self.holds}


@dataclass
class Results:
    """Everything that a run finds, in the order in which it is found.

    Attributes:
        cells: the peers side by side.
        defaults: by pass, shape and aggregate, the ratios with the default allocator.
        recycling: whether the allocator kept all memory while everything else was measured.
    """

    cells: list[Cell] = field(default_factory=list)
    defaults: dict[tuple[str, Shape, bool], float] = field(default_factory=dict)
    recycling: bool = False
    memory: list[MemoryPoint] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)


def pass_name(backward: bool) -> str:
    return "forward+backward" if backward else "forward"
