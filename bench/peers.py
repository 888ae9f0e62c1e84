"""Who the Slot Set Encoder is compared with: the literal algorithm, and what people use instead.

To add a peer, write a small module that is made from a `Shape` (modules.py) and add a line to
`PEERS`. Its place in the tables and its line in the plots follow from that.
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

QUADRATIC_LIMIT = 3e7  # pairs of elements that a quadratic module is asked for


def anything(shape: Shape, length: int) -> bool:
    return True


def quadratic(shape: Shape, length: int) -> bool:
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

ON_FEATURES: dict[str, Peer] = {  # seen only where gradients are compared
    peer.name: peer
    for peer in (
        Peer(OURS_ON_FEATURES, partial(slot_set_on_features, aggregate="mean")),
        Peer(LITERAL_ON_FEATURES, partial(literal_on_features, aggregate="mean")),
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
