"""What a law is, the cases it is tested on, and when it applies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

Model = Any  # anything with the methods of a StreamingSetEncoder, or only a forward
Pair = tuple[Tensor, Tensor]  # found, expected


@dataclass(frozen=True)
class Case:
    """Random inputs on which a law is tested.

    Attributes:
        elements: (B, n, d).
        lengths: the lengths of the chunks, which sum to n; 0 is an empty chunk.
        chunk_order: the order of the chunks.
        permutation: (n,), an order of the elements.
        mask: (B, n), True where an element is present.
        seed: for random numbers that the law draws itself.
    """

    elements: Tensor
    lengths: tuple[int, ...]
    chunk_order: tuple[int, ...]
    permutation: Tensor
    mask: Tensor
    seed: int = 0

    @cached_property
    def chunks(self) -> list[Tensor]:
        """The chunks of the elements, in `chunk_order`."""
        pieces = self.elements.split(list(self.lengths), 1)
        return [pieces[i] for i in self.chunk_order]

    @property
    def batch_size(self) -> int:
        return self.elements.shape[0]

    def describe(self) -> str:
        """The case in one line, for reports."""
        batch, length, width = self.elements.shape
        sets = "1 set" if batch == 1 else f"{batch} sets"
        chunks = f"in chunks of {list(self.lengths)}"
        return f"{sets} of {length} x {width} elements {chunks}, seed {self.seed}"


@dataclass(frozen=True)
class Law:
    """A law that a model can satisfy or break.

    Attributes:
        name: a short name.
        statement: one sentence.
        pairs: yields pairs of tensors (found, expected) that must agree, for one case.
        obstacle: returns why the law does not apply to a model, or None if it applies.
        once: whether to test only one case, because the law is slow to test.
        slack: a factor of the tolerance, for laws whose rounding errors grow in a whole network.
    """

    name: str
    statement: str
    pairs: Callable[[Model, Case], Iterator[Pair]]
    obstacle: Callable[[Model], str | None]
    once: bool = False
    slack: float = 1.0

    def error(self, model: Model, case: Case) -> float:
        """The largest error of any pair; see `difference`."""
        return max((difference(*pair) for pair in self.pairs(model, case)), default=0.0)


LAWS: list[Law] = []


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference over the largest expected value; inf if shapes differ."""
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
    """Why a model is not a streaming encoder, or None if it is one."""
    missing = [verb for verb in ("initial_state", "update", "readout") if not hasattr(model, verb)]
    return f"has no {', '.join(missing)}: it needs all elements at once" if missing else None


def folds(model: Model) -> str | None:
    """Why a model cannot be folded in any number of passes, or None if it can."""
    return None if getattr(model, "passes", None) is not None else streams(model)


def takes(argument: str) -> Callable[[Model], str | None]:
    """An obstacle for models without this argument of `update`, or of `forward` if no fold."""

    def obstacle(model: Model) -> str | None:
        not_streaming = streams(model)
        method = model.forward if not_streaming else model.update
        if argument in inspect.signature(method).parameters:
            return None
        return not_streaming or f"update has no argument {argument}"

    return obstacle


def law(
    name: str,
    statement: str,
    obstacle: Callable[[Model], str | None] = streams,
    once: bool = False,
    slack: float = 1.0,
) -> Callable[[Callable[[Model, Case], Iterator[Pair]]], Law]:
    """Decorate a generator of pairs: makes it a `Law` and adds it to LAWS."""

    def decorate(pairs: Callable[[Model, Case], Iterator[Pair]]) -> Law:
        LAWS.append(new := Law(name, statement, pairs, obstacle, once, slack))
        return new

    return decorate
