"""Every encoder of setfold, with its library peer if there is one.

To add an encoder, write a function that builds it from a `Shape` and add a line to its family in
`FAMILIES`. It then appears in all tables and plots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

import setfold
from bench.modules import (
    HEADS,
    INDUCING,
    LAYERS,
    SLOT_ATTENTION_ITERATIONS,
    InducedSetTransformer,
    features,
    slot_set,
)
from bench.peers import ATTENTION, OURS, PEERS, SEEDS, Peer, quadratic
from bench.plan import Shape

SLOT_SHARE = 4  # the second level of the hierarchy has K / 4 slots
SLOT_ATTENTION_HIDDEN = 128  # hidden width, or d_out if larger: slot-attention's default
SAMPLED_PAIRS = 1_000
PAIRS_LIMIT = 1e10  # largest number of multiplications for a network on all pairs of elements


# ---- slots ---------------------------------------------------------------------------------------


def hierarchy(shape: Shape) -> setfold.HierarchicalSlotSetEncoder:
    above = Shape(shape.dim_out, shape.num_slots // SLOT_SHARE, shape.dim_out)
    return setfold.HierarchicalSlotSetEncoder([slot_set(shape, "mean"), slot_set(above, "mean")])


def slot_attention(shape: Shape) -> setfold.SlotAttention:
    hidden = max(SLOT_ATTENTION_HIDDEN, shape.dim_out)
    return setfold.SlotAttention(*shape, SLOT_ATTENTION_ITERATIONS, hidden)


def placed_slots(shape: Shape) -> setfold.Composition:
    """Slots at the K cells of a grid over the first two columns; the head projects the values."""
    grid = setfold.Grid((-2, -2), (2, 2), (shape.num_slots // 4, 4))
    encoder = setfold.PlacedSlotEncoder(shape.dim_in, grid)
    return setfold.Composition(encoder, head=nn.Linear(encoder.dim_readout, shape.dim_out))


GRIDS = (((512,), (65_536,)), ((16, 32), (256, 256)), ((8, 8, 8), (64, 64, 16)))  # few, many slots


def on_grid(shape: tuple[int, ...]) -> setfold.PlacedSlotEncoder:
    """Slots at the cells of a grid over a unit box, for elements with one feature."""
    axes = len(shape)
    return setfold.PlacedSlotEncoder(axes + 1, setfold.Grid([0] * axes, [1] * axes, shape))


# ---- Deep Sets -----------------------------------------------------------------------------------


def pool(shape: Shape) -> setfold.Composition:
    head = nn.Linear(shape.dim_in, shape.dim_out)
    return setfold.Composition(setfold.Pool(shape.dim_in, "mean"), head=head)


def equivariant_deep_sets(shape: Shape) -> setfold.EquivariantDeepSets:
    return setfold.EquivariantDeepSets(shape.dim_in, [shape.dim_out] * LAYERS)


def statistics(shape: Shape) -> setfold.Composition:
    encoder = setfold.SummaryStatistics(shape.dim_in)
    return setfold.Composition(encoder, head=nn.Linear(encoder.dim_readout, shape.dim_out))


def covariance(shape: Shape) -> setfold.Composition:
    head = nn.Sequential(nn.Flatten(), nn.Linear((1 + shape.dim_in) * shape.dim_in, shape.dim_out))
    return setfold.Composition(setfold.Covariance(shape.dim_in), head=head)


def set_norm(shape: Shape) -> setfold.LayeredSetEncoder:
    layers = [setfold.SetNorm(shape.dim_out)]
    return setfold.LayeredSetEncoder(layers, setfold.Pool(shape.dim_out, "max"), features(shape))


# ---- softmax over elements -----------------------------------------------------------------------


def attention_pool(shape: Shape) -> setfold.AttentionPool:
    return setfold.AttentionPool(*shape)


def headed_attention_pool(shape: Shape) -> setfold.Composition:
    head = nn.Linear(shape.dim_out, shape.dim_out)  # as in nn.MultiheadAttention
    return setfold.Composition(setfold.AttentionPool(*shape, num_heads=HEADS), head=head)


def gated_attention_pool(shape: Shape) -> setfold.GatedAttentionPool:
    return setfold.GatedAttentionPool(shape.dim_in, shape.dim_out, shape.num_slots)


# ---- several at once -----------------------------------------------------------------------------


def parts(shape: Shape) -> Iterator[setfold.StreamingSetEncoder]:
    yield setfold.Pool(shape.dim_in, "max")
    yield slot_set(shape, "mean")
    yield setfold.AttentionPool(*shape)


def concat(shape: Shape) -> setfold.Concat:
    return setfold.Concat(list(parts(shape)))


class OneByOne(nn.Module):
    """The parts of `concat`, each called on its own."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts(shape))

    def forward(self, elements: Tensor) -> Tensor:
        return torch.cat([part(elements).flatten(1) for part in self.parts], 1)


