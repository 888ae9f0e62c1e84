"""One small instance of every encoder, for the table that compares them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from setfold.core.composition import Composition
from setfold.core.passes import LayeredSetEncoder
from setfold.core.primitives import SetEncoder
from setfold.encoders.attention_pool import AttentionPool, GatedAttentionPool
from setfold.encoders.concat import Concat
from setfold.encoders.constant_memory import ConstantMemoryEncoder
from setfold.encoders.covariance import Covariance
from setfold.encoders.deep_sets import DeepSets, Pool
from setfold.encoders.equivariant import EquivariantDeepSets
from setfold.encoders.fspool import FSPool
from setfold.encoders.hierarchical import HierarchicalSlotSetEncoder
from setfold.encoders.janossy import JanossyPool
from setfold.encoders.placed_slots import PlacedSlotEncoder
from setfold.encoders.places import Grid
from setfold.encoders.set_norm import Moments, SetNorm
from setfold.encoders.set_transformer import (
    PMA,
    FullSetTransformer,
    SeedAttention,
    SetTransformer,
)
from setfold.encoders.slot_attention import SlotAttention
from setfold.encoders.slot_set import SlotSetEncoder
from setfold.encoders.summary import SummaryStatistics
from setfold.laws.wrong_way import ChunkAverage, PublishedSlotSetEncoder

DIM_IN, SLOTS, DIM, CHUNK = 4, 4, 8, 16


@dataclass(frozen=True)
class Exhibit:
    """A row of the table.

    Attributes:
        name: the name of the row.
        make: returns the encoder, for elements of width DIM_IN.
        wrong: whether the encoder is wrong on purpose.
    """

    name: str
    make: Callable[[], SetEncoder]
    wrong: bool = False


def _slots(aggregate: str = "mean", attention: str = "sigmoid") -> SlotSetEncoder:
    return SlotSetEncoder(DIM_IN, SLOTS, DIM, DIM, aggregate, attention=attention)


def _hierarchy() -> HierarchicalSlotSetEncoder:
    return HierarchicalSlotSetEncoder([_slots(), SlotSetEncoder(DIM, 2, DIM, DIM)])


def _universal() -> Composition:
    return Composition(_slots(), head=SetTransformer(DIM, DIM, num_inducing=SLOTS))


def _concat() -> Concat:
    return Concat(
        {
            "max": Pool(DIM_IN, "max"),
            "slots": _slots("weighted_mean"),
            "softmax": AttentionPool(DIM_IN, 2, DIM),
        }
    )


def _placed() -> PlacedSlotEncoder:
    places = Grid([-2.0, -2.0], [2.0, 2.0], [SLOTS, SLOTS])
    return PlacedSlotEncoder(DIM_IN, places, aggregate=["density", "weighted_mean", "max"])


def _features() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM_IN, DIM), nn.ReLU())


def _pairs() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(2 * DIM_IN, DIM), nn.ReLU())


def _published(aggregate: str, redraw: bool = False) -> PublishedSlotSetEncoder:
    return PublishedSlotSetEncoder(_slots(aggregate), aggregate, CHUNK, redraw)


EXHIBITS = (
    Exhibit("SlotSetEncoder, mean", _slots),
    Exhibit("SlotSetEncoder, max", lambda: _slots("max")),
    Exhibit("SlotSetEncoder, softmax over slots", lambda: _slots("weighted_mean", "softmax")),
    Exhibit("HierarchicalSlotSetEncoder", _hierarchy),
    Exhibit("SlotSetEncoder → SetTransformer", _universal),
    Exhibit("DeepSets, element-wise", lambda: DeepSets(_features(), DIM)),
    Exhibit("Pool, max", lambda: Pool(DIM_IN, "max")),
    Exhibit("Moments", lambda: Moments(DIM_IN)),
    Exhibit("Covariance", lambda: Covariance(DIM_IN)),
    Exhibit("SummaryStatistics", lambda: SummaryStatistics(DIM_IN)),
    Exhibit("AttentionPool", lambda: AttentionPool(DIM_IN, SLOTS, DIM, num_heads=2)),
    Exhibit("GatedAttentionPool", lambda: GatedAttentionPool(DIM_IN, DIM)),
    Exhibit("SeedAttention", lambda: SeedAttention(DIM_IN, SLOTS, num_heads=2)),
    Exhibit("PMA", lambda: PMA(DIM_IN, SLOTS)),
    Exhibit("ConstantMemoryEncoder", lambda: ConstantMemoryEncoder(DIM_IN, DIM, SLOTS, SLOTS)),
    Exhibit("Concat, max + slots + softmax", _concat),
    Exhibit("PlacedSlotEncoder, grid", _placed),
    Exhibit("EquivariantDeepSets, max", lambda: EquivariantDeepSets(DIM_IN, [DIM, DIM])),
    Exhibit("EquivariantDeepSets, mean", lambda: EquivariantDeepSets(DIM_IN, [DIM, DIM], "mean")),
    Exhibit("SetTransformer, ISAB", lambda: SetTransformer(DIM_IN, DIM, num_inducing=SLOTS)),
    Exhibit("SetNorm → Pool", lambda: LayeredSetEncoder([SetNorm(DIM_IN)], Pool(DIM_IN, "max"))),
    Exhibit("SlotAttention", lambda: SlotAttention(DIM_IN, SLOTS, DIM)),
    Exhibit("FullSetTransformer, SAB", lambda: FullSetTransformer(DIM_IN, DIM)),
    Exhibit("FSPool", lambda: FSPool(DIM_IN)),
    Exhibit("JanossyPool, pairs", lambda: JanossyPool(_pairs(), DIM_IN)),
    Exhibit("WRONG: published SSE, sum", lambda: _published("sum"), wrong=True),
    Exhibit("WRONG: published SSE, mean", lambda: _published("mean"), wrong=True),
    Exhibit("WRONG: published SSE, max", lambda: _published("max"), wrong=True),
    Exhibit("WRONG: slots redrawn, sum", lambda: _published("sum", redraw=True), wrong=True),
    Exhibit(
        "WRONG: chunk and average, SAB",
        lambda: ChunkAverage(FullSetTransformer(DIM_IN, DIM), CHUNK),
        wrong=True,
    ),
)
