"""The compared modules, each built from a `Shape`: one set (1, n, d) to K vectors or one vector.

Modules of other libraries are wrapped in small classes; setfold's are built by functions. This file
contains the modules that several comparisons share; encoders.py builds the others.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import setfold
from bench.plan import Shape

HEADS = 4
INDUCING = 16  # inducing points of an ISAB
LAYERS = 2  # number of ISABs
SLOT_ATTENTION_ITERATIONS = 3
FEATURES = 128  # width of the feature network in front of an encoder


# ---- alternatives to setfold ---------------------------------------------------------------------


class Literal(nn.Module):
    """Algorithm 1 of the Slot Set Encoder paper, line by line.

    Its parameters have the same names as in `setfold.SlotSetEncoder`, so weights can be exchanged.
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
    """Base of peers with equal input and output width: adds a Linear(d, d_out) if they differ."""

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


class FullSetTransformer(Widened):
    """PyG's Set Transformer, with self-attention between all elements."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        from torch_geometric.nn.aggr import SetTransformerAggregation

        self.pool = SetTransformerAggregation(shape.dim_out, shape.num_slots, heads=HEADS)

    def forward(self, elements: Tensor) -> Tensor:
        index = torch.zeros(elements.shape[1], dtype=torch.long)
        return self.pool(
            self.widen(elements[0]), index, dim_size=1, max_num_elements=elements.shape[1]
        )


class InducedSetTransformer(nn.Module):
    """PyG's blocks, combined as in the Set Transformer paper: Linear, ISABs, PMA."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from torch_geometric.nn.aggr import utils

        dim = shape.dim_out
        self.layers = nn.Sequential(
            nn.Linear(shape.dim_in, dim),
            *(
                utils.InducedSetAttentionBlock(dim, INDUCING, HEADS, layer_norm=False)
                for _ in range(LAYERS)
            ),
            utils.PoolingByMultiheadAttention(dim, shape.num_slots, HEADS, layer_norm=False),
        )

    def forward(self, elements: Tensor) -> Tensor:
        return self.layers(elements)


class IterativeSlots(Widened):
    """slot_attention.SlotAttention with three iterations."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        from slot_attention import SlotAttention

        self.pool = SlotAttention(shape.num_slots, shape.dim_out, iters=SLOT_ATTENTION_ITERATIONS)

    def forward(self, elements: Tensor) -> Tensor:
        return self.pool(self.widen(elements))


class GeometricDeepSets(nn.Module):
    """PyG's Deep Sets."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        from torch_geometric.nn.aggr import DeepSetsAggregation

        head = nn.Linear(shape.dim_out, shape.dim_out)
        self.pool = DeepSetsAggregation(features(shape), head)

    def forward(self, elements: Tensor) -> Tensor:
        index = torch.zeros(elements.shape[1], dtype=torch.long)
        return self.pool(elements[0], index, dim_size=1)


def literal_on_features(shape: Shape, aggregate: str) -> nn.Module:
    """Build the literal algorithm after a feature network, with setfold's parameter names."""
    encoder = Literal(shape._replace(dim_in=FEATURES), aggregate)
    return nn.Sequential(OrderedDict(features=wide_features(shape), encoder=encoder))


# ---- setfold -------------------------------------------------------------------------------------


def features(shape: Shape) -> nn.Module:
    """Build the element-wise network of both Deep Sets."""
    width = shape.dim_out
    return nn.Sequential(nn.Linear(shape.dim_in, width), nn.ReLU(), nn.Linear(width, width))


def wide_features(shape: Shape) -> nn.Module:
    """Build the same network, wide enough to dominate the time of the pooling after it."""
    return features(shape._replace(dim_out=FEATURES))


def slot_set(shape: Shape, aggregate: str | Sequence[str]) -> setfold.SlotSetEncoder:
    return setfold.SlotSetEncoder(
        shape.dim_in, shape.num_slots, shape.dim_out, shape.dim_out, aggregate, slots="learned"
    )


def slot_set_on_features(shape: Shape, aggregate: str) -> setfold.Composition:
    encoder = slot_set(shape._replace(dim_in=FEATURES), aggregate)
    return setfold.Composition(encoder, features=wide_features(shape))


def deep_sets(shape: Shape) -> setfold.DeepSets:
    head = nn.Linear(shape.dim_out, shape.dim_out)
    return setfold.DeepSets(features(shape), shape.dim_out, "sum", head)
