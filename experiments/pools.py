"""The set encoders that are compared: frozen settings that build compositions of setfold's encoders.

    DeepSets      aggregates of the elements themselves
    Slots         the Slot Set Encoder, its slots apart or, as printed, pooled into one vector
    Hierarchy     Slot Set Encoders, each on the slots of the one before
    Universal     a Slot Set Encoder, then any set encoder among its slots
    Attention     learned queries, softmax over elements
    PMA           the Set Transformer's pooling, learned seeds with a network after them
    Transformer   ISABs, then any of the above: the Set Transformer, or ISAB and a maximum

All encode sets as `dim_out` numbers, so that they are compared at equal size. All but the last fold in one
pass, the last in one more than it has layers.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from torch import Tensor, nn

import setfold


class Pool(Protocol):
    """Settings of a set encoder."""

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.SetEncoder:
        """An encoder of sets (B, n, ...) as (B, dim_out).

        Args:
            dim_in: width of what the features put out.
            dim_out: width of the encoding.
            features: applied to each element first, (N, ...) -> (N, dim_in).
        """


class StreamingPool(Pool, Protocol):
    """Settings of a set encoder that folds in one pass."""

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder: ...


class SlottedPool(ABC):
    """Settings of a set encoder whose slots may be kept, too."""

    @abstractmethod
    def dim_of_slots(self, dim_out: int) -> int:
        """The width d of what a slot reads."""

    @abstractmethod
    def encoder(self, dim_in: int, dim_out: int) -> setfold.StreamingSetEncoder:
        """The encoder alone, (B, n, dim_in) -> (B, K, d)."""

    def pools_slots(self) -> bool:
        """Whether slots are pooled into one vector, as printed, so that attention may cancel."""
        return False

    def head(self, dim_out: int) -> nn.Module:
        """What makes one vector of the slots, (B, K, d) -> (B, dim_out)."""
        return nn.Flatten()

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder:
        """An encoder of sets (B, n, ...) as (B, dim_out)."""
        with _cancelling(expected=self.pools_slots()):
            return setfold.Composition(self.encoder(dim_in, dim_out), features, self.head(dim_out))

    def build_slots(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder:
        """The same without its head: (B, n, ...) -> (B, K, d)."""
        with _cancelling(expected=self.pools_slots()):
            return setfold.Composition(self.encoder(dim_in, dim_out), features)


class Combine(StrEnum):
    """How slots become one vector, which the paper leaves open."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"

    def head(self) -> nn.Module:
        """The module for it, (B, K, d) -> (B, d)."""
        return _SlotMaximum() if self is Combine.MAX else setfold.SlotPool(self.value)


class _SlotMaximum(nn.Module):
    def forward(self, encoding: Tensor) -> Tensor:
        return encoding.amax(1)


@dataclass(frozen=True)
class DeepSets:
    """Deep Sets in the form that folds: aggregates of the elements, read side by side.

    >>> import torch
    >>> DeepSets(("max", "mean")).build(dim_in=3, dim_out=16)(torch.randn(2, 100, 3)).shape
    torch.Size([2, 16])
    """

    aggregate: str | tuple[str, ...] = "mean"

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder:
        count = 1 if isinstance(self.aggregate, str) else len(self.aggregate)
        width = _share(dim_out, count, f"{count} aggregates")
        return setfold.Composition(
            setfold.Pool(width, self.aggregate), _widened(features, dim_in, width)
        )


