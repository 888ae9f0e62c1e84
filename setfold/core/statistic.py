"""Statistics: what a state keeps of the elements it has seen.

A statistic is a commutative monoid on a few tensors. Two of them join into the statistic of the
union, in any order and grouping. That is all that a fold needs.

    statistic        parts                                           joined by
    Sum              sum_i v_i                                       addition
    Max, Min         max_i v_i, min_i v_i                            maximum, minimum
    Softmax          m = max_i l_i,  sum_i exp(l_i - m) [v_i, 1]     rescaling to the larger m
    CentralMoments   n, mean, sum_i (v_i - mean)^2                   Chan's pairwise update
    Scatter          n, mean, sum_i (v_i - mean) (v_i - mean)^T      the same, for matrices

An encoder declares its state as named fields, `{"sum": Field(Sum(), (4, 9))}`. The functions at the
end of this file join, remove and differentiate all fields of a state at once.

To add a statistic, subclass `Statistic` anywhere, in your own package too: `empty`, `join` and, for
exact gradients, `pull`. Nothing needs to be registered. To load a saved state, import the module
that defines its statistics first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from setfold.errors import InputError, NotRemovableError
from setfold.kernels.modes import accumulator_dtype
from setfold.kernels.softmax import finite
from setfold.kernels.sums import total

Parts = tuple[Tensor, ...]  # the tensors of one statistic, each (B, ...)
Statistics = dict[str, Parts]  # by field name: what a state keeps
Shape = tuple[int, ...]

RESERVED = ("count", "slots", "context")  # names of tensors of a state that belong to no field
OUTSIDE = "outside"  # name of the field that counts elements outside the box of an encoder

DEFINED: dict[str, type[Statistic]] = {}  # by the name that files use


def name_in_files(kind: type[Statistic]) -> str:
    """The class name for statistics of this module, the import path for all others."""
    return (
        kind.__name__ if kind.__module__ == __name__ else f"{kind.__module__}.{kind.__qualname__}"
    )


class Statistic(ABC):
    """A commutative monoid on tuples of tensors.

    Two statistics are equal if they have the same class.

    Attributes:
        empty: the value of each part for a set without elements.
        obstacle: why elements cannot be removed, if `remove` is not implemented.
        picks: whether each part is the value of a single element, such as a maximum. The gradient
            of such a part belongs to the element that reached it first.
        removable: whether `remove` is implemented.
    """

    empty: ClassVar[tuple[float, ...]]
    obstacle: ClassVar[str] = "the statistic of the remaining elements does not follow from it"
    picks: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        DEFINED[name_in_files(cls)] = cls

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def removable(self) -> bool:
        return type(self).remove is not Statistic.remove

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """The shape of each part for one set, given the shape of the field."""
        return (shape,) * len(self.empty)

    @abstractmethod
    def join(self, left: Parts, right: Parts) -> Parts:
        """The parts of the union of two disjoint sets."""

    def pull(self, grads: Parts, joined: Parts, piece: Parts) -> Parts:
        """The gradient of one piece, given the gradient of what the pieces were joined to.

        The default is right for a sum, whose gradient is that of every term.

        Args:
            grads: gradients of the joined parts. If the statistic `picks`, only those entries that
                were picked from this piece.
            joined: the parts of all pieces together.
            piece: the parts of this piece.
        """
        return grads

    def remove(self, left: Parts, right: Parts) -> Parts:
        """The parts of `left` without the elements of `right`."""
        raise NotRemovableError(
            f"{type(self).__name__} cannot remove elements: {self.obstacle}. Fold the remaining "
            "elements again, or use sums and means."
        )


class Field(NamedTuple):
    """One field of a state.

    Attributes:
        statistic: what the field keeps.
        shape: its shape for one set; `statistic.shapes` derives the shapes of its parts.

    >>> Field(Softmax(), (4, 9)).shapes
    ((4,), (4, 9))
    """

    statistic: Statistic
    shape: Shape

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of each part for one set."""
        return self.statistic.shapes(self.shape)

    def identity(self, batch_size: int, device: torch.device) -> Parts:
        """The parts of `batch_size` sets without elements."""
        dtype = accumulator_dtype(device)
        return tuple(
            torch.full((batch_size, *shape), empty, dtype=dtype, device=device)
            for shape, empty in zip(self.shapes, self.statistic.empty, strict=True)
        )


Fields = Mapping[str, Field]  # by name: the declaration of a state


class Reduction(Statistic):
    """A statistic that reduces values over elements, all with the same weight."""

    @abstractmethod
    def absorb(self, values: Tensor, mask: Tensor | None) -> Parts:
        """Reduce values (B, n, ...) over the elements that the mask (B, n) marks as present."""


