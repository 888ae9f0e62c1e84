"""Who is compared: modules that map one set (1, n, d) to K vectors, or to one.

To add a peer, write a small module that is made from a `Shape` and add a line to `PEERS`. Its
place in the tables and its line in the plots follow from that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import setfold
from bench.plan import Shape

HEADS = 4
SLOT_ATTENTION_ITERATIONS = 3
QUADRATIC_LIMIT = 3e7  # pairs of elements that a quadratic peer is asked for


class Literal(nn.Module):
    """Algorithm 1 of the Slot Set Encoder paper, line by line.

    Its parameters have the names of `setfold.SlotSetEncoder`, so that either can load the other's.
    """

    def __init__(self, shape: Shape, aggregate: str) -> None:
        super().__init__()
        self.aggregate = aggregate
        self.scale = 1 / math.sqrt(shape.dim_out)
        self.slot_values = nn.Parameter(torch.randn(shape.num_slots, shape.dim_out))
        self.norm = nn.LayerNorm(shape.dim_out)
        self.to_query = nn.Linear(shape.dim_out, shape.dim_out)
        self.to_key = nn.Linear(shape.dim_in, shape.dim_out)
        self.to_value = nn.Linear(shape.dim_in, shape.dim_out)

    def forward(self, elements: Tensor) -> Tensor:
        query = self.to_query(self.norm(self.slot_values))  # (K, d_out)
        key, value = self.to_key(elements), self.to_value(elements)  # (1, n, d_out)
        attention = torch.sigmoid(key @ query.t() * self.scale) + 1e-8  # (1, n, K)
        weights = attention / attention.sum(-1, keepdim=True)
        if self.aggregate in ("max", "min"):
            contributions = weights.unsqueeze(-1) * value.unsqueeze(2)  # (1, n, K, d_out)
            return contributions.amax(1) if self.aggregate == "max" else contributions.amin(1)
        total = weights.transpose(1, 2) @ value  # (1, K, d_out)
        return total / elements.shape[1] if self.aggregate == "mean" else total


class QueryPooling(nn.Module):
    """scaled_dot_product_attention with K learned queries: one head, no output projection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, shape.num_slots, shape.dim_out))
        self.to_key = nn.Linear(shape.dim_in, shape.dim_out)
        self.to_value = nn.Linear(shape.dim_in, shape.dim_out)

    def forward(self, elements: Tensor) -> Tensor:
        return scaled_dot_product_attention(
            self.query.unsqueeze(1),
            self.to_key(elements).unsqueeze(1),
            self.to_value(elements).unsqueeze(1),
        ).squeeze(1)


class MultiheadPooling(nn.Module):
    """nn.MultiheadAttention with K learned queries of width d_out; keys and values of width d."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, shape.num_slots, shape.dim_out))
        self.attention = nn.MultiheadAttention(
            shape.dim_out, HEADS, kdim=shape.dim_in, vdim=shape.dim_in, batch_first=True
        )

    def forward(self, elements: Tensor) -> Tensor:
        return self.attention(self.query, elements, elements, need_weights=False)[0]


class Widened(nn.Module):
    """A peer whose output is as wide as its input: a Linear(d, d_out) before it, where they differ."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        same = shape.dim_in == shape.dim_out
        self.widen = nn.Identity() if same else nn.Linear(shape.dim_in, shape.dim_out)


class SeedPooling(Widened):
    """PyG's pooling by multi-head attention, the decoder of the Set Transformer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        from torch_geometric.nn.aggr.utils import PoolingByMultiheadAttention

        self.pool = PoolingByMultiheadAttention(
            shape.dim_out, shape.num_slots, HEADS, layer_norm=False
        )

    def forward(self, elements: Tensor) -> Tensor:
        return self.pool(self.widen(elements))


class SetTransformer(Widened):
    """PyG's Set Transformer: every element looks at every other one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        from torch_geometric.nn.aggr import SetTransformerAggregation

        self.pool = SetTransformerAggregation(shape.dim_out, shape.num_slots, heads=HEADS)

    def forward(self, elements: Tensor) -> Tensor:
        index = torch.zeros(elements.shape[1], dtype=torch.long)
        return self.pool(
            self.widen(elements[0]), index, dim_size=1, max_num_elements=elements.shape[1]
        )


