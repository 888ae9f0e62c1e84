"""The peers of the Slot Set Encoder: the literal algorithm and modules of other libraries.

To add a peer, write a small module that is built from a `Shape` (modules.py) and add a line to
`PEERS`. It then appears in all tables and plots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from bench.modules import (
    HEADS,
    SLOT_ATTENTION_ITERATIONS,
    FullSetTransformer,
    GeometricDeepSets,
    IterativeSlots,
    Literal,
    MultiheadPooling,
    QueryPooling,
    SeedPooling,
    deep_sets,
    literal_on_features,
    slot_set,
    slot_set_on_features,
)
from bench.plan import Shape

QUADRATIC_LIMIT = 3e7  # largest number of pairs of elements for a quadratic module


def anything(shape: Shape, length: int) -> bool:
    return True


def quadratic(shape: Shape, length: int) -> bool:
    return length * length <= QUADRATIC_LIMIT


@dataclass(frozen=True)
class Peer:
    """One row of the tables.

    Attributes:
        name: name in tables and plots.
        build: function that builds the module for a shape.
        plotted: whether it also has a line in the plots; near-identical peers share one.
        bears: function that returns whether it can process a set of n elements.
    """

    name: str
    build: Callable[[Shape], nn.Module]
    plotted: bool = True
    bears: Callable[[Shape, int], bool] = anything


OURS = "setfold mean"
LITERAL = "literal mean"
ATTENTION = "SDPA, K queries"
SEEDS = "PyG PMA"

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(OURS, partial(slot_set, aggregate="mean")),
        Peer("setfold sum", partial(slot_set, aggregate="sum"), plotted=False),
        Peer(LITERAL, partial(Literal, aggregate="mean")),
        Peer("literal sum", partial(Literal, aggregate="sum"), plotted=False),
        Peer(ATTENTION, QueryPooling),
        Peer("MultiheadAttention", MultiheadPooling),
        Peer(SEEDS, SeedPooling),
        Peer("PyG SetTransformer", FullSetTransformer, bears=quadratic),
        Peer("slot-attention", IterativeSlots),
        Peer("setfold DeepSets", deep_sets),
        Peer("PyG DeepSets", GeometricDeepSets),
    )
}

OURS_ON_FEATURES = f"{OURS} on features"
LITERAL_ON_FEATURES = f"{LITERAL} on features"

ON_FEATURES: dict[str, Peer] = {  # used only where gradients are compared
    peer.name: peer
    for peer in (
        Peer(OURS_ON_FEATURES, partial(slot_set_on_features, aggregate="mean")),
        Peer(LITERAL_ON_FEATURES, partial(literal_on_features, aggregate="mean")),
    )
}

NOTES = (
    "Literal is Algorithm 1 of the paper in plain PyTorch modules, with setfold's weights.",
    f"MultiheadAttention, PMA and SetTransformer have {HEADS} heads. MultiheadAttention has keys "
    "and values of width d (kdim, vdim) and an embedding of width d_out.",
    "PyG PMA, PyG SetTransformer and slot-attention have the same input and output width. If d "
    "differs from d_out (for example 5 and 64), a Linear(d, d_out) precedes them.",
    f"PyG SetTransformer is quadratic and omitted above n² = {QUADRATIC_LIMIT:.0e}. slot-attention "
    f"runs {SLOT_ATTENTION_ITERATIONS} iterations.",
    "Deep Sets output one vector instead of K. Both have the same networks and a sum.",
)
