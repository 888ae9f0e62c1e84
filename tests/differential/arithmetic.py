"""Float64 arithmetic that bounds what rounding in another dtype may do to the result.

Each number has an error: how far the same formula may be off if it is evaluated in the dtype, in
any order of its terms. It follows from the dtype (unit roundoff, underflow), from the size of the
terms (a small sum of large terms is badly conditioned), and from the errors of what goes in. Bounds
are of worst cases, and monotone functions carry the ends of an interval, not derivatives: a softmax
whose logits are off by a lot is still between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

STEPS = 4  # roundings of one operation beside those of its terms
FAR = 700.0  # exp of more overflows in float64
OWN = 2.0**-53  # unit roundoff of the arithmetic here
UNKNOWN = 1e300  # an error that says nothing


class Bounded(NamedTuple):
    """Numbers, how far the computed ones may be from them, and how large their terms are."""

    value: np.ndarray
    error: np.ndarray
    size: np.ndarray  # the sum of the absolute values of the terms: at least |value|

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Bounded:
        """The same function of all three, for what only moves numbers around."""
        return Bounded(*(function(part) for part in self))


def exact(value: np.ndarray) -> Bounded:
    """Numbers that are given: no error."""
    value = np.asarray(value, np.float64)
    return Bounded(value, np.zeros_like(value), np.abs(value))


def zeros(*shape: int) -> Bounded:
    return exact(np.zeros(shape))


def joined(parts: Sequence[Bounded], axis: int = 0) -> Bounded:
    """Several numbers side by side."""
    return Bounded(*(np.concatenate(part, axis) for part in zip(*parts, strict=True)))


def stacked(parts: Sequence[Bounded]) -> Bounded:
    return Bounded(*(np.stack(part) for part in zip(*parts, strict=True)))


class Arithmetic:
    """Operations as a dtype would round them.

    Attributes:
        largest: the largest number of the dtype.
        overflows: whether some intermediate result is too large: for the dtype that the library
            computes in, which is float32 or wider, or for a module of the user.
        overflows_in_module: whether it is one of a module of the user, such as a head.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        self.unit = info.eps / 2
        self.tiny = info.tiny * info.eps  # the smallest positive number
        self.largest = info.max
        self.widest = max(info.max, torch.finfo(torch.float32).max)
        self.overflows = self.overflows_in_module = False

    def rounded(
        self, value: np.ndarray, error: np.ndarray, size: np.ndarray, terms: int, lost: object = 1.0
    ) -> Bounded:
        """A result of so many terms; underflow loses `lost` times the smallest number in each."""
        self.notice(size)
        roundings = (terms + STEPS) * (self.unit * size + self.tiny * np.asarray(lost))
        return Bounded(value, np.fmin(error + roundings, UNKNOWN), size)

    def notice(self, size: np.ndarray) -> None:
        """Remember if the library cannot compute with numbers of this size."""
        if size.size and not 1.01 * np.max(size) < self.widest:
            self.overflows = True

    def notice_in_module(self, number: Bounded) -> None:
        """Remember if numbers that a module of the user sees or returns do not fit into the dtype."""
        size = np.maximum(number.size, np.abs(number.value) + number.error)
        if size.size and not 1.01 * np.max(size) < self.largest:
            self.overflows = self.overflows_in_module = True

    def stored(self, number: Bounded) -> Bounded:
        """A result that is written in the dtype: its terms are forgotten."""
        return self.rounded(number.value, number.error, np.abs(number.value), 0)

    # ---- linear ----------------------------------------------------------------------------------

    def linear(self, number: Bounded, weight: np.ndarray, bias: np.ndarray | None) -> Bounded:
        """Weight @ number + bias, of (..., d)."""
        offset = np.zeros(len(weight)) if bias is None else bias
        value = number.value @ weight.T + offset
        size = number.size @ np.abs(weight).T + np.abs(offset)
        error = number.error @ np.abs(weight).T
        lost = 1 + number.size.sum(-1, keepdims=True) + np.abs(weight).sum(1)
        return self.rounded(value, error, size, len(number.value), lost)

    def products(self, left: Bounded, right: Bounded, scale: float, beside: float = 0.0) -> Bounded:
        """Scale * right (K, p) @ left (p,); `beside` is the size of what may be folded into it."""
        value = right.value @ left.value * scale
        size = (right.size + right.error) @ left.size * scale
        error = ((right.size + right.error) @ left.error + right.error @ left.size) * scale
        lost = (1 + beside + left.size.sum() + right.size.sum(1)) * (1 + beside)
        return self.rounded(value, error, size, left.value.shape[-1], lost)

    def total(self, numbers: Sequence[Bounded], gone: Sequence[Bounded] = ()) -> Bounded:
        """The sum of some numbers; others were added and subtracted again."""
        value = np.sum([n.value for n in numbers], axis=0)
        error = np.sum([n.error for n in (*numbers, *gone, *gone)], axis=0)
        size = np.sum([n.size for n in (*numbers, *gone, *gone)], axis=0)
        return self.rounded(value, error, size, len(numbers) + 2 * len(gone))

    def plus(self, left: Bounded, right: Bounded) -> Bounded:
        return self.rounded(
            left.value + right.value, left.error + right.error, left.size + right.size, 1
        )

    def divided(self, number: Bounded, by: float) -> Bounded:
        value, error, size = (part / by for part in number)
        return self.rounded(value, error, size, 0)

    # ---- nonlinear -------------------------------------------------------------------------------

    def monotone(self, number: Bounded, function: Callable[[np.ndarray], np.ndarray]) -> Bounded:
        """A function that never falls, such as tanh, of each number."""
        value = function(number.value)
        above = function(number.value + number.error) - value
        below = value - function(number.value - number.error)
        # torch's sigmoid is 0 where exp(-x) overflows, though the result would be a subnormal number
        lost = 1 / (2 * self.unit)
        return self.rounded(value, np.maximum(above, below), np.abs(value), 0, lost)

    def scaled(self, left: Bounded, right: Bounded) -> Bounded:
        """The product of numbers, one by one."""
        value = left.value * right.value
        size = left.size * right.size
        error = left.error * (right.size + right.error) + left.size * right.error
        return self.rounded(value, error, size, 0, 1 + left.size + right.size)

    def normalized(
        self,
        number: Bounded,
        weight: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        epsilon: float = 1e-5,
    ) -> Bounded:
        """Layer norm of (p,): minus the mean, divided by the deviation, in which errors add up."""
        value, width = number.value, len(number.value)
        largest = np.abs(value).max()
        mean = value.mean()
        deviation = np.sqrt(np.mean((value - mean) ** 2) + epsilon)
        moved = number.error + (width + STEPS) * (self.unit * largest + self.tiny)
        spread = np.sqrt(np.mean(moved**2))  # the deviation moves by no more
        normal = (value - mean) / deviation
        error = (moved + moved.mean() + np.abs(normal) * spread) / max(
            deviation - spread, np.sqrt(epsilon)
        )
        error = np.minimum(error, 2 * np.sqrt(width))  # no normalized number is larger
        found = self.rounded(normal, error, np.abs(normal), width)
        if weight is None:
            return found
        return self.rounded(
            normal * weight + bias,
            found.error * np.abs(weight),
            found.size * np.abs(weight) + np.abs(bias),
            1,
        )

    def unit_vector(self, number: Bounded) -> Bounded:
        """(p,) divided by its length; zero stays zero."""
        length = np.sqrt(np.sum(number.value**2))
        moved = np.sqrt(np.sum(number.error**2))
        if length == 0 and moved <= len(number.value) * 8 * self.tiny:
            return zeros(len(number.value))
        value = number.value / max(length, 1e-12)
        error = (number.error + np.abs(value) * moved) / max(length - moved, 1e-12)
        return self.rounded(value, np.minimum(error, 2.0), np.abs(value), len(value))

    # ---- weights ---------------------------------------------------------------------------------

    def over_slots(self, logits: Bounded, attention: str) -> Bounded:
        """Logarithms (K,) of the weights over slots, whose errors are relative ones of the weights.

        sigmoid: W_j = a_j / sum_l a_l with a = sigmoid(logit) + 1e-8; softmax: of the logits.
        """
        count = len(logits.value)
        found = np.zeros((3, count))
        for j in range(count):
            own = np.arange(count) == j
            for row, sign in enumerate((0.0, 1.0, -1.0)):  # as it is, least and most favourable
                logit = logits.value + np.where(own, -sign, sign) * logits.error
                found[row, j] = _log_weight(logit, own, attention)
        value, low, high = found
        error = np.maximum(high - value, value - low) + (count + STEPS) * self.unit
        error += STEPS * OWN * np.abs(value)  # of the logarithms here, which the library has not
        return Bounded(value, error, np.abs(value))

    def weighted_total(
        self,
        logs: Sequence[Bounded],
        values: Sequence[Bounded],
        lost: np.ndarray | float,
        gone: int = 0,
    ) -> Bounded:
        """sum_i W_ij v_i (K, p); the last `gone` of them were added and subtracted again."""
        kept = len(values) - gone
        value, error, size = np.zeros((3, len(logs[0].value), len(values[0].value)))
        for i, (log, number) in enumerate(zip(logs, values, strict=True)):
            times = 1 if i < kept else 2
            weight, high = np.exp(log.value), np.exp(np.minimum(log.value + log.error, 0))
            moved = np.maximum(high - weight, weight - np.exp(log.value - log.error))
            if i < kept:
                value += np.outer(weight, number.value)
            error += times * np.outer(moved, number.size)
            error += times * np.outer(high, number.error)
            error += times * self.tiny * (number.size + lost)
            size += times * np.outer(high, number.size)
        return self.rounded(value, error, size, len(values) + gone, lost)

    def weighted_mean(
        self,
        logs: Sequence[Bounded],
        values: Sequence[Bounded],
        lost: np.ndarray | float,
        floor: np.ndarray | None = None,
    ) -> Bounded:
        """sum_i w_i v_i / sum_i w_i (K, p), with w = exp(logs): only their ratios matter.

        With the mean m of the right weights, other weights w' miss it by the mean of v_i - m under
        w', and because that is 0 under w, by sum_i (w'_i - w_i) (v_i - m) / sum_i w'_i. In any case
        the result is between the smallest and the largest value. Underflow loses `lost` relative
        to the `floor` (K,), the size of the weights as they are multiplied; 1 if not given.
        """
        floor = np.ones(len(logs[0].value)) if floor is None else floor
        numbers = stacked(values)  # (n, p)
        rows = []
        for j in range(len(logs[0].value)):
            log = np.array([each.value[j] for each in logs])
            radius = np.array([each.error[j] for each in logs])
            top = int(np.argmax(log))
            radius = np.where(np.arange(len(log)) == top, 0.0, radius + radius[top])
            weight = np.exp(log - log[top])
            low = np.exp(log - log[top] - radius)
            high = np.exp(np.minimum(log - log[top] + radius, FAR))
            moved = np.maximum(high - weight, weight - low) + STEPS * self.unit * weight + self.tiny
            mean = weight @ numbers.value / weight.sum()
            distance = np.abs(numbers.value - mean)  # (n, p)
            error = np.minimum(moved @ distance / low.sum(), distance.max(0))
            error += np.minimum(high @ numbers.error / low.sum(), numbers.error.max(0))
            size = np.minimum(high @ numbers.size / low.sum(), numbers.size.max(0))
            rows.append(self.rounded(mean, error, size, len(log), lost / floor[j]))
        return stacked(rows)


def _log_weight(logits: np.ndarray, own: np.ndarray, attention: str) -> float:
    if attention == "softmax":
        gaps = logits - logits[own]
        return float(-np.logaddexp.reduce(gaps))
    raw = np.exp(-np.logaddexp(0.0, -logits)) + 1e-8
    return float(np.log(raw[own][0] / raw.sum()))