class IterativeSlots(Widened):
    """slot_attention.SlotAttention, three iterations."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        from slot_attention import SlotAttention

        self.pool = SlotAttention(shape.num_slots, shape.dim_out, iters=SLOT_ATTENTION_ITERATIONS)

    def forward(self, elements: Tensor) -> Tensor:
        return self.pool(self.widen(elements))


def _features(shape: Shape) -> nn.Module:
    """The element-wise network of both Deep Sets."""
    width = shape.dim_out
    return nn.Sequential(nn.Linear(shape.dim_in, width), nn.ReLU(), nn.Linear(width, width))


class GeometricDeepSets(nn.Module):
    """PyG's Deep Sets."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from torch_geometric.nn.aggr import DeepSetsAggregation

        head = nn.Linear(shape.dim_out, shape.dim_out)
        self.pool = DeepSetsAggregation(_features(shape), head)

    def forward(self, elements: Tensor) -> Tensor:
        index = torch.zeros(elements.shape[1], dtype=torch.long)
        return self.pool(elements[0], index, dim_size=1)


def slot_set(shape: Shape, aggregate: str | Sequence[str]) -> setfold.SlotSetEncoder:
    return setfold.SlotSetEncoder(
        shape.dim_in, shape.num_slots, shape.dim_out, shape.dim_out, aggregate, slots="learned"
    )


def deep_sets(shape: Shape) -> setfold.DeepSets:
    head = nn.Linear(shape.dim_out, shape.dim_out)
    return setfold.DeepSets(_features(shape), shape.dim_out, "sum", head)


def quadratic(length: int) -> bool:
    return length * length <= QUADRATIC_LIMIT


@dataclass(frozen=True)
class Peer:
    """One line of the tables.

    Attributes:
        name: what it is called there.
        build: makes the module for a shape.
        plotted: whether it also gets a line in the plots; twins share one.
        bears: whether a set of n elements is small enough for it.
    """

    name: str
    build: Callable[[Shape], nn.Module]
    plotted: bool = True
    bears: Callable[[int], bool] = lambda length: True


OURS = "setfold mean"
ATTENTION = "SDPA, K queries"
SEEDS = "PyG PMA"

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(OURS, partial(slot_set, aggregate="mean")),
        Peer("setfold sum", partial(slot_set, aggregate="sum"), plotted=False),
        Peer("literal mean", partial(Literal, aggregate="mean")),
        Peer("literal sum", partial(Literal, aggregate="sum"), plotted=False),
        Peer(ATTENTION, QueryPooling),
        Peer("MultiheadAttention", MultiheadPooling),
        Peer(SEEDS, SeedPooling),
        Peer("PyG SetTransformer", SetTransformer, bears=quadratic),
        Peer("slot-attention", IterativeSlots),
        Peer("setfold DeepSets", deep_sets),
        Peer("PyG DeepSets", GeometricDeepSets),
    )
}

NOTES = (
    "Literal is Algorithm 1 of the paper in plain torch modules, with setfold's own weights.",
    f"MultiheadAttention, PMA and SetTransformer have {HEADS} heads; MultiheadAttention takes keys "
    "and values of width d (kdim, vdim) and is d_out wide itself.",
    "PyG PMA, PyG SetTransformer and slot-attention put out what they take in, so where d differs "
    "from d_out, as 5 does from 64, a Linear(d, d_out) stands before them.",
    f"PyG SetTransformer is quadratic and left out above n² = {QUADRATIC_LIMIT:.0e}; "
    f"slot-attention runs {SLOT_ATTENTION_ITERATIONS} iterations.",
    "Deep Sets read one vector, not K; both have the same networks and add up.",
)