# ---- the Set Transformer -------------------------------------------------------------------------


def seed_pool(shape: Shape) -> setfold.Composition:
    seeds = setfold.PMA(shape.dim_out, shape.num_slots, HEADS, layer_norm=False)
    if shape.dim_in == shape.dim_out:
        return seeds
    return setfold.Composition(seeds, features=nn.Linear(shape.dim_in, shape.dim_out))


def set_transformer(shape: Shape) -> setfold.SetTransformer:
    return setfold.SetTransformer(
        shape.dim_in,
        shape.dim_out,
        HEADS,
        num_inducing=INDUCING,
        num_layers=LAYERS,
        num_seeds=shape.num_slots,
        layer_norm=False,
    )


def constant_memory(shape: Shape) -> setfold.ConstantMemoryEncoder:
    return setfold.ConstantMemoryEncoder(
        shape.dim_in,
        shape.dim_out,
        num_latents=shape.num_slots,
        num_block_latents=shape.num_slots,
        num_blocks=LAYERS,
        num_heads=HEADS,
        layer_norm=False,
    )


def full_set_transformer(shape: Shape) -> setfold.FullSetTransformer:
    return setfold.FullSetTransformer(
        shape.dim_in,
        shape.dim_out,
        HEADS,
        num_layers=1,
        num_seeds=shape.num_slots,
        num_decoder_layers=1,
        layer_norm=False,
    )


# ---- order and tuples ----------------------------------------------------------------------------


def sort_pool(shape: Shape) -> setfold.FSPool:
    return setfold.FSPool(shape.dim_in)


def all_pairs(shape: Shape) -> setfold.JanossyPool:
    return _janossy(shape, None)


def sampled_pairs(shape: Shape) -> setfold.JanossyPool:
    return _janossy(shape, SAMPLED_PAIRS)


def _janossy(shape: Shape, num_samples: int | None) -> setfold.JanossyPool:
    network = nn.Sequential(nn.Flatten(), nn.Linear(2 * shape.dim_in, shape.dim_out), nn.ReLU())
    return setfold.JanossyPool(network, shape.dim_in, num_samples=num_samples)


def bears_pairs(shape: Shape, length: int) -> bool:
    return length * length * shape.dim_in * shape.dim_out <= PAIRS_LIMIT


# ---- the registry --------------------------------------------------------------------------------


class Pair(NamedTuple):
    """An encoder of setfold and the equivalent of another library."""

    ours: Peer
    theirs: Peer | None = None


class Family(NamedTuple):
    """Encoders that share a panel in the plots."""

    title: str
    pairs: tuple[Pair, ...]

    @property
    def members(self) -> tuple[Peer, ...]:
        return tuple(peer for pair in self.pairs for peer in pair if peer is not None)


SOFTMAX = "setfold AttentionPool"
EQUIVARIANT = "setfold EquivariantDeepSets"
INDUCED = "setfold SetTransformer"

