"""setfold.fold on a set in chunks, compared with one call on the whole set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

import setfold
from bench.encoders import ENCODERS, FAMILIES
from bench.plan import FOLD_CHUNK, NARROW, Plan
from bench.results import FoldCost, Results, Way
from bench.speed import one_encoding, one_pass
from bench.timing import Contender, Timings, interleaved

Source = Callable[[], Iterator[Tensor]] | tuple[Tensor, ...] | Tensor


class Gradient(NamedTuple):
    """Gradient arguments of setfold.fold."""

    gradient: str = "exact"
    samples: int = 1


EXACT = Gradient()
GRADIENTS = {
    Way.EXACT: EXACT,
    Way.TENSOR: EXACT,
    Way.UNBIASED_1: Gradient("unbiased", 1),
    Way.UNBIASED_4: Gradient("unbiased", 4),
    Way.UNBIASED_16: Gradient("unbiased", 16),
    Way.SUBSET: Gradient("subset", 1),
}


@cache
def passes() -> dict[str, int]:
    """Return the number of passes of each encoder that folds, by name."""
    ours = (pair.ours for family in FAMILIES for pair in family.pairs)
    found = {peer.name: cast(setfold.SetEncoder, peer.build(NARROW)).passes for peer in ours}
    return {name: number for name, number in found.items() if number is not None}


def stream(length: int, size: int = FOLD_CHUNK) -> Source:
    """Return a re-openable stream that generates chunks on demand."""

    def opened() -> Iterator[Tensor]:
        draw = torch.Generator().manual_seed(0)
        for first in range(0, length, size):
            chunk = torch.empty(1, min(size, length - first), NARROW.dim_in)
            yield chunk.uniform_(-1, 1, generator=draw)

    return opened


def one_fold(module: nn.Module, source: Source, backward: bool, how: Gradient = EXACT) -> Contender:
    """Return a function that folds a set; with backward, also computes all gradients."""
    encoder = cast(setfold.SetEncoder, module)
    encode = partial(setfold.fold, encoder, source, **how._asdict())
    return one_encoding(encoder, encode, backward)


def compare_fold(results: Results, plan: Plan, name: str) -> None:
    """Time one encoder on a set in chunks and on the whole set; there is no target for this."""
    length = max(plan.lengths)
    elements = torch.randn(1, length, NARROW.dim_in)

    def timed(backward: bool) -> Timings:
        module = ENCODERS[name].build(NARROW)
        runs = {
            "whole": one_pass(module, elements, backward),
            "fold": one_fold(module, elements.split(FOLD_CHUNK, 1), backward),
        }
        return interleaved(runs, plan.for_encoders)

    cost = FoldCost(name, passes()[name], length, forward=timed(False), training=timed(True))
    results.folds.append(cost)
