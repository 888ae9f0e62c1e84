"""What is read from a state.

An `Aggregate` is one way of reading a statistic; several aggregates may read the same one (sum,
mean, weighted_mean and mass all read sums), so a list of them costs no more state than it must.

    aggregate       reads                                  statistic
    sum             sum_i c_ij                             sum
    mean            sum_i c_ij / n                         sum
    weighted_mean   sum_i W_ij v_i / sum_i W_ij            sum
    mass            sum_i W_ij / n                         sum
    max, min        max_i c_ij, min_i c_ij                 max, min
    attention       sum_i softmax_i(l_ij) v_i              softmax
    variance        sum_i (v_i - mean)^2 / n               moments

The last two are not for choosing: they are what the encoders of those names read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from setfold.core.statistic import spread
from setfold.errors import InputError

Count = Tensor | int  # elements by set (B,), or one positive number for all of them


@dataclass(frozen=True)
class Aggregate:
    """One way of reading a statistic.

    Attributes:
        name: what users write.
        statistic: the name of the statistic that it reads.
        finish: (value (B, ..., p), count, mass (B, ...)) -> reading (B, ..., width); zeros for an
            empty set, whose sums are zero and whose maximum is infinite.
        needs_mass: reads the weights themselves, so that an encoder without weights has none.
        cancels: is linear in the weights, so that attention vanishes where slots are added up.
        width: numbers per slot; None for as many as the value has.
    """

    name: str
    statistic: str
    finish: Callable[[Tensor, Count, Any], Tensor]
    needs_mass: bool = False
    cancels: bool = False
    width: int | None = None


def _total(value: Tensor, count: Count, mass: Any) -> Tensor:
    return value


def _mean(value: Tensor, count: Count, mass: Any) -> Tensor:
    return value / (spread(count.clamp_min(1), value) if isinstance(count, Tensor) else count)


def _weighted_mean(value: Tensor, count: Count, mass: Tensor) -> Tensor:
    return value / torch.where(mass > 0, mass, 1).unsqueeze(-1)


def _mean_mass(value: Tensor, count: Count, mass: Tensor) -> Tensor:
    return _mean(mass.unsqueeze(-1), count, mass)


def _extremum(value: Tensor, count: Count, mass: Any) -> Tensor:
    return value.masked_fill(spread(count == 0, value), 0) if isinstance(count, Tensor) else value


AGGREGATES: dict[str, Aggregate] = {
    a.name: a
    for a in (
        Aggregate("sum", "sum", _total, cancels=True),
        Aggregate("mean", "sum", _mean, cancels=True),
        Aggregate("weighted_mean", "sum", _weighted_mean, needs_mass=True),
        Aggregate("mass", "sum", _mean_mass, needs_mass=True, cancels=True, width=1),
        Aggregate("max", "max", _extremum),
        Aggregate("min", "min", _extremum),
    )
}
ATTENTION = Aggregate("attention", "softmax", _weighted_mean, needs_mass=True)
VARIANCE = Aggregate("variance", "moments", _mean)


def parse_aggregates(aggregate: str | Sequence[str], *, weighted: bool) -> tuple[Aggregate, ...]:
    """Look up one aggregate or several, in the order in which they are read side by side.

    Args:
        aggregate: a name or a sequence of names.
        weighted: whether the encoder weighs its elements, so that there is a mass to read.

    >>> [a.name for a in parse_aggregates(["weighted_mean", "max"], weighted=True)]
    ['weighted_mean', 'max']
    """
    alone = isinstance(aggregate, str) or not isinstance(aggregate, Sequence)
    names: tuple[Any, ...] = (aggregate,) if alone else tuple(aggregate)
    allowed = [a.name for a in AGGREGATES.values() if weighted or not a.needs_mass]
    unknown = [name for name in names if name not in allowed]
    if unknown or not names or len(set(names)) < len(names):
        raise InputError(
            f"aggregate must be one of {', '.join(allowed)}, or a list of different ones; got {aggregate!r}."
        )
    return tuple(AGGREGATES[name] for name in names)


def statistics_of(aggregates: Sequence[Aggregate]) -> tuple[str, ...]:
    """The names of the statistics that some aggregates read, each once.

    >>> statistics_of(parse_aggregates(["sum", "max", "mean"], weighted=False))
    ('sum', 'max')
    """
    return tuple(dict.fromkeys(a.statistic for a in aggregates))


def read(
    aggregates: Sequence[Aggregate], values: dict[str, Tensor], count: Count, mass: Tensor | None
) -> Tensor:
    """Read all aggregates side by side along the last dimension; empty sets read as zeros.

    Args:
        aggregates: which, and in what order.
        values: by statistic, (B, ..., p).
        count: the number of elements, (B,) or one for all sets.
        mass: (B, ...), the sum of weights, where elements are weighed.
    """
    readings = [a.finish(values[a.statistic], count, mass) for a in aggregates]
    return readings[0] if len(readings) == 1 else torch.cat(readings, -1)