class Sum(Reduction):
    """Running totals."""

    empty = (0.0,)

    def absorb(self, values: Tensor, mask: Tensor | None) -> Parts:
        """Sum the elements that are present.

        >>> Sum().absorb(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, False, True]]))
        (tensor([5.], dtype=torch.float64),)
        """
        return (total(values, mask),)

    def join(self, left: Parts, right: Parts) -> Parts:
        return (left[0] + right[0],)

    def remove(self, left: Parts, right: Parts) -> Parts:
        return (left[0] - right[0],)


class Max(Reduction):
    """Running element-wise maxima."""

    empty = (-torch.inf,)
    obstacle = "without the element that attains it, the next one is not known"
    picks = True

    def absorb(self, values: Tensor, mask: Tensor | None) -> Parts:
        if values.shape[1] == 0:
            return (values.new_full((values.shape[0], *values.shape[2:]), *self.empty),)
        if mask is not None:
            values = values.masked_fill(~spread(mask, values), *self.empty)
        if values.requires_grad:  # if elements tie, one of them gets the whole gradient
            return (values.max(1).values,)
        return (values.amax(1),)

    def join(self, left: Parts, right: Parts) -> Parts:
        kept = (left[0] >= right[0]) | left[0].isnan()  # NaN propagates
        return (torch.where(kept, left[0], right[0]),)


class Min(Max):
    """Running element-wise minima: the maximum of the negated values, negated."""

    empty = (torch.inf,)

    def absorb(self, values: Tensor, mask: Tensor | None) -> Parts:
        return (-Max().absorb(-values, mask)[0],)

    def join(self, left: Parts, right: Parts) -> Parts:
        kept = (left[0] <= right[0]) | left[0].isnan()
        return (torch.where(kept, left[0], right[0]),)


class Softmax(Statistic):
    """Sums weighted by exponentials of logits, relative to the largest logit m so far.

    The peak m only keeps the numbers in range. Numerator and denominator are relative to the same
    peak, so their quotient does not depend on it, and it needs no gradient. Weights cannot
    overflow; those that underflow are negligible. See kernels/softmax.py for absorbing a chunk.

    The shape of the field is that of the sums (..., Q, p); the peaks have one dimension less.
    """

    empty = (-torch.inf, 0.0)  # peak, sums relative to the peak
    obstacle = (
        "its sums are relative to the largest weight. Without the element of that weight, what is "
        "left may be smaller than the rounding of the sums"
    )

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return shape[:-1], shape

    def join(self, left: Parts, right: Parts) -> Parts:
        """Rescale both to the larger peak and add.

        >>> one = torch.tensor([[0.0]]), torch.tensor([[[3.0, 1.0]]])
        >>> two = torch.tensor([[1e4]]), torch.tensor([[[5.0, 1.0]]])
        >>> Softmax().join(one, two)
        (tensor([[10000.]]), tensor([[[5., 1.]]]))
        """
        peak = torch.maximum(left[0], right[0])
        base = finite(peak)
        scales = [torch.exp(own - base).unsqueeze(-1) for own in (left[0], right[0])]
        return peak, torch.addcmul(left[1] * scales[0], right[1], scales[1])

    def pull(self, grads: Parts, joined: Parts, piece: Parts) -> Parts:
        # a piece's peak exceeds the joined one by rounding at most
        factor = relative_to(joined[0], piece[0]).clamp(max=1).unsqueeze(-1)
        return grads[0], grads[1] * factor


