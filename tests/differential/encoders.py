"""Random streaming encoders of every class, and of combinations of them."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import nn

import setfold

SIMPLE = ("sum", "mean", "max", "min")
WEIGHTED = (*SIMPLE, "weighted_mean", "mass")
FACTORS = (0.3, 1.0, 1.0, 4.0, 20.0)  # of weights: large ones give logits far apart

Draw = np.random.Generator


def draw_encoder(draw: Draw, kind: type | None = None) -> setfold.StreamingSetEncoder:
    """A random encoder, of some class or of any, with weights of random size.

    Args:
        draw: decides.
        kind: the class; None for any.
    """
    kind = kind or MAKERS_BY_CHANCE[draw.integers(len(MAKERS_BY_CHANCE))]
    torch.manual_seed(int(draw.integers(2**31)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", setfold.CancelledAttentionWarning)
        encoder = MAKERS[kind](draw, int(draw.integers(1, 5)))
    factor = float(draw.choice(FACTORS))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape)).mul_(factor)
    return encoder.eval()


def _some(draw: Draw, names: tuple[str, ...]) -> str | list[str]:
    """One aggregate, or a list of several."""
    count = int(draw.integers(0, min(4, len(names))))
    if count == 0:
        return str(draw.choice(names))
    return [str(name) for name in draw.permutation(names)[:count]]


def _slot_set(draw: Draw, dim_in: int) -> setfold.SlotSetEncoder:
    similarity = str(draw.choice(["dot", "cosine"]))
    dim_out = int(draw.choice([1, 2, 5]))  # with 1 and many slots the projections come first
    narrow = similarity == "cosine" and dim_out == 1  # which needs wider keys
    return setfold.SlotSetEncoder(
        dim_in,
        num_slots=int(draw.choice([1, 2, 3, 5])),
        dim_slot=int(draw.integers(1, 6)),
        dim_out=dim_out,
        aggregate=_some(draw, WEIGHTED),
        slots=str(draw.choice(["random", "learned"])),
        bias=bool(draw.integers(2)),
        attention=str(draw.choice(["sigmoid", "softmax"])),
        similarity=similarity,
        dim_key=4 if narrow or draw.integers(2) else None,
    )


def _hierarchy(draw: Draw, dim_in: int) -> setfold.HierarchicalSlotSetEncoder:
    levels = [_slot_set(draw, dim_in)]
    if draw.integers(4) == 0:
        width, slots = levels[0].dim_readout, levels[0].num_slots
        levels.append(setfold.SlotSetEncoder(width, slots, 3, width))
        return setfold.HierarchicalSlotSetEncoder(levels, residual=True)
    for _ in range(int(draw.integers(0, 3))):
        levels.append(_slot_set(draw, levels[-1].dim_readout))
    activation = [None, nn.Tanh(), nn.Identity()][draw.integers(3)]
    return setfold.HierarchicalSlotSetEncoder(levels, activation)


def _pool(draw: Draw, dim_in: int) -> setfold.Pool:
    return setfold.Pool(dim_in, _some(draw, SIMPLE))


def _moments(draw: Draw, dim_in: int) -> setfold.Moments:
    return setfold.Moments(dim_in)


def _covariance(draw: Draw, dim_in: int) -> setfold.Covariance:
    return setfold.Covariance(dim_in)


def _statistics(draw: Draw, dim_in: int) -> setfold.SummaryStatistics:
    return setfold.SummaryStatistics(dim_in)


def _attention_pool(draw: Draw, dim_in: int) -> setfold.AttentionPool:
    heads = int(draw.integers(1, 3))
    width = heads * int(draw.integers(1, 4))
    return setfold.AttentionPool(
        dim_in, int(draw.integers(1, 4)), width, heads, bias=bool(draw.integers(2))
    )


def _gated_attention_pool(draw: Draw, dim_in: int) -> setfold.GatedAttentionPool:
    hidden, branches = (int(number) for number in draw.integers(1, 4, 2))
    gated, bias = (bool(choice) for choice in draw.integers(0, 2, 2))
    return setfold.GatedAttentionPool(dim_in, hidden, branches, gated, bias)


def _seed_attention(draw: Draw, dim_in: int) -> setfold.SeedAttention:
    return setfold.SeedAttention(
        dim_in, int(draw.integers(1, 4)), _heads(draw, dim_in), bool(draw.integers(2))
    )


def _pma(draw: Draw, dim_in: int) -> setfold.PMA:
    return setfold.PMA(
        dim_in, int(draw.integers(1, 4)), _heads(draw, dim_in), bool(draw.integers(2))
    )


def _constant_memory(draw: Draw, dim_in: int) -> setfold.ConstantMemoryEncoder:
    latents, own, blocks = (int(number) for number in draw.integers(1, 4, 3))
    heads, norms = int(draw.integers(1, 3)), bool(draw.integers(2))
    return setfold.ConstantMemoryEncoder(dim_in, 4, latents, own, blocks, heads, norms)


def _heads(draw: Draw, width: int) -> int:
    return int(draw.choice([heads for heads in (1, 2, 3) if width % heads == 0]))


def _placed(draw: Draw, dim_in: int) -> setfold.PlacedSlotEncoder:
    dim, learned = int(draw.integers(1, min(dim_in, 2) + 1)), bool(draw.integers(2))
    side = float(draw.choice([1.0, 1.0, 3.0, 30.0]))
    if draw.integers(3):
        shape = [int(size) for size in draw.integers(1, 12, dim)]
        places = setfold.Grid([-side] * dim, [1.5 * side] * dim, shape, learned)
    else:
        points = side * draw.standard_normal((int(draw.integers(1, 6)), dim))
        places = setfold.Places(points.tolist(), learned)
    own = bool(draw.integers(2))
    width = draw.uniform(0.2, 1.0, places.num_slots).tolist() if own else 0.6
    values = ["offsets", "squares"] if dim == dim_in else ["features", "offsets", "squares"]
    return setfold.PlacedSlotEncoder(
        dim_in,
        places,
        width,
        values=_some(draw, tuple(values)),
        aggregate=_some(draw, (*WEIGHTED, "density", "variance")),
        attention=str(draw.choice(["softmax", "kernel"])),
        position=[int(column) for column in draw.permutation(dim_in)[:dim]],
        reach=float(draw.choice([1.0, 2.0, 3.0, 8.0])),
        outside=str(draw.choice(["clamp", "drop"])),
        learn_width=bool(draw.integers(2)),
    )


def _features(draw: Draw, dim_in: int, width: int) -> nn.Module:
    activation = [nn.Tanh(), nn.ReLU(), nn.Sigmoid()][draw.integers(3)]
    return nn.Sequential(nn.Linear(dim_in, width), activation)


def _head(draw: Draw, encoder: setfold.StreamingSetEncoder) -> nn.Module | None:
    size = encoder(torch.zeros(1, 1, encoder.dim_in)).numel()
    linear = nn.Sequential(nn.Flatten(), nn.Linear(size, 2))
    return [None, nn.Sequential(nn.Flatten(), nn.Tanh()), linear][draw.integers(3)]


def _deep_sets(draw: Draw, dim_in: int) -> setfold.DeepSets:
    pool = _pool(draw, 3)
    head = [None, nn.Linear(pool.dim_readout, 2)][draw.integers(2)]
    return setfold.DeepSets(_features(draw, dim_in, 3), 3, pool.aggregate, head)


def _composition(draw: Draw, dim_in: int) -> setfold.Composition:
    inner = PARTS[draw.integers(len(PARTS))]
    featured = bool(draw.integers(2))
    encoder = inner(draw, 3 if featured else dim_in)
    features = _features(draw, dim_in, 3) if featured else None
    return setfold.Composition(encoder, features, _head(draw, encoder))


def _concat(draw: Draw, dim_in: int) -> setfold.Concat:
    makers = [PARTS[place] for place in draw.integers(0, len(PARTS), draw.integers(1, 4))]
    return setfold.Concat([maker(draw, dim_in) for maker in makers])


def _parts_of_all(draw: Draw, dim_in: int) -> setfold.Concat:
    """Encoders with features of their own, and one inside the other."""
    return setfold.Concat(
        {"features": _deep_sets(draw, dim_in), "inner": _composition(draw, dim_in)}
        | {"pair": _concat(draw, dim_in)}
    )


PARTS = (
    *(_slot_set, _hierarchy, _pool, _moments, _attention_pool, _gated_attention_pool, _pma),
    _placed,
)
MAKERS = {
    setfold.SlotSetEncoder: _slot_set,
    setfold.HierarchicalSlotSetEncoder: _hierarchy,
    setfold.Pool: _pool,
    setfold.Moments: _moments,
    setfold.Covariance: _covariance,
    setfold.SummaryStatistics: _statistics,
    setfold.AttentionPool: _attention_pool,
    setfold.GatedAttentionPool: _gated_attention_pool,
    setfold.SeedAttention: _seed_attention,
    setfold.PMA: _pma,
    setfold.ConstantMemoryEncoder: _constant_memory,
    setfold.PlacedSlotEncoder: _placed,
    setfold.DeepSets: _deep_sets,
    setfold.Composition: _composition,
    setfold.Concat: lambda draw, dim_in: (_concat, _parts_of_all)[draw.integers(2)](draw, dim_in),
}
MAKERS_BY_CHANCE = [
    *MAKERS,
    *[setfold.SlotSetEncoder] * 5,
    setfold.PlacedSlotEncoder,
    setfold.HierarchicalSlotSetEncoder,
]
