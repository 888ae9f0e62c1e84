"""What a law is, what it is held to, and when it applies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

Model = Any  # anything with the verbs of a StreamingSetEncoder, or just a forward
Pair = tuple[Tensor, Tensor]  # what came, what was expected


@dataclass(frozen=True)
class Case:
    """One situation to hold a law to.

    Attributes:
        elements: (B, n, d).
        lengths: how the elements are cut into chunks; zeros are empty chunks.
        chunk_order: in which order the chunks come.
        permutation: (n,), an order of the elements.
        mask: (B, n), True where present.
        seed: for what a law draws itself.
    """

    elements: Tensor
    lengths: tuple[int, ...]
    chunk_order: tuple[int, ...]
    permutation: Tensor
    mask: Tensor
    seed: int = 0

    @cached_property
    def chunks(self) -> list[Tensor]:
        """The elements in chunks, in the order in which they come."""
        pieces = self.elements.split(list(self.lengths), 1)
        return [pieces[i] for i in self.chunk_order]

    @property
    def batch_size(self) -> int:
        return self.elements.shape[0]

    def describe(self) -> str:
        """The case in words."""
        batch, length, width = self.elements.shape
        sets = "1 set" if batch == 1 else f"{batch} sets"
        chunks = f"in chunks of {list(self.lengths)}"
        return f"{sets} of {length} x {width} elements {chunks}, seed {self.seed}"


@dataclass(frozen=True)
class Law:
    """A law: its name, what it says, and how to put it to the test.

    Attributes:
        name: a word or three.
        statement: one sentence.
        pairs: what must agree, in one case.
        obstacle: why the law does not apply to a model, or None.
        once: whether it costs so much that one case must do.
        slack: a factor on the tolerance, where rounding is passed on through a whole network.
    """

    name: str
    statement: str
    pairs: Callable[[Model, Case], Iterator[Pair]]
    obstacle: Callable[[Model], str | None]
    once: bool = False
    slack: float = 1.0

    def error(self, model: Model, case: Case) -> float:
        """The largest difference, relative to the largest number expected."""
        return max((difference(*pair) for pair in self.pairs(model, case)), default=0.0)


LAWS: list[Law] = []


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number expected; infinite for other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    if found.numel() == 0 or torch.equal(found, expected):
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    same = found == expected  # infinities of the same sign agree
    gap = torch.where(same, 0, (found - expected).abs()).max()
    finite = expected[expected.isfinite()].abs()
    scale = finite.max() if finite.numel() else torch.ones(())
    error = float(gap / scale.clamp_min(torch.finfo(torch.float64).tiny))
    return error if error == error else float("inf")


def streams(model: Model) -> str | None:
    """Why a model is no fold, or None."""
    missing = [verb for verb in ("initial_state", "update", "readout") if not hasattr(model, verb)]
    return f"has no {', '.join(missing)}: all elements must be there at once" if missing else None


def folds(model: Model) -> str | None:
    """Why the chunks of a set cannot be folded, in however many passes, or None."""
    return None if (getattr(model, "passes", None) or 1) > 1 else streams(model)


def takes(argument: str) -> Callable[[Model], str | None]:
    """An obstacle: `update`, or the forward of a model that is no fold, must take an argument."""

    def obstacle(model: Model) -> str | None:
        no_fold = streams(model)
        verb = model.forward if no_fold else model.update
        if argument in inspect.signature(verb).parameters:
            return None
        return no_fold or f"update takes no {argument}"

    return obstacle


def law(
    name: str,
    statement: str,
    obstacle: Callable[[Model], str | None] = streams,
    once: bool = False,
    slack: float = 1.0,
) -> Callable[[Callable[[Model, Case], Iterator[Pair]]], Law]:
    """Make a law of a generator of pairs, and list it."""

    def make(pairs: Callable[[Model, Case], Iterator[Pair]]) -> Law:
        LAWS.append(made := Law(name, statement, pairs, obstacle, once, slack))
        return made

    return make
