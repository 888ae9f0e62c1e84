"""Aggregates: what users choose to read from a state.

An `Aggregate` is one way of reading a field. Several aggregates may read the same field: sum, mean,
weighted_mean and mass all read sums, so a list of them adds no more state than it needs.

    aggregate       value                                  field
    sum             sum_i c_ij                             sum
    mean            sum_i c_ij / n                         sum
    weighted_mean   sum_i W_ij v_i / sum_i W_ij            sum
    mass            sum_i W_ij / n                         sum
    max, min        max_i c_ij, min_i c_ij                 max, min

This file is used by encoders that let users choose. An encoder with one fixed readout writes it
directly in its `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from setfold.core.arguments import words_of
from setfold.core.statistic import Max, Min, Reduction, Statistics, Sum, spread
from setfold.kernels.modes import needs_plain_formula

Count = Tensor | int  # elements of each set (B,), or one positive number for all sets
FIELDS: dict[str, Reduction] = {"sum": Sum(), "max": Max(), "min": Min()}


@dataclass(frozen=True)
class Aggregate:
    """One way of reading a field.

    Attributes:
        name: what users write.
        field: the field that it reads, a key of `FIELDS`.
        finish: (value (B, ..., p), count, mass (B, ...)) -> readout (B, ..., width); zeros for an
            empty set, whose sums are zero and whose maximum is infinite.
        needs_mass: whether it reads the weights, which an encoder without weights does not have.
        is_quotient: whether value and mass may be multiplied by the same factor. The mass may then
            be tiny, and must not underflow.
        cancels: whether it is linear in the weights, so that attention cancels where slots are
            added up.
        width: numbers per slot; None for as many as the value has.
    """

    name: str
    field: str
    finish: Callable[[Tensor, Count, Any], Tensor]
    needs_mass: bool = False
    is_quotient: bool = False
    cancels: bool = False
    width: int | None = None


def mean_of(total: Tensor, count: Count) -> Tensor:
    """A total (B, ...) divided by the number of elements; zeros for an empty set."""
    return total / (spread(count.clamp_min(1), total) if isinstance(count, Tensor) else count)


def weighted_mean_of(total: Tensor, mass: Tensor) -> Tensor:
    """A weighted total (B, ..., p) divided by the sum of its weights (B, ...); zeros for none."""
    return total / torch.where(mass > 0, mass, 1).unsqueeze(-1)


def _sum(value: Tensor, count: Count, mass: Any) -> Tensor:
    return value


def _mean(value: Tensor, count: Count, mass: Any) -> Tensor:
    return mean_of(value, count)


def _weighted_mean(value: Tensor, count: Count, mass: Tensor) -> Tensor:
    return weighted_mean_of(value, mass)


def _mean_mass(value: Tensor, count: Count, mass: Tensor) -> Tensor:
    return mean_of(mass.unsqueeze(-1), count)


def _extremum(value: Tensor, count: Count, mass: Any) -> Tensor:
    return value.masked_fill(spread(count == 0, value), 0) if isinstance(count, Tensor) else value


AGGREGATES: dict[str, Aggregate] = {
    a.name: a
    for a in (
        Aggregate("sum", "sum", _sum, cancels=True),
        Aggregate("mean", "sum", _mean, cancels=True),
        Aggregate("weighted_mean", "sum", _weighted_mean, needs_mass=True, is_quotient=True),
        Aggregate("mass", "sum", _mean_mass, needs_mass=True, cancels=True, width=1),
        Aggregate("max", "max", _extremum),
        Aggregate("min", "min", _extremum),
    )
}


def parse_aggregates(aggregate: str | Sequence[str], *, weighted: bool) -> tuple[Aggregate, ...]:
    """Look up one aggregate or several, in the order in which they are concatenated.

    Args:
        aggregate: a name or a sequence of names.
        weighted: whether the encoder weights its elements, so that there is a mass to read.

    >>> [a.name for a in parse_aggregates(["weighted_mean", "max"], weighted=True)]
    ['weighted_mean', 'max']
    """
    allowed = [a.name for a in AGGREGATES.values() if weighted or not a.needs_mass]
    names = words_of(allowed, "aggregate", aggregate)
    return tuple(AGGREGATES[name] for name in names)


def fields_of(aggregates: Sequence[Aggregate]) -> tuple[str, ...]:
    """The names of the fields that some aggregates read, each once.

    >>> fields_of(parse_aggregates(["sum", "max", "mean"], weighted=False))
    ('sum', 'max')
    """
    return tuple(dict.fromkeys(a.field for a in aggregates))


def read(
    aggregates: Sequence[Aggregate],
    values: dict[str, Tensor],
    count: Count,
    mass: Tensor | None,
    scale: Tensor | None = None,
) -> Tensor:
    """Read all aggregates and concatenate them along the last dimension; empty sets read as zeros.

    Args:
        aggregates: which ones, in order.
        values: by field, (B, ..., p).
        count: the number of elements, (B,) or one for all sets.
        mass: (B, ...), the sum of the weights, where elements are weighted.
        scale: (B, ...), a factor that the values of the field "sum" and the mass lack; None for 1.
    """
    scaled, whole = values, mass
    if scale is not None and mass is not None:
        scaled = values | {"sum": values["sum"] * scale.unsqueeze(-1)}
        whole = mass * scale
    readouts = [
        a.finish(values[a.field], count, mass)
        if a.is_quotient
        else a.finish(scaled[a.field], count, whole)
        for a in aggregates
    ]
    return readouts[0] if len(readouts) == 1 else torch.cat(readouts, -1)


def unshared(encoding: Tensor, statistics: Statistics) -> Tensor:
    """The encoding, copied if writing to it would change the state."""
    if needs_plain_formula() or encoding.is_meta:
        return encoding
    address = encoding.untyped_storage().data_ptr()
    parts = (part for parts in statistics.values() for part in parts)
    shared = any(part.untyped_storage().data_ptr() == address for part in parts)
    return encoding.clone() if shared else encoding
