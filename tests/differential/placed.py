"""Slots with places, as a loop over the elements of one set, from the docstring.

The weights jump where an element crosses the reach of a slot or the border of the box. So each
weight is an interval, which includes 0 if rounding decides on which side the element is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import setfold
from tests.differential.arithmetic import (
    STEPS,
    UNKNOWN,
    Arithmetic,
    Bounded,
    exact,
    joined,
    zeros,
)


class Pairs(NamedTuple):
    """One element and all slots."""

    weight: np.ndarray  # (K,)
    low: np.ndarray
    high: np.ndarray
    values: Bounded  # (K, c)

    @property
    def moved(self) -> np.ndarray:
        """How far the weights may be off."""
        return np.maximum(self.high - self.weight, self.weight - self.low)


def placed_slots(
    a: Arithmetic, encoder: setfold.PlacedSlotEncoder, elements: list[Bounded], gone: list[Bounded]
) -> Bounded:
    """The encoding (K, c) of one set."""
    names = encoder.aggregates
    if not elements:
        return zeros(encoder.num_slots, encoder.dim_readout)
    places = _Places(a, encoder)
    kept, lost = ([places.pairs(element) for element in some] for some in (elements, gone))
    found = []
    for name in names:
        if name in ("max", "min"):
            found.append(_extreme(a, kept, 1.0 if name == "max" else -1.0))
        else:
            found.append(_linear(a, name, kept, lost, "variance" in names, encoder))
    return joined(found, axis=1)


class _Places:
    """Places and widths in the units of the grid."""

    def __init__(self, a: Arithmetic, encoder: setfold.PlacedSlotEncoder) -> None:
        self.a, self.encoder = a, encoder
        places = encoder.places
        if isinstance(places, setfold.Grid):
            low, high, shape = (np.array(x, float) for x in (places.low, places.high, places.shape))
            self.spacing = (high - low) / shape
            self.origin = low + self.spacing / 2
            self.lower, self.upper = -0.5 + 0 * shape, shape - 0.5
            indices = np.stack(np.unravel_index(np.arange(places.num_slots), places.shape), -1)
            shift = places.shift
            moved = 0.0 if shift is None else shift.detach().double().numpy()
            self.points = indices + moved
        else:
            points = np.array(places.points)
            self.origin, self.spacing = np.zeros(places.dim), np.ones(places.dim)
            self.lower, self.upper = points.min(0), points.max(0)
            moved = places.coordinates
            self.points = points if moved is None else moved.detach().double().numpy()
        if encoder.log_width is None:
            self.widths = np.broadcast_to(encoder.width, (places.num_slots,))
        else:
            logs = encoder.log_width.detach().double().numpy()
            self.widths = np.broadcast_to(np.exp(logs), (places.num_slots,))

    def pairs(self, element: Bounded) -> Pairs:
        a, encoder = self.a, self.encoder
        columns = encoder.position
        x = element.map(lambda part: part[columns])
        value = (x.value - self.origin) / self.spacing
        size = (x.size + np.abs(self.origin)) / self.spacing
        at = a.rounded(value, x.error / self.spacing, np.abs(value) + size, STEPS)
        surely, maybe, at = self.inside(at)
        offset = (at.value - self.points) / self.widths[:, None]  # (K, p)
        size = (np.abs(at.value) + np.abs(self.points)) / self.widths[:, None]
        offsets = a.rounded(offset, at.error / self.widths[:, None], size + np.abs(offset), STEPS)
        square = (offsets.value**2).sum(1)
        moved = (2 * np.abs(offset) * offsets.error + offsets.error**2).sum(1)
        moved += (len(columns) + 2 * STEPS) * a.unit * (square + encoder.reach**2)
        weights = self.weights(square, moved)
        low, high = weights[1] * surely, weights[2] * maybe
        kept = value_inside(value, self.lower, self.upper) or encoder.outside == "clamp"
        features = [c for c in range(len(element.value)) if c not in columns]
        values = {
            "features": element.map(lambda part: np.tile(part[features], (len(square), 1))),
            "offsets": offsets,
            "squares": a.rounded(
                offsets.value**2 - 1,
                2 * np.abs(offset) * offsets.error + offsets.error**2,
                offsets.value**2 + 1,
                1,
            ),
        }
        chosen = joined([values[name] for name in encoder.values], axis=1)
        return Pairs(weights[0] * kept, low, high, chosen)

    def inside(self, at: Bounded) -> tuple[bool, bool, Bounded]:
        """Whether an element surely counts, whether it may, and where it is after clamping."""
        slack = at.error + STEPS * self.a.unit * (np.abs(self.lower) + np.abs(self.upper))
        drops = self.encoder.outside == "drop"
        surely = value_inside(at.value, self.lower + slack, self.upper - slack) or not drops
        maybe = value_inside(at.value, self.lower - slack, self.upper + slack) or not drops
        middle = np.clip(at.value, self.lower, self.upper)
        ends = [np.clip(at.value + sign * slack, self.lower, self.upper) for sign in (1, -1)]
        error = np.maximum(ends[0] - middle, middle - ends[1])
        error += STEPS * self.a.unit * (np.abs(self.lower) + np.abs(self.upper))
        return surely, maybe, Bounded(middle, error, np.abs(middle))

    def weights(self, square: np.ndarray, moved: np.ndarray) -> list[np.ndarray]:
        """The weights (K,), and the smallest and largest that rounding allows."""
        reach = self.encoder.reach**2
        ends = [square, square + moved, np.maximum(square - moved, 0)]
        own = [np.where(end <= reach, np.exp(-end / 2), 0.0) for end in ends]
        if self.encoder.attention == "softmax":
            whole = own[0].sum() or 1.0
            others = [part.sum() - part for part in own]
            low = own[1] / np.where(own[1] > 0, own[1] + others[2], 1)
            high = own[2] / np.where(own[2] > 0, own[2] + np.maximum(others[1], 0), 1)
            own = [own[0] / whole, low, high]
        slack = (len(square) + 2 * STEPS) * self.a.unit
        return [own[0], own[1] * (1 - slack), own[2] * (1 + slack)]


def value_inside(value: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> bool:
    return bool(((value >= lower) & (value <= upper)).all())


def _linear(
    a: Arithmetic,
    name: str,
    kept: list[Pairs],
    lost: list[Pairs],
    central: bool,
    encoder: setfold.PlacedSlotEncoder,
) -> Bounded:
    """An aggregate of sums; `central` if they are kept as moments."""
    every, count = [*kept, *lost, *lost], len(kept)
    mass = _total(a, [_ones(pairs) for pairs in kept], [_ones(pairs) for pairs in every])
    if name == "density":
        return mass
    if name == "mass":
        return a.divided(mass, count)
    total = _total(a, kept, every)
    shown = np.stack([np.where(p.high[:, None] > 0, p.values.size, 0) for p in every])
    features = np.stack([p.values.size for p in every]).max(0)  # also of those beyond reach
    rounding = (2 * len(every) + 4 * STEPS) * a.unit * features
    if central:
        a.notice(4 * len(every) * features**2)
        total = Bounded(total.value, total.error + (mass.value + mass.error) * rounding, total.size)
    if name == "sum":
        return total
    if name == "mean":
        return a.divided(total, count)
    mean = _mean(a, kept, mass, shown.max(0), rounding, total, bool(lost))
    if name == "weighted_mean":
        return mean
    return _variance(a, kept, mass, mean, features, rounding)


def _ones(pairs: Pairs) -> Pairs:
    return pairs._replace(values=exact(np.ones((len(pairs.weight), 1))))


def _total(a: Arithmetic, kept: list[Pairs], every: list[Pairs]) -> Bounded:
    value = sum(p.weight[:, None] * p.values.value for p in kept)
    error = sum(
        p.moved[:, None] * (p.values.size + p.values.error) + p.high[:, None] * p.values.error
        for p in every
    )
    size = sum(p.high[:, None] * p.values.size for p in every)
    return a.rounded(value, error, size, len(every))


def _mean(
    a: Arithmetic,
    kept: list[Pairs],
    mass: Bounded,
    largest: np.ndarray,
    rounding: np.ndarray,
    total: Bounded,
    removed: bool,
) -> Bounded:
    """The weighted mean: between the smallest and largest value; 0 where there is no element."""
    value = total.value / np.where(mass.value > 0, mass.value, 1)
    low = sum(p.low for p in kept)[:, None]
    moved = sum(p.moved[:, None] * np.abs(p.values.value - value) for p in kept)
    lost = STEPS * len(kept) * a.tiny / np.where(low > 0, low, 1)  # products that underflow
    own = np.max([np.where(p.high[:, None] > 0, p.values.error, 0) for p in kept], axis=0)
    error = np.full_like(value, UNKNOWN)
    np.divide(moved, low, out=error, where=low > 0)
    error = np.minimum(error, 2 * largest) + own + rounding + lost
    if removed:  # what is left of others is relative to what is left of the weights
        left = mass.value - mass.error
        error = np.full_like(value, UNKNOWN)
        np.divide(total.error + np.abs(value) * mass.error, left, out=error, where=left > 0)
    empty = sum(p.high for p in kept)[:, None] == 0
    if not removed:
        error = np.where(empty, 0, error)
    return a.rounded(
        value, error, np.where(empty, 0, np.minimum(np.abs(value) + error, largest)), 1
    )


def _variance(
    a: Arithmetic,
    kept: list[Pairs],
    mass: Bounded,
    mean: Bounded,
    features: np.ndarray,
    rounding: np.ndarray,
) -> Bounded:
    """Sum of w (v - mean)^2 / sum of w."""
    low = sum(p.low for p in kept)[:, None]
    squares = sum(p.weight[:, None] * (p.values.value - mean.value) ** 2 for p in kept)
    value = squares / np.where(mass.value > 0, mass.value, 1)
    moved = sum(
        p.moved[:, None] * (p.values.value - mean.value) ** 2
        + p.high[:, None] * 2 * features * (p.values.error + mean.error)
        for p in kept
    )
    moved += STEPS * len(kept) * a.tiny * (1 + features)  # squares that underflow
    error = np.full_like(value, UNKNOWN)
    np.divide(moved, low, out=error, where=low > 0)
    error = error + 2 * mean.error**2 + 8 * rounding * features
    # The squares are relative to the mean of the chunk, so little weight leaves larger errors.
    error = np.where(sum(p.high for p in kept)[:, None] == 0, 0, error)
    return Bounded(value, np.fmin(error, UNKNOWN), value)


def _extreme(a: Arithmetic, kept: list[Pairs], sign: float) -> Bounded:
    """The largest (or smallest) w v among the elements within reach; 0 if there are none."""
    each = np.stack([sign * p.weight[:, None] * p.values.value for p in kept])
    error = np.stack(
        [
            p.moved[:, None] * (p.values.size + p.values.error) + p.high[:, None] * p.values.error
            for p in kept
        ]
    )
    near, surely, maybe = (
        np.stack([np.broadcast_to(part[:, None] > 0, each.shape[1:]) for part in parts])
        for parts in zip(*((p.weight, p.low, p.high) for p in kept), strict=True)
    )
    value = np.where(near.any(0), np.where(near, each, -np.inf).max(0), 0)
    high = np.where(maybe, each + error, -np.inf).max(0)
    low = np.where(surely, each - error, -np.inf).max(0)
    none = ~surely.any(0)  # then there may be no element, or any of those that may be within reach
    least = np.where(maybe, each - error, np.inf).min(0)
    high = np.where(none, np.maximum(high, 0), high)
    low = np.where(none, np.minimum(least, 0), low)
    off = np.where(maybe.any(0), np.maximum(high - value, value - low), 0)
    return a.rounded(sign * value, off, np.abs(value), 1)
