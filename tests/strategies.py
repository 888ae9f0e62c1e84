"""Random models and random situations."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import nn

import setfold
from setfold.laws.law import Case

DIM_IN = 3
SIMPLE = ("sum", "mean", "max", "min")
WEIGHTED = (*SIMPLE, "weighted_mean", "mass")
EXTREMA = (
    "max",
    "min",
)  # which cannot be undone: an element that was removed may have hidden others


def aggregates(names):
    several = st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)
    return st.one_of(st.sampled_from(names), several)


def seeded(draw):
    """Seed torch, so that hypothesis can repeat a case."""
    torch.manual_seed(draw(st.integers(0, 2**16)))


def without_extrema(names):
    return tuple(name for name in names if name not in EXTREMA)


@st.composite
def slot_set_encoders(draw, dim_in=DIM_IN, names=WEIGHTED):
    seeded(draw)
    chosen = draw(aggregates(names))
    removable = not set(names) & set(EXTREMA)
    relative = removable and "weighted_mean" in chosen  # with softmax it keeps a peak
    dim_out = draw(st.sampled_from([1, 2, 7]))  # with 1 the projections come first
    similarity = draw(st.sampled_from(["dot", "cosine"]))
    widths = [2, 5] if dim_out == 1 and similarity == "cosine" else [None, 1, 5]
    if similarity == "cosine" and 1 in widths:
        widths.remove(1)
    return setfold.SlotSetEncoder(
        dim_in=dim_in,
        num_slots=draw(st.integers(2, 5)),
        dim_slot=draw(st.integers(2, 6)),
        dim_out=dim_out,
        aggregate=chosen,
        slots=draw(st.sampled_from(["random", "learned"])),
        bias=draw(st.booleans()),
        attention=draw(st.sampled_from(["sigmoid"] if relative else ["sigmoid", "softmax"])),
        similarity=similarity,
        dim_key=draw(st.sampled_from(widths)),
    )


PLACED = (*WEIGHTED, "variance", "density")


@st.composite
def placed_slot_encoders(draw, names=PLACED):
    seeded(draw)
    dim, learned = draw(st.integers(1, DIM_IN)), draw(st.booleans())
    if draw(st.booleans()):
        shape = [draw(st.integers(1, 9 // dim)) for _ in range(dim)]
        places = setfold.Grid([-1.5] * dim, [1.0] * dim, shape, learned)
        if learned:
            nn.init.normal_(places.shift, std=0.3)
    else:
        places = setfold.Places(torch.randn(draw(st.integers(1, 6)), dim), learned)
    kinds = ["offsets", "squares", *(["features"] if dim < DIM_IN else [])]
    return setfold.PlacedSlotEncoder(
        DIM_IN,
        places,
        width=draw(st.sampled_from([0.4, 1.1])),
        values=draw(st.lists(st.sampled_from(kinds), min_size=1, unique=True)),
        aggregate=draw(aggregates(names)),
        attention=draw(st.sampled_from(["softmax", "kernel"])),
        position=draw(st.permutations(range(DIM_IN)))[:dim],
        reach=draw(st.sampled_from([1.0, 3.0])),
        outside=draw(st.sampled_from(["clamp", "drop"])),
        learn_width=draw(st.booleans()),
    )


@st.composite
def hierarchies(draw, names=WEIGHTED, residuals=(False, True)):
    levels = [draw(slot_set_encoders(names=names))]  # the only level that keeps a state
    activation = draw(st.sampled_from([None, nn.Tanh(), nn.Identity()]))
    if draw(st.sampled_from(residuals)):  # all levels have the same shape
        shape, width = levels[0].num_slots, levels[0].dim_readout
        levels += [setfold.SlotSetEncoder(width, shape, 3, width) for _ in range(2)]
        return setfold.HierarchicalSlotSetEncoder(levels, activation, residual=True)
    for _ in range(draw(st.integers(0, 2))):
        levels.append(draw(slot_set_encoders(dim_in=levels[-1].dim_readout)))
    return setfold.HierarchicalSlotSetEncoder(levels, activation)


@st.composite
def pools(draw, names=SIMPLE):
    return setfold.Pool(DIM_IN, draw(aggregates(names)))


@st.composite
def deep_sets(draw, names=SIMPLE):
    seeded(draw)
    features = nn.Sequential(nn.Linear(DIM_IN, 4), nn.Tanh())
    chosen = draw(aggregates(names))
    width = 4 * (1 if isinstance(chosen, str) else len(chosen))
    head = draw(st.sampled_from([None, nn.Linear(width, 2)]))
    return setfold.DeepSets(features, dim_features=4, aggregate=chosen, head=head)


HEADS = (None, nn.Sequential(nn.Flatten(), nn.Tanh()))


@st.composite
def compositions(draw, names=WEIGHTED, heads=HEADS):
    seeded(draw)
    features = nn.Sequential(nn.Linear(DIM_IN, 4), nn.Tanh())
    head = draw(st.sampled_from(heads))
    return setfold.Composition(draw(slot_set_encoders(dim_in=4, names=names)), features, head)


@st.composite
def attention_pools(draw):
    seeded(draw)
    heads = draw(st.sampled_from([1, 2]))
    width = heads * draw(st.integers(1, 3))
    return setfold.AttentionPool(DIM_IN, draw(st.integers(1, 4)), width, heads, draw(st.booleans()))


@st.composite
def concats(draw, parts=None):
    if parts is None:
        parts = st.one_of(pools(), slot_set_encoders(), attention_pools(), placed_slot_encoders())
    return setfold.Concat(draw(st.lists(parts, min_size=1, max_size=3)))


@st.composite
def gated_attention_pools(draw):
    seeded(draw)
    return setfold.GatedAttentionPool(
        DIM_IN,
        dim_hidden=draw(st.integers(1, 5)),
        num_branches=draw(st.integers(1, 3)),
        gated=draw(st.booleans()),
        bias=draw(st.booleans()),
    )


@st.composite
def seed_attentions(draw, kind=setfold.SeedAttention):
    seeded(draw)
    return kind(DIM_IN, draw(st.integers(1, 3)), draw(st.sampled_from([1, 3])), draw(st.booleans()))


@st.composite
def set_transformers(draw):
    seeded(draw)
    return setfold.SetTransformer(
        DIM_IN,
        dim=4,
        num_heads=draw(st.sampled_from([1, 2])),
        num_inducing=draw(st.integers(1, 3)),
        num_layers=draw(st.integers(1, 3)),
        num_seeds=draw(st.integers(1, 2)),
        num_decoder_layers=draw(st.integers(0, 1)),
        layer_norm=draw(st.booleans()),
    )


@st.composite
def constant_memory_encoders(draw):
    seeded(draw)
    return setfold.ConstantMemoryEncoder(
        DIM_IN,
        dim=4,
        num_latents=draw(st.integers(1, 3)),
        num_block_latents=draw(st.integers(1, 3)),
        num_blocks=draw(st.integers(1, 3)),
        num_heads=draw(st.sampled_from([1, 2])),
        layer_norm=draw(st.booleans()),
    )


@st.composite
def equivariant_deep_sets(draw):
    seeded(draw)
    return setfold.EquivariantDeepSets(
        DIM_IN,
        draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)),
        subtract=draw(st.sampled_from(["max", "mean"])),
        shared=draw(st.booleans()),
        aggregate=draw(aggregates(SIMPLE)),
    )


@st.composite
def slot_attentions(draw):
    seeded(draw)
    slots, iterations = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    return setfold.SlotAttention(DIM_IN, slots, 4, iterations, dim_hidden=5)


@st.composite
def layered(draw):
    seeded(draw)
    norm = setfold.SetNorm(DIM_IN, over=draw(st.sampled_from(["feature", "set"])))
    # A new one has no bias: what it makes adds up to zero, and a sum of it would be rounding only.
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    layer = st.sampled_from(
        [
            norm,
            setfold.ISAB(DIM_IN, 2, 1),
            setfold.EquivariantLayer(DIM_IN, DIM_IN),
            setfold.UnitBox(DIM_IN, position=(2, 0)),
        ]
    )
    pool = draw(st.one_of(pools(), slot_set_encoders(), attention_pools()))
    return setfold.LayeredSetEncoder(draw(st.lists(layer, min_size=1, max_size=3)), pool)


# Every exported encoder that folds must have a strategy here: the laws find them by their classes.
MODELS = {
    setfold.SlotSetEncoder: slot_set_encoders(),
    setfold.HierarchicalSlotSetEncoder: hierarchies(),
    setfold.Pool: pools(),
    setfold.DeepSets: deep_sets(),
    setfold.Composition: compositions(),
    setfold.AttentionPool: attention_pools(),
    setfold.Concat: concats(),
    setfold.PlacedSlotEncoder: placed_slot_encoders(),
    setfold.GatedAttentionPool: gated_attention_pools(),
    setfold.SeedAttention: seed_attentions(),
    setfold.PMA: seed_attentions(setfold.PMA),
    setfold.ConstantMemoryEncoder: constant_memory_encoders(),
    setfold.Moments: st.builds(setfold.Moments, st.just(DIM_IN)),
    setfold.Covariance: st.builds(setfold.Covariance, st.just(DIM_IN)),
    setfold.SummaryStatistics: st.builds(setfold.SummaryStatistics, st.just(DIM_IN)),
    setfold.SetTransformer: set_transformers(),
    setfold.EquivariantDeepSets: equivariant_deep_sets(),
    setfold.SlotAttention: slot_attentions(),
    setfold.LayeredSetEncoder: layered(),
}

# Some laws apply to some configurations of a class only: by law, the configurations to draw.
RESTRICTED = {
    "removal": {
        setfold.SlotSetEncoder: slot_set_encoders(names=without_extrema(WEIGHTED)),
        setfold.HierarchicalSlotSetEncoder: hierarchies(names=without_extrema(WEIGHTED)),
        setfold.Pool: pools(names=without_extrema(SIMPLE)),
        setfold.DeepSets: deep_sets(names=without_extrema(SIMPLE)),
        setfold.Composition: compositions(names=without_extrema(WEIGHTED)),
        setfold.PlacedSlotEncoder: placed_slot_encoders(
            names=without_extrema((*WEIGHTED, "density"))
        ),
        setfold.Concat: concats(
            st.one_of(
                pools(names=without_extrema(SIMPLE)),
                slot_set_encoders(names=without_extrema(WEIGHTED)),
            )
        ),
    },
    "slot equivariance": {
        setfold.Composition: compositions(heads=(None,)),
        setfold.HierarchicalSlotSetEncoder: hierarchies(residuals=(False,)),
    },
}


def models(kind, law):
    """Models of a class to which a law applies."""
    return RESTRICTED.get(law.name, {}).get(kind, MODELS[kind])


SCALES = (0.1, 1.0, 30.0)


@st.composite
def cases(draw, dtype=torch.float64, ties=True, shown=False, scales=SCALES):
    """Situations for the laws.

    Args:
        draw: hypothesis's.
        dtype: of the elements.
        ties: whether elements may be equal.
        shown: whether the mask must show at least one element.
        scales: how large the elements may be.
    """
    batch, length = draw(st.integers(1, 3)), draw(st.integers(int(shown), 12))
    seed = draw(st.integers(0, 2**31 - 1))
    generator = torch.Generator().manual_seed(seed)
    scale = draw(st.sampled_from(scales))
    elements = scale * torch.randn(batch, length, DIM_IN, generator=generator, dtype=torch.float64)
    if ties and draw(st.booleans()):  # equal elements and round numbers
        elements = elements.round()
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=5)))
    lengths = tuple(b - a for a, b in pairwise([0, *cuts, length]))
    mask = torch.rand(batch, length, generator=generator) < draw(st.sampled_from([0.2, 0.8]))
    if shown:
        mask[0, 0] = True
    return Case(
        elements=elements.to(dtype),
        lengths=lengths,
        chunk_order=tuple(draw(st.permutations(range(len(lengths))))),
        permutation=torch.tensor(draw(st.permutations(range(length))), dtype=torch.long),
        mask=mask,
        seed=seed,
    )
