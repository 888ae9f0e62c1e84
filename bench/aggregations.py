"""Target 15: the groups of a graph in one call, compared with PyG's own aggregations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import setfold
from bench.modules import HEADS, deep_sets, features
from bench.plan import BOUNDS, FLOAT_BYTES, GRAPH_LIMIT, ROWS_PER_GROUP, Plan, Shape
from bench.results import MEGABYTE, GroupsCost, Results, Target, Way, pass_name
from bench.speed import one_encoding
from bench.timing import Contender, interleaved

GRAPHS = Shape(64, 8, 64)
SKEW = 0.8  # the i-th largest of the skewed groups has a share of i to the power of -SKEW
SEVERAL = ("mean", "max", "min", "sum")


def equal(groups: int) -> Tensor:
    """Return the sizes (G,) of groups that are equally large."""
    return torch.full((groups,), ROWS_PER_GROUP)


def skewed(groups: int) -> Tensor:
    """Return the sizes (G,) of as many rows in groups that follow a power law.

    >>> skewed(2000)[[0, 1, 2, -1]], int(skewed(2000).sum())
    (tensor([10854,  6233,  4506,    25]), 200000)
    """
    shares = torch.arange(1, groups + 1).double().pow(-SKEW)
    sizes = (shares / shares.sum() * groups * ROWS_PER_GROUP).round().long()
    sizes[0] += groups * ROWS_PER_GROUP - sizes.sum()
    return sizes


LAYOUTS = {Way.EQUAL: equal, Way.SKEWED: skewed}


def no_padding(sizes: Tensor) -> float:
    return 0.0


def padded_rows(sizes: Tensor) -> float:
    """Return the megabytes of rows that are padded to the longest group."""
    return len(sizes) * int(sizes.max()) * GRAPHS.dim_in * FLOAT_BYTES / MEGABYTE


def padded_scores(sizes: Tensor) -> float:
    """Return the megabytes of padded rows, and of scores between all rows of a group."""
    scores = len(sizes) * HEADS * int(sizes.max()) ** 2 * FLOAT_BYTES / MEGABYTE
    return padded_rows(sizes) + scores


@dataclass(frozen=True)
class Aggregation:
    """One row of the table.

    Attributes:
        name: name in the table.
        build: function that builds the aggregation.
        padding: function of the sizes of the groups: megabytes that it needs at least for padding.
    """

    name: str
    build: Callable[[], nn.Module]
    padding: Callable[[Tensor], float] = no_padding

    def bears(self, sizes: Tensor) -> bool:
        return self.padding(sizes) <= GRAPH_LIMIT


def of_setfold(build: Callable[[], setfold.StreamingSetEncoder]) -> nn.Module:
    from setfold.pyg import SetAggregation

    return SetAggregation(build())


def of_pyg(name: str, *arguments: object, **options: object) -> nn.Module:
    from torch_geometric.nn import aggr

    return getattr(aggr, name)(*arguments, **options)


def pyg_deep_sets() -> nn.Module:
    head = nn.Linear(GRAPHS.dim_out, GRAPHS.dim_out)
    return of_pyg("DeepSetsAggregation", features(GRAPHS), head)


def several() -> setfold.Concat:
    return setfold.Concat([setfold.Pool(GRAPHS.dim_in, aggregate) for aggregate in SEVERAL])


WIDTH, SEEDS, _ = GRAPHS
ATTENTION = partial(setfold.AttentionPool, *GRAPHS, num_heads=HEADS)
QUERY = partial(setfold.AttentionPool, WIDTH, 1, WIDTH)
SLOTS = partial(setfold.SlotSetEncoder, WIDTH, SEEDS, WIDTH, WIDTH, slots="learned")
PMA = partial(setfold.PMA, WIDTH, SEEDS, HEADS)
TRANSFORMER = partial(of_pyg, "SetTransformerAggregation", WIDTH, SEEDS, heads=HEADS)
FIRST = "setfold SlotSetEncoder"
AGGREGATIONS: dict[str, Aggregation] = {
    one.name: one
    for one in (
        Aggregation(FIRST, partial(of_setfold, SLOTS)),
        Aggregation("setfold Pool, mean", partial(of_setfold, partial(setfold.Pool, WIDTH))),
        Aggregation("PyG mean", partial(of_pyg, "MeanAggregation")),
        Aggregation("setfold AttentionPool, 1 query", partial(of_setfold, QUERY)),
        Aggregation("PyG softmax", partial(of_pyg, "SoftmaxAggregation", learn=True)),
        Aggregation("setfold DeepSets in groups", partial(of_setfold, partial(deep_sets, GRAPHS))),
        Aggregation("PyG DeepSetsAggregation", pyg_deep_sets),
        Aggregation("setfold Concat of 4 pools", partial(of_setfold, several)),
        Aggregation("PyG MultiAggregation of 4", partial(of_pyg, "MultiAggregation", [*SEVERAL])),
        Aggregation("setfold AttentionPool in groups", partial(of_setfold, ATTENTION)),
        Aggregation("setfold PMA in groups", partial(of_setfold, PMA)),
        Aggregation(
            "PyG SetTransformer, PMA alone",
            partial(TRANSFORMER, num_encoder_blocks=0, num_decoder_blocks=0),
            padded_rows,
        ),
        Aggregation("PyG SetTransformer in groups", TRANSFORMER, padded_scores),
    )
}
SAME = {  # ours: theirs, which compute the same kind of thing, and where both are measured
    "setfold AttentionPool, 1 query": ("PyG softmax", Way.SKEWED),
    "setfold DeepSets in groups": ("PyG DeepSetsAggregation", Way.SKEWED),
    "setfold Concat of 4 pools": ("PyG MultiAggregation of 4", Way.SKEWED),
    "setfold PMA in groups": ("PyG SetTransformer, PMA alone", Way.EQUAL),
}
SET_ATTENTION = "setfold PMA in groups"
GROUP_NOTES = (
    f"Rows of width {WIDTH} in groups of {ROWS_PER_GROUP} on average: all of this size, or of sizes "
    f"that follow a power law. Rows are sorted by group, as PyG's attention needs. Shape {GRAPHS}, "
    f"{HEADS} heads. f+b computes the gradients of weights and rows.",
    "PyG's attention pads all groups to the size of the largest. Where the padding alone needs more "
    f"than {GRAPH_LIMIT / 1e3:.0f} GB, it is not run, and the table says how much. "
    "SetTransformerAggregation has one self-attention block before and one after the pooling; "
    "PMA alone has neither.",
    "PyG mean, softmax and MultiAggregation have no projections; setfold AttentionPool has.",
)


def one_grouping(name: str, sizes: Tensor, backward: bool) -> Contender:
    """Return a function that aggregates all groups; with backward, also computes all gradients."""
    module = AGGREGATIONS[name].build()
    rows = torch.randn(int(sizes.sum()), GRAPHS.dim_in, requires_grad=backward)
    index = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return one_encoding(module, partial(module, rows, index, dim_size=len(sizes)), backward)


def compare(results: Results, plan: Plan, layout: Way, backward: bool) -> None:
    """Time all aggregations whose padding fits."""
    sizes = LAYOUTS[layout](plan.groups)
    runs = {
        name: one_grouping(name, sizes, backward)
        for name, found in AGGREGATIONS.items()
        if found.bears(sizes)
    }
    results.groups.append(GroupsCost(layout, plan.groups, backward, interleaved(runs, plan)))


def judge(results: Results, plan: Plan) -> None:
    """Compare with PyG's counterparts, and the memory of skewed with that of equal groups."""
    for cost in results.groups:
        for ours, (theirs, layout) in SAME.items():
            if cost.layout is layout:
                claim = f"{ours} / {theirs}, {layout}, {pass_name(cost.backward)}"
                ratio = cost.timings.ratio(ours, theirs)
                results.targets.append(_at_most(claim, ratio, BOUNDS.groups))
    rows = plan.groups * ROWS_PER_GROUP
    found = [results.megabytes(SET_ATTENTION, layout, rows) for layout in LAYOUTS]
    if found[0] > 0:
        claim = f"memory of {SET_ATTENTION}, {Way.SKEWED} / {Way.EQUAL}"
        results.targets.append(_at_most(claim, found[1] / found[0], BOUNDS.groups_memory))


def _at_most(claim: str, ratio: float, bound: float) -> Target:
    return Target(15, claim, ratio, bound, at_least=False, shape=GRAPHS)
