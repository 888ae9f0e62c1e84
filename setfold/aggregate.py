"""What a state keeps, and what is read from it.

A `Statistic` is what a state keeps: a commutative monoid on a few tensors, with an identity, a way
to absorb a chunk and a way to join. An `Aggregate` is one way of reading a statistic; several
aggregates may read the same one (sum, mean, weighted_mean and mass all read sums), so a list of
aggregates costs no more state than it must.

    aggregate       reads                                  statistic
    sum             sum_i c_ij                             sum
    mean            sum_i c_ij / n                         sum
    weighted_mean   sum_i W_ij v_i / sum_i W_ij            sum
    mass            sum_i W_ij / n                         sum
    max, min        max_i c_ij, min_i c_ij                 max, min
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from setfold.errors import InputError, NonFiniteError, NotRemovableError
from setfold.kernels.precision import accumulator_dtype

Parts = tuple[Tensor, ...]  # the tensors of one statistic, each (B, ...)
Statistics = dict[str, Parts]  # by the name of the statistic: what a state keeps
Count = Tensor | int  # elements by set (B,), or one positive number for all of them


class Statistic(ABC):
    """A commutative monoid on tuples of tensors: what a state keeps of the elements it saw."""

    name: ClassVar[str]
    removable: ClassVar[bool] = False
    empty: ClassVar[float]

    def identity(self, *shapes: tuple[int, ...], device: torch.device) -> Parts:
        """The parts of sets without elements, by their shapes (B, ...)."""
        dtype = accumulator_dtype(device)
        return tuple(torch.full(shape, self.empty, dtype=dtype, device=device) for shape in shapes)

    @abstractmethod
    def absorb(self, values: Tensor, mask: Tensor | None) -> Tensor:
        """Aggregate values (B, n, ...) over the elements that the mask (B, n) shows."""

    @abstractmethod
    def join(self, left: Parts, right: Parts) -> Parts:
        """The parts of the union of two disjoint sets."""

    def remove(self, left: Parts, right: Parts) -> Parts:
        """The parts of `left` without the elements of `right`."""
        raise NotRemovableError(
            f"elements cannot be removed from a {self.name}: what was second is not in the state. "
            'Use aggregate="sum", "mean" or "weighted_mean", or fold the remaining elements anew.'
        )


class Sum(Statistic):
    """Running totals."""

    name, removable, empty = "sum", True, 0.0

    def absorb(self, values: Tensor, mask: Tensor | None) -> Tensor:
        """Add up what the mask shows.

        >>> Sum().absorb(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, False, True]]))
        tensor([5.], dtype=torch.float64)
        """
        if mask is not None:
            values = values * _spread(mask, values)
        return values.sum(1, dtype=accumulator_dtype(values.device))

    def join(self, left: Parts, right: Parts) -> Parts:
        return tuple(a + b for a, b in zip(left, right, strict=True))

    def remove(self, left: Parts, right: Parts) -> Parts:
        return tuple(a - b for a, b in zip(left, right, strict=True))


class Max(Statistic):
    """Running element-wise maxima."""

    name, empty = "max", -torch.inf

    def absorb(self, values: Tensor, mask: Tensor | None) -> Tensor:
        if values.shape[1] == 0:
            return values.new_full((values.shape[0], *values.shape[2:]), self.empty)
        if mask is not None:
            values = values.masked_fill(~_spread(mask, values), self.empty)
        return values.amax(1)

    def join(self, left: Parts, right: Parts) -> Parts:
        return tuple(torch.maximum(a, b) for a, b in zip(left, right, strict=True))


class Min(Statistic):
    """Running element-wise minima: the maximum of the negated values, negated."""

    name, empty = "min", torch.inf

    def absorb(self, values: Tensor, mask: Tensor | None) -> Tensor:
        return -Max().absorb(-values, mask)

    def join(self, left: Parts, right: Parts) -> Parts:
        return tuple(torch.minimum(a, b) for a, b in zip(left, right, strict=True))


STATISTICS: dict[str, Statistic] = {s.name: s for s in (Sum(), Max(), Min())}


def join(left: Statistics, right: Statistics) -> Statistics:
    """The statistics of the union of disjoint sets, set by set."""
    return {name: STATISTICS[name].join(parts, right[name]) for name, parts in left.items()}


def remove(left: Statistics, right: Statistics) -> Statistics:
    """The statistics of `left` without the elements of `right`, set by set."""
    return {name: STATISTICS[name].remove(parts, right[name]) for name, parts in left.items()}


def refuse_non_finite(found: Statistics) -> None:
    """Raise if statistics are not finite; where an empty set is infinite, that is allowed."""
    for name, parts in found.items():
        for part in parts:
            empty = STATISTICS[name].empty
            shown = part if math.isfinite(empty) else torch.where(part == empty, 0, part)
            if not math.isfinite(shown.detach().sum().item()) and not bool(shown.isfinite().all()):
                raise NonFiniteError(
                    f"the elements are finite, but their {name} is not: they are too large, or the feature "
                    "network makes NaN or infinity of them. The state is as it was."
                )


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
    return value / (_spread(count.clamp_min(1), value) if isinstance(count, Tensor) else count)


def _weighted_mean(value: Tensor, count: Count, mass: Tensor) -> Tensor:
    return value / torch.where(mass > 0, mass, 1).unsqueeze(-1)


def _mean_mass(value: Tensor, count: Count, mass: Tensor) -> Tensor:
    return _mean(mass.unsqueeze(-1), count, mass)


def _extremum(value: Tensor, count: Count, mass: Any) -> Tensor:
    return value.masked_fill(_spread(count == 0, value), 0) if isinstance(count, Tensor) else value


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


def _spread(per_set: Tensor, like: Tensor) -> Tensor:
    """Trailing dimensions of size 1 until `per_set` broadcasts against `like`."""
    return per_set.reshape(*per_set.shape, *(1,) * (like.dim() - per_set.dim()))