@dataclass(frozen=True)
class Slots(SlottedPool):
    """A Slot Set Encoder.

    Args:
        num_slots: number K of slots.
        dim_slot: size h of a slot.
        aggregate: g, or several side by side.
        slots: "random" or "learned".
        attention: "sigmoid" as in the paper, or "softmax".
        similarity: "dot" as in the paper, or "cosine".
        apart: whether dim_out is spread over the slots, dim_out / K numbers each. If not, every slot
            has dim_out, as printed.
        combine: how the slots become one vector where they are not apart.
        width: numbers that a slot reads if not its share of dim_out; a linear layer then makes dim_out of
            all slots' numbers.

    >>> import torch
    >>> Slots(8).build(dim_in=3, dim_out=64)(torch.randn(2, 100, 3)).shape  # 8 slots of 8
    torch.Size([2, 64])
    >>> Slots(8, width=32).build(dim_in=3, dim_out=64)(torch.randn(2, 100, 3)).shape
    torch.Size([2, 64])
    """

    num_slots: int
    dim_slot: int = 64
    aggregate: str | tuple[str, ...] = "mean"
    slots: str = "random"
    attention: str = "sigmoid"
    similarity: str = "dot"
    apart: bool = True
    combine: Combine = Combine.MEAN
    width: int | None = None

    def dim_of_slots(self, dim_out: int) -> int:
        if self.width is not None:
            return self.width
        return _share(dim_out, self.num_slots, f"{self.num_slots} slots") if self.apart else dim_out

    def pools_slots(self) -> bool:
        return not self.apart

    def head(self, dim_out: int) -> nn.Module:
        if self.width is not None:
            return nn.Sequential(nn.Flatten(), nn.Linear(self.num_slots * self.width, dim_out))
        return nn.Flatten() if self.apart else self.combine.head()

    def encoder(self, dim_in: int, dim_out: int) -> setfold.SlotSetEncoder:
        return setfold.SlotSetEncoder(
            dim_in,
            self.num_slots,
            self.dim_slot,
            _width_of_values(self.aggregate, self.dim_of_slots(dim_out)),
            aggregate=self.aggregate,
            slots=self.slots,
            attention=self.attention,
            similarity=self.similarity,
        )


@dataclass(frozen=True)
class Hierarchy(SlottedPool):
    """Slot Set Encoders, each on the slots of the one before; only the first sees the stream.

    Args:
        levels: settings of each; lower levels read dim_out numbers per slot, and the last one
            says whether its slots are apart or how they are combined.
        activation: whether a ReLU stands between the levels; the paper prints none.

    >>> import torch
    >>> hierarchy = Hierarchy((Slots(16), Slots(4)))
    >>> hierarchy.build(dim_in=3, dim_out=64)(torch.randn(2, 100, 3)).shape  # 4 slots of 16
    torch.Size([2, 64])
    """

    levels: tuple[Slots, ...]
    activation: bool = True

    def pools_slots(self) -> bool:
        return self.levels[-1].pools_slots()

    def dim_of_slots(self, dim_out: int) -> int:
        return self.levels[-1].dim_of_slots(dim_out)

    def head(self, dim_out: int) -> nn.Module:
        return self.levels[-1].head(dim_out)

    def encoder(self, dim_in: int, dim_out: int) -> setfold.HierarchicalSlotSetEncoder:
        whole = [replace(level, apart=False) for level in self.levels[:-1]]
        widths = [dim_in, *(dim_out for _ in whole)]
        levels = [
            level.encoder(width, dim_out)
            for level, width in zip([*whole, self.levels[-1]], widths, strict=True)
        ]
        activation = nn.ReLU() if self.activation else nn.Identity()
        return setfold.HierarchicalSlotSetEncoder(levels, activation)


@dataclass(frozen=True)
class Universal:
    """A Slot Set Encoder, and then any set encoder on the set of its slots: still one pass.

    Args:
        slots: settings of the slots, each of which reads `slots.width` numbers.
        among: what makes one vector of the slots, such as a Set Transformer.

    >>> import torch
    >>> pool = Universal(Slots(16, width=32), Transformer(num_layers=1))
    >>> pool.build(dim_in=3, dim_out=64)(torch.randn(2, 100, 3)).shape
    torch.Size([2, 64])
    """

    slots: Slots
    among: Pool

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder:
        width = self.slots.dim_of_slots(dim_out)
        head = self.among.build(width, dim_out)
        return setfold.Composition(self.slots.encoder(dim_in, dim_out), features, head)


