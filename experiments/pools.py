"""Settings of the compared set encoders: frozen dataclasses that build setfold encoders.

    DeepSets      aggregates of the elements
    LinearMean    mean of a linear map of the elements
    Slots         Slot Set Encoder, with slots apart or, as printed, pooled into one vector
    Hierarchy     stacked Slot Set Encoders
    Universal     a Slot Set Encoder, then any set encoder on its slots
    Attention     learned queries, softmax over elements
    Gated         gated attention for multiple-instance learning
    PMA           the Set Transformer's pooling: learned seeds, then a network
    Transformer   ISABs, then any of the above: the Set Transformer, or ISAB and a maximum

All encode a set as `dim_out` numbers, so that they are compared at equal size. A Transformer needs
one pass more than it has layers; all others fold in one pass.
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
        """Build an encoder (B, n, ...) -> (B, dim_out).

        Args:
            dim_in: output width of the features.
            dim_out: width of the encoding.
            features: network applied to each element first, (N, ...) -> (N, dim_in).
        """


class StreamingPool(Pool, Protocol):
    """Settings of a set encoder that folds in one pass."""

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder: ...


class SlottedPool(ABC):
    """Settings of a set encoder that can also return its slots."""

    @abstractmethod
    def dim_of_slots(self, dim_out: int) -> int:
        """Return the output width d of a slot."""

    @abstractmethod
    def encoder(self, dim_in: int, dim_out: int) -> setfold.StreamingSetEncoder:
        """Build the encoder without features and head, (B, n, dim_in) -> (B, K, d)."""

    def pools_slots(self) -> bool:
        """Return whether slots are pooled into one vector, as printed; attention may cancel."""
        return False

    def head(self, dim_out: int) -> nn.Module:
        """Build the head that maps slots to one vector, (B, K, d) -> (B, dim_out)."""
        return nn.Flatten()

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder:
        """Build an encoder (B, n, ...) -> (B, dim_out)."""
        with _ignore_cancelled_attention(self.pools_slots()):
            return setfold.Composition(self.encoder(dim_in, dim_out), features, self.head(dim_out))

    def build_slots(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder:
        """Build the encoder without its head: (B, n, ...) -> (B, K, d)."""
        with _ignore_cancelled_attention(self.pools_slots()):
            return setfold.Composition(self.encoder(dim_in, dim_out), features)


class Combine(StrEnum):
    """How slots are pooled into one vector; the paper does not specify it."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"

    def head(self) -> nn.Module:
        """Build the module, (B, K, d) -> (B, d)."""
        return _SlotMaximum() if self is Combine.MAX else setfold.SlotPool(self.value)


class _SlotMaximum(nn.Module):
    def forward(self, encoding: Tensor) -> Tensor:
        return encoding.amax(1)


@dataclass(frozen=True)
class DeepSets:
    """Deep Sets in its element-wise form: concatenated aggregates of the elements.

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
class LinearMean:
    """The mean of a linear map of the elements, in two factors that training can use.

    Args:
        width: width between the factors.

    >>> import torch
    >>> LinearMean(32).build(dim_in=3, dim_out=16)(torch.randn(2, 100, 3)).shape
    torch.Size([2, 16])
    """

    width: int

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder:
        return setfold.Composition(
            setfold.Pool(self.width, "mean"),
            _widened(features, dim_in, self.width),
            nn.Linear(self.width, dim_out),
        )


@dataclass(frozen=True)
class Slots(SlottedPool):
    """A Slot Set Encoder.

    Args:
        num_slots: number K of slots.
        dim_slot: size h of a slot.
        aggregate: aggregate g, or several to concatenate.
        slots: "random" or "learned".
        attention: "sigmoid" as in the paper, or "softmax".
        similarity: "dot" as in the paper, or "cosine".
        apart: whether slots are concatenated, with dim_out / K numbers each. Otherwise every slot
            has dim_out numbers, as printed.
        combine: how slots are pooled if they are not apart.
        width: output width of a slot instead of its share of dim_out; a linear layer then maps the
            concatenated slots to dim_out.

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
            dim_key=self.dim_of_keys,
        )

    @property
    def dim_of_keys(self) -> int | None:
        """Width of keys and queries; None for that of a slot's output, as in the paper."""
        return None


@dataclass(frozen=True)
class WideKeys(Slots):
    """Slots whose keys are as wide as `dim_key`, however few numbers a slot has.

    >>> WideKeys(32, similarity="cosine").encoder(dim_in=3, dim_out=32).to_key.out_features
    16
    """

    dim_key: int = 16

    @property
    def dim_of_keys(self) -> int:
        return self.dim_key