class CentralMoments(Reduction):
    """Count, mean and sum of squared distances from the mean, joined without cancellation.

    The count may be a sum of weights; mean and squares are then weighted, too.
    """

    empty = (0.0, 0.0, 0.0)

    def absorb(self, values: Tensor, mask: Tensor | None) -> Parts:
        """The moments of each feature.

        >>> count, mean, squares = CentralMoments().absorb(torch.tensor([[1.0, 3.0]]), None)
        >>> count.item(), mean.item(), squares.item()
        (2.0, 2.0, 2.0)
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
        share = right[0] / torch.where(count > 0, count, 1)
        squares = left[2] + right[2] + apart.square() * left[0] * share
        return count, left[1] + apart * share, squares

    def pull(self, grads: Parts, joined: Parts, piece: Parts) -> Parts:
        count, mean, squares = grads
        total = torch.where(joined[0] > 0, joined[0], 1)
        apart = piece[1] - joined[1]
        weighed = count + mean * apart / total + squares * apart.square()  # if counts are weights
        return weighed, piece[0] * (mean / total + 2 * squares * apart), squares


class Scatter(Reduction):
    """Count, mean and scatter matrix of vectors (d,), joined without cancellation."""

    empty = (0.0, 0.0, 0.0)

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        return (), shape, (*shape, *shape)

    def absorb(self, values: Tensor, mask: Tensor | None) -> Parts:
        """The scatter of the elements that are present.

        >>> count, mean, scatter = Scatter().absorb(torch.tensor([[[1.0, 0.0], [3.0, 2.0]]]), None)
        >>> mean.tolist(), scatter.tolist()
        ([[2.0, 1.0]], [[[2.0, 2.0], [2.0, 2.0]]])
        """
        count, mean, _ = CentralMoments().absorb(values, mask)
        distance = values - mean.unsqueeze(1)
        if mask is not None:
            distance = distance * mask.unsqueeze(-1)
        return count[:, 0], mean, distance.mT @ distance

    def join(self, left: Parts, right: Parts) -> Parts:
        count = left[0] + right[0]
        apart = right[1] - left[1]
        share = (right[0] / torch.where(count > 0, count, 1)).unsqueeze(-1)
        between = _outer(apart, apart * share * left[0].unsqueeze(-1))
        return count, left[1] + apart * share, left[2] + right[2] + between

    def pull(self, grads: Parts, joined: Parts, piece: Parts) -> Parts:
        count, mean, scatter = grads
        total = torch.where(joined[0] > 0, joined[0], 1).unsqueeze(-1)
        apart = piece[1] - joined[1]
        turned = _apply(scatter + scatter.mT, apart)  # the gradient of apart^T scatter apart
        weighed = count + ((mean / total + turned / 2) * apart).sum(-1)  # if counts are weights
        return weighed, piece[0].unsqueeze(-1) * (mean / total + turned), scatter


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return left.unsqueeze(-1) * right.unsqueeze(-2)


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


# ---- all fields of a state at once -------------------------------------------------------------


def identity(fields: Fields, batch_size: int, device: torch.device) -> Statistics:
    """The statistics of `batch_size` sets without elements.

    Raises:
        InputError: a field has a name that is reserved.
    """
    check_names(fields)
    return {name: field.identity(batch_size, device) for name, field in fields.items()}


def join(fields: Fields, left: Statistics, right: Statistics) -> Statistics:
    """The statistics of the union of disjoint sets, set by set."""
    return {n: field.statistic.join(left[n], right[n]) for n, field in fields.items()}


def remove(fields: Fields, left: Statistics, right: Statistics) -> Statistics:
    """The statistics of `left` without the elements of `right`, set by set."""
    return {n: field.statistic.remove(left[n], right[n]) for n, field in fields.items()}


def pull(fields: Fields, grads: Statistics, joined: Statistics, piece: Statistics) -> Statistics:
    """The gradients of one piece of what was joined."""
    return {n: f.statistic.pull(grads[n], joined[n], piece[n]) for n, f in fields.items()}


def clear(fields: Fields, statistics: Statistics, where: Tensor) -> Statistics:
    """Statistics in which the sets marked by `where` (B,) are exactly empty.

    >>> clear({"sum": Field(Sum(), ())}, {"sum": (torch.tensor([1e-17, 2.0]),)}, torch.tensor([True, False]))
    {'sum': (tensor([0., 2.]),)}
    """
    return {
        name: tuple(
            part.masked_fill(spread(where, part), empty)
            for part, empty in zip(statistics[name], field.statistic.empty, strict=True)
        )
        for name, field in fields.items()
    }


def is_finite(statistics: Statistics) -> bool:
    """Whether all parts are finite, judged by their sums."""
    for parts in statistics.values():
        for part in parts:
            if not math.isfinite(part.sum().item()):
                return False
    return True


def find_non_finite(fields: Fields, statistics: Statistics) -> Tensor:
    """Which sets (B,) have a part that is not finite; infinities of empty sets are allowed."""
    found = []
    for name, parts in statistics.items():
        for part, empty in zip(parts, fields[name].statistic.empty, strict=True):
            usable = part.isfinite() | (part == empty)
            found.append(~(usable.flatten(1).all(1) if usable.dim() > 1 else usable))
    return torch.stack(found).any(0)


# ---- names of fields ---------------------------------------------------------------------------


def check_names(fields: Iterable[str]) -> None:
    """Raise InputError if a field's name would make the tensors of a state ambiguous.

    >>> check_names(["sum", "first/max"])
    """
    for name in fields:
        if not is_free(name):
            raise InputError(
                f"a field of a state cannot be named {name!r}: expected text that does not begin "
                f"with a dot, and not {', '.join(RESERVED)}, which are other parts of a state. "
                "Rename the field."
            )


def is_free(name: object) -> bool:
    """Whether a field may have a name."""
    return isinstance(name, str) and name.partition(".")[0] not in ("", *RESERVED)


# ---- helpers -----------------------------------------------------------------------------------


def relative_to(peak: Tensor, logits: Tensor) -> Tensor:
    """exp(logits - peak); 0 where both are -inf because there is no logit."""
    return torch.exp(logits - finite(peak))


def spread(per_set: Tensor, like: Tensor) -> Tensor:
    """Append dimensions of size 1 until `per_set` broadcasts against `like`."""
    return per_set.reshape(*per_set.shape, *(1,) * (like.dim() - per_set.dim()))