@dataclass(frozen=True)
class Attention(SlottedPool):
    """Learned queries with a softmax over elements, dim_out / num_queries numbers each.

    >>> import torch
    >>> Attention(8).build(dim_in=3, dim_out=64)(torch.randn(2, 100, 3)).shape
    torch.Size([2, 64])
    """

    num_queries: int
    num_heads: int = 1

    def dim_of_slots(self, dim_out: int) -> int:
        return _share(dim_out, self.num_queries, f"{self.num_queries} queries")

    def encoder(self, dim_in: int, dim_out: int) -> setfold.AttentionPool:
        width = self.dim_of_slots(dim_out)
        return setfold.AttentionPool(dim_in, self.num_queries, width, self.num_heads)


@dataclass(frozen=True)
class PMA(SlottedPool):
    """The Set Transformer's pooling by multi-head attention, dim_out / num_seeds numbers per seed.

    >>> import torch
    >>> PMA().build(dim_in=3, dim_out=64)(torch.randn(2, 100, 3)).shape
    torch.Size([2, 64])
    """

    num_heads: int = 4
    num_seeds: int = 1

    def dim_of_slots(self, dim_out: int) -> int:
        return _share(dim_out, self.num_seeds, f"{self.num_seeds} seeds")

    def encoder(self, dim_in: int, dim_out: int) -> setfold.StreamingSetEncoder:
        dim = self.dim_of_slots(dim_out)
        attention = setfold.PMA(dim, self.num_seeds, self.num_heads)
        return setfold.Composition(attention, _widened(None, dim_in, dim))


@dataclass(frozen=True)
class Transformer:
    """ISABs, in which every element sees the whole set through a few learned points; then a pool.

    Args:
        num_layers: number L of ISABs; the encoder folds in L + 1 passes.
        num_inducing: learned points of each.
        num_heads: heads of each.
        dropout: after the ISABs.
        last: the pool; PMA for the Set Transformer.
        dim: width of the ISABs; None for that of the encoding.

    >>> import torch
    >>> encoder = Transformer(num_layers=1, last=DeepSets("max")).build(dim_in=3, dim_out=64)
    >>> encoder(torch.randn(2, 100, 3)).shape, encoder.passes
    (torch.Size([2, 64]), 2)
    """

    num_layers: int = 2
    num_inducing: int = 16
    num_heads: int = 4
    dropout: float = 0.0
    last: StreamingPool = PMA()
    dim: int | None = None

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.MultiPassSetEncoder:
        dim = dim_out if self.dim is None else self.dim
        layers = [
            setfold.ISAB(dim, self.num_inducing, self.num_heads) for _ in range(self.num_layers)
        ]
        dropout = nn.Dropout(self.dropout) if self.dropout else None
        pool = self.last.build(dim, dim_out, dropout)
        return setfold.LayeredSetEncoder(layers, pool, _widened(features, dim_in, dim))


def _share(total: int, count: int, whose: str) -> int:
    """What each of `count` gets of `total` numbers."""
    if total % count:
        raise setfold.InputError(
            f"{total} numbers cannot be spread evenly over {whose}: choose a divisor of {total}."
        )
    return total // count


def _width_of_values(aggregate: str | Sequence[str], width: int) -> int:
    """How wide values are if their aggregates, side by side, read `width` numbers per slot."""
    names = [aggregate] if isinstance(aggregate, str) else list(aggregate)
    masses = names.count("mass")  # one number, however wide the values are
    wide = len(names) - masses
    if wide == 0 or width <= masses:
        raise setfold.InputError(
            f"{width} numbers per slot leave no room for values beside {names}: use fewer slots, or "
            "an aggregate of values."
        )
    return _share(width - masses, wide, f"{wide} aggregates of values, beside {masses} masses")


def _widened(features: nn.Module | None, dim_in: int, width: int) -> nn.Module | None:
    """Features that put out `width` numbers for each element."""
    if dim_in == width:
        return features
    last = nn.Linear(dim_in, width)
    return last if features is None else nn.Sequential(features, last)


@contextmanager
def _cancelling(expected: bool) -> Iterator[None]:
    """No warning that attention cancels where that is what the settings are there to show."""
    with warnings.catch_warnings():
        if expected:
            warnings.simplefilter("ignore", setfold.CancelledAttentionWarning)
        yield
