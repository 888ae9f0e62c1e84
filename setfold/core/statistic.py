"""What a state keeps: commutative monoids on a few tensors.

    statistic   parts                                             joined by
    sum         sum_i v_i                                         addition
    max, min    max_i v_i, min_i v_i                              maximum, minimum
    softmax     m = max_i l_i,  sum_i exp(l_i - m) [v_i, 1]       rescaling to the larger m
    moments     n, mean, sum_i (v_i - mean)^2                     Chan's update of pairs

Two of them join into the statistic of the union, in any order and grouping; that is all that a fold
needs. `pull` is the way back: what the gradient of a joined statistic is to one of its pieces.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from setfold.errors import NonFiniteError, NotRemovableError
from setfold.kernels.precision import accumulator_dtype
from setfold.kernels.softmax import finite

Parts = tuple[Tensor, ...]  # the tensors of one statistic, each (B, ...)
Statistics = dict[str, Parts]  # by the name of the statistic: what a state keeps


class Statistic(ABC):
    """A commutative monoid on tuples of tensors: what a state keeps of the elements it saw.

    Attributes:
        name: under which a state keeps it.
        keeps: what that is, in words.
        empty: what each part holds of a set without elements.
        picks: whether a part is one element's value, so that its gradient belongs to that element.
    """

    name: ClassVar[str]
    empty: ClassVar[tuple[float, ...]]
    keeps: ClassVar[str]
    removable: ClassVar[bool] = False
    picks: ClassVar[bool] = False

    def identity(self, *shapes: tuple[int, ...], device: torch.device) -> Parts:
        """The parts of sets without elements, by their shapes (B, ...)."""
        dtype = accumulator_dtype(device)
        return tuple(
            torch.full(shape, empty, dtype=dtype, device=device)
            for shape, empty in zip(shapes, self.empty, strict=True)
        )

    @abstractmethod
    def join(self, left: Parts, right: Parts) -> Parts:
        """The parts of the union of two disjoint sets."""

    def pull(self, grads: Parts, joined: Parts, piece: Parts) -> Parts:
        """The gradient of one piece of what was joined; of a sum, that of the sum itself.

        Args:
            grads: of the joined parts; where a part `picks`, only what this piece was picked for.
            joined: the parts of all pieces together.
            piece: the parts of one of them.
        """
        return grads

    def remove(self, left: Parts, right: Parts) -> Parts:
        """The parts of `left` without the elements of `right`."""
        raise NotRemovableError(
            f"elements cannot be removed from a state that keeps {self.keeps}: what would be left does not "
            "follow from it exactly. Fold the remaining elements anew, or use sums and means, which forget."
        )


class Reduction(Statistic):
    """A statistic of values that all count alike."""

    @abstractmethod
    def absorb(self, values: Tensor, mask: Tensor | None) -> Parts:
        """Reduce values (B, n, ...) over the elements that the mask (B, n) shows."""


class Sum(Reduction):
    """Running totals."""

    name, keeps, empty, removable = "sum", "totals", (0.0,), True

    def absorb(self, values: Tensor, mask: Tensor | None) -> Parts:
        """Add up what the mask shows.

        >>> Sum().absorb(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, False, True]]))
        (tensor([5.], dtype=torch.float64),)
        """
        if mask is not None:
            values = values * spread(mask, values)
        return (values.sum(1, dtype=accumulator_dtype(values.device)),)

    def join(self, left: Parts, right: Parts) -> Parts:
        return (left[0] + right[0],)

    def remove(self, left: Parts, right: Parts) -> Parts:
        return (left[0] - right[0],)


class Max(Reduction):
    """Running element-wise maxima."""

    name, keeps, empty, picks = "max", "a maximum", (-torch.inf,), True

    def absorb(self, values: Tensor, mask: Tensor | None) -> Parts:
        if values.shape[1] == 0:
            return (values.new_full((values.shape[0], *values.shape[2:]), *self.empty),)
        if mask is not None:
            values = values.masked_fill(~spread(mask, values), *self.empty)
        if values.requires_grad:  # equal elements do not share a gradient: one of them gets it
            return (values.max(1).values,)
        return (values.amax(1),)

    def join(self, left: Parts, right: Parts) -> Parts:
        return (torch.where(left[0] >= right[0], left[0], right[0]),)


class Min(Max):
    """Running element-wise minima: the maximum of the negated values, negated."""

    name, keeps, empty = "min", "a minimum", (torch.inf,)

    def absorb(self, values: Tensor, mask: Tensor | None) -> Parts:
        return (-Max().absorb(-values, mask)[0],)

    def join(self, left: Parts, right: Parts) -> Parts:
        return (torch.where(left[0] <= right[0], left[0], right[0]),)


class Softmax(Statistic):
    """Sums weighted by the exponential of logits, relative to the largest logit m so far.

    The peak m only keeps the numbers in range: numerator and denominator are both relative to it,
    so it needs no gradient. Nothing overflows, and what underflows is nothing beside the rest. How
    a chunk is absorbed, kernels/softmax.py says.
    """

    name, keeps = "softmax", "sums relative to a peak"
    empty = (-torch.inf, 0.0)  # the peak m; the sums relative to it

    def join(self, left: Parts, right: Parts) -> Parts:
        """Rescale both to the larger peak, and add.

        >>> one = torch.tensor([[0.0]]), torch.tensor([[[3.0, 1.0]]])
        >>> two = torch.tensor([[1e4]]), torch.tensor([[[5.0, 1.0]]])
        >>> Softmax().join(one, two)
        (tensor([[10000.]]), tensor([[[5., 1.]]]))
        """
        peak = torch.maximum(left[0], right[0])
        total = sum(sums * relative_to(peak, own).unsqueeze(-1) for own, sums in (left, right))
        assert isinstance(total, Tensor)
        return peak, total

    def pull(self, grads: Parts, joined: Parts, piece: Parts) -> Parts:
        factor = relative_to(joined[0], piece[0]).clamp(max=1).unsqueeze(-1)  # but for rounding
        return grads[0], grads[1] * factor


class Moments(Reduction):
    """Count, mean and sum of squared distances from the mean, without cancellation."""

    name, keeps, empty = "moments", "moments", (0.0, 0.0, 0.0)

    def absorb(self, values: Tensor, mask: Tensor | None) -> Parts:
        """The moments of each feature.

        >>> Moments().absorb(torch.tensor([[1.0, 3.0]]), None)
        (tensor([2.], dtype=torch.float64), tensor([2.], dtype=torch.float64), tensor([2.], dtype=torch.float64))
        """
        precise = accumulator_dtype(values.device)
        shape = (values.shape[0], *values.shape[2:])
        if mask is None:
            present: Tensor | float = 1.0
            count = torch.full(shape, float(values.shape[1]), dtype=precise, device=values.device)
        else:
            present = spread(mask, values)
            count = spread(mask.sum(1, dtype=precise), values.select(1, 0)).expand(shape)
        some = count.clamp_min(1)
        mean = (values * present).sum(1, dtype=precise) / some
        distance = (values - mean.unsqueeze(1)) * present
        return count, mean, distance.square().sum(1, dtype=precise)

    def join(self, left: Parts, right: Parts) -> Parts:
        count = left[0] + right[0]
        apart = right[1] - left[1]
        share = right[0] / count.clamp_min(1)
        spread_out = left[2] + right[2] + apart.square() * left[0] * share
        return count, left[1] + apart * share, spread_out

    def pull(self, grads: Parts, joined: Parts, piece: Parts) -> Parts:
        count, mean, _ = grads
        share = piece[0] / joined[0].clamp_min(1)
        moved = mean * share + 2 * grads[2] * piece[0] * (piece[1] - joined[1])
        return count, moved, grads[2]


STATISTICS: dict[str, Statistic] = {s.name: s for s in (Sum(), Max(), Min(), Softmax(), Moments())}
REDUCTIONS: dict[str, Reduction] = {
    name: s for name, s in STATISTICS.items() if isinstance(s, Reduction)
}


def join(left: Statistics, right: Statistics) -> Statistics:
    """The statistics of the union of disjoint sets, set by set."""
    return {name: STATISTICS[name].join(parts, right[name]) for name, parts in left.items()}


def remove(left: Statistics, right: Statistics) -> Statistics:
    """The statistics of `left` without the elements of `right`, set by set."""
    return {name: STATISTICS[name].remove(parts, right[name]) for name, parts in left.items()}


def pull(grads: Statistics, joined: Statistics, piece: Statistics) -> Statistics:
    """The gradients of one piece of what was joined."""
    return {
        name: STATISTICS[name].pull(parts, joined[name], piece[name])
        for name, parts in grads.items()
    }


def refuse_non_finite(found: Statistics) -> None:
    """Raise if statistics are not finite; where an empty set is infinite, that is allowed."""
    for name, parts in found.items():
        for part, empty in zip(parts, STATISTICS[name].empty, strict=True):
            shown = part if math.isfinite(empty) else torch.where(part == empty, 0, part)
            if not math.isfinite(shown.detach().sum().item()) and not bool(shown.isfinite().all()):
                raise NonFiniteError(
                    f"the elements are finite, but their {name} is not: they are too large, or the feature "
                    "network makes NaN or infinity of them. The state is as it was."
                )


def relative_to(peak: Tensor, logits: Tensor) -> Tensor:
    """exp(logits - peak), with 0 where there is no logit at all: both are then -inf."""
    return torch.exp(logits - finite(peak))


def spread(per_set: Tensor, like: Tensor) -> Tensor:
    """Trailing dimensions of size 1 until `per_set` broadcasts against `like`."""
    return per_set.reshape(*per_set.shape, *(1,) * (like.dim() - per_set.dim()))