FAMILIES = (
    Family(
        "slots",
        (
            Pair(PEERS[OURS]),
            Pair(Peer("setfold hierarchy", hierarchy)),
            Pair(Peer("setfold PlacedSlotEncoder", placed_slots)),
            Pair(Peer("setfold SlotAttention", slot_attention), PEERS["slot-attention"]),
        ),
    ),
    Family(
        "Deep Sets",
        (
            Pair(Peer("setfold Pool", pool)),
            Pair(Peer("setfold SummaryStatistics", statistics)),
            Pair(Peer("setfold Covariance", covariance)),
            Pair(PEERS["setfold DeepSets"], PEERS["PyG DeepSets"]),
            Pair(Peer(EQUIVARIANT, equivariant_deep_sets)),
            Pair(Peer("setfold SetNorm", set_norm)),
        ),
    ),
    Family(
        "softmax over elements",
        (
            Pair(Peer(SOFTMAX, attention_pool), PEERS[ATTENTION]),
            Pair(
                Peer(f"{SOFTMAX}, {HEADS} heads", headed_attention_pool),
                PEERS["MultiheadAttention"],
            ),
            Pair(Peer("setfold GatedAttentionPool", gated_attention_pool)),
            Pair(Peer("setfold Concat", concat), Peer("three calls", OneByOne)),
        ),
    ),
    Family(
        "Set Transformer",
        (
            Pair(Peer("setfold PMA", seed_pool), PEERS[SEEDS]),
            Pair(Peer(INDUCED, set_transformer), Peer("PyG ISAB, PMA", InducedSetTransformer)),
            Pair(Peer("setfold ConstantMemoryEncoder", constant_memory)),
            Pair(
                Peer("setfold FullSetTransformer", full_set_transformer, bears=quadratic),
                PEERS["PyG SetTransformer"],
            ),
        ),
    ),
    Family(
        "order and tuples",
        (
            Pair(Peer("setfold FSPool", sort_pool)),
            Pair(Peer("setfold JanossyPool, all pairs", all_pairs, bears=bears_pairs)),
            Pair(Peer(f"setfold JanossyPool, {SAMPLED_PAIRS:,} pairs", sampled_pairs)),
        ),
    ),
)

OF_PYG = [
    (ours, theirs)
    for family in FAMILIES
    for ours, theirs in family.pairs
    if theirs is not None and theirs.name.startswith("PyG")
]
ENCODERS: dict[str, Peer] = {peer.name: peer for family in FAMILIES for peer in family.members}

ENCODER_NOTES = (
    f"{OURS} is SlotSetEncoder. Each encoder is followed by its library peer, if there is one, "
    "which computes the same. The notes on the peers above apply here, too.",
    f"The hierarchy has a second level with K / {SLOT_SHARE} slots. SlotAttention accepts elements "
    "of any width; slot-attention does not.",
    "PlacedSlotEncoder has K slots on a grid over the first two columns and is followed by a "
    "Linear layer.",
    "Pool, SummaryStatistics and Covariance are followed by a linear layer to d_out. SetNorm "
    "follows the network of Deep Sets and is followed by a maximum. EquivariantDeepSets has "
    f"{LAYERS} layers. These output one vector instead of K.",
    "AttentionPool with heads has an output projection, like MultiheadAttention.",
    "Concat has three parts: a maximum, K slots with a mean, and AttentionPool. Three calls are "
    "the same encoders of setfold, called one after the other. Both output one vector of width "
    "d + 2 K d_out.",
    f"SetTransformer has {LAYERS} ISABs with {INDUCING} inducing points, then PMA. "
    f"FullSetTransformer has one SAB, PMA and one SAB. ConstantMemoryEncoder has {LAYERS} blocks of "
    f"K latents. All have {HEADS} heads and no norms, and start with a Linear(d, d_out); PyG "
    "SetTransformer does so only if d differs from d_out.",
    f"JanossyPool with all pairs is omitted above n² d d_out = {PAIRS_LIMIT:.0e}. FSPool and "
    "JanossyPool output one vector; that of FSPool has width d.",
)