@dataclass(frozen=True)
class Hierarchy(SlottedPool):
    """Stacked Slot Set Encoders; only the first level sees the stream.

    Args:
        levels: settings of each level. Lower levels have dim_out numbers per slot; the last level
            decides whether slots are apart or how they are pooled.
        activation: whether there is a ReLU between levels; the paper has none.

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
        return self.stack(levels)

    def stack(self, levels: list[setfold.SlotSetEncoder]) -> setfold.HierarchicalSlotSetEncoder:
        activation = nn.ReLU() if self.activation else nn.Identity()
        return setfold.HierarchicalSlotSetEncoder(levels, activation)


@dataclass(frozen=True)
class ResidualHierarchy(Hierarchy):
    """A hierarchy whose levels add to their input, with normalized inputs; all levels are alike.

    A linear layer maps the concatenated slots to dim_out.
    """

    def dim_of_slots(self, dim_out: int) -> int:
        return dim_out

    def head(self, dim_out: int) -> nn.Module:
        width = self.levels[-1].num_slots * dim_out
        return nn.Sequential(nn.Flatten(), nn.Linear(width, dim_out))

    def encoder(self, dim_in: int, dim_out: int) -> setfold.HierarchicalSlotSetEncoder:
        levels = [replace(level, apart=False) for level in self.levels]
        widths = [dim_in, *(dim_out for _ in levels[1:])]
        made = [level.encoder(width, dim_out) for level, width in zip(levels, widths, strict=True)]
        return setfold.HierarchicalSlotSetEncoder(made, residual=True)


@dataclass(frozen=True)
class Universal:
    """A Slot Set Encoder, then any set encoder on the set of its slots; needs one pass.

    Args:
        slots: settings of the slots; each outputs `slots.width` numbers.
        among: set encoder on the slots, such as a Set Transformer.

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
    """Learned queries with a softmax over elements, and dim_out / num_queries numbers each.

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
class Gated:
    """Gated attention (Ilse et al., ICML 2018): one softmax over the elements.

    >>> import torch
    >>> Gated().build(dim_in=16, dim_out=16)(torch.randn(2, 100, 16)).shape
    torch.Size([2, 16])
    """

    dim_hidden: int = 16

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder:
        pool = setfold.GatedAttentionPool(dim_out, self.dim_hidden)
        return setfold.Composition(pool, _widened(features, dim_in, dim_out), nn.Flatten())


@dataclass(frozen=True)
class PMA(SlottedPool):
    """The Set Transformer's pooling by multi-head attention, dim_out / num_seeds numbers per seed.

    Args:
        num_heads: number of heads.
        num_seeds: number of seeds.
        width: width of the attention, if seeds have fewer numbers; a linear layer then maps each
            seed to its numbers. None for the numbers of a seed.

    >>> import torch
    >>> PMA().build(dim_in=3, dim_out=64)(torch.randn(2, 100, 3)).shape
    torch.Size([2, 64])
    """

    num_heads: int = 4
    num_seeds: int = 1
    width: int | None = None

    def dim_of_slots(self, dim_out: int) -> int:
        return _share(dim_out, self.num_seeds, f"{self.num_seeds} seeds")

    def encoder(self, dim_in: int, dim_out: int) -> setfold.StreamingSetEncoder:
        dim = self.dim_of_slots(dim_out)
        width = dim if self.width is None else self.width
        attention = setfold.PMA(width, self.num_seeds, self.num_heads)
        return setfold.Composition(
            attention, _widened(None, dim_in, width), _widened(None, width, dim)
        )


@dataclass(frozen=True)
class Transformer:
    """ISABs, in which elements interact through inducing points; then a pool.

    Args:
        num_layers: number L of ISABs; the encoder folds in L + 1 passes.
        num_inducing: inducing points of each ISAB.
        num_heads: heads of each ISAB.
        dropout: dropout after the ISABs.
        last: the pool; PMA for the Set Transformer.
        dim: width of the ISABs; None for the width of the encoding.

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
    """Divide `total` numbers evenly by `count`."""
    if total % count:
        raise setfold.InputError(
            f"cannot divide {total} numbers evenly between {whose}; choose a divisor of {total}."
        )
    return total // count


def _width_of_values(aggregate: str | Sequence[str], width: int) -> int:
    """Return the width of values such that their aggregates have `width` numbers per slot."""
    names = [aggregate] if isinstance(aggregate, str) else list(aggregate)
    masses = names.count("mass")  # a mass is one number, independent of the width of values
    wide = len(names) - masses
    if wide == 0 or width <= masses:
        raise setfold.InputError(
            f"{width} numbers per slot leave no room for values with aggregates {names}. Use fewer "
            "slots or an aggregate of values."
        )
    return _share(width - masses, wide, f"{wide} aggregates of values ({masses} masses excluded)")


def _widened(features: nn.Module | None, dim_in: int, width: int) -> nn.Module | None:
    """Extend features to output `width` numbers for each element."""
    if dim_in == width:
        return features
    last = nn.Linear(dim_in, width)
    return last if features is None else nn.Sequential(features, last)


@contextmanager
def _ignore_cancelled_attention(ignore: bool) -> Iterator[None]:
    """Suppress the warning that attention cancels if the experiment is about that."""
    with warnings.catch_warnings():
        if ignore:
            warnings.simplefilter("ignore", setfold.CancelledAttentionWarning)
        yield
