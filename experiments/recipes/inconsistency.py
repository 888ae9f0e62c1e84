"""What chunk-and-average does to a Set Transformer (the paper's Figure 1b).

    python -m experiments run inconsistency --size small     # about ten minutes on two cores

Paper: the Set Transformer's NLL on CelebA gets worse when chunks are encoded one by one and averaged (a
plot without numbers).
Here: nothing is run yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from experiments import report, style
from experiments.pools import DeepSets, Pool, Transformer
from experiments.recipe import Recipe, Run, Size
from experiments.recipes.common import with_pools
from experiments.recipes.settings import COMPLETION, NLL, SLOTS_APART
from experiments.records import Record
from experiments.report import Section
from experiments.tasks.reconstruction import chunk_and_average_nll

CHUNKS = {Size.SMOKE: 20, Size.SMALL: 50, Size.PAPER: 50}
POOLS: dict[str, Pool] = {
    "Set Transformer": Transformer(num_layers=1),
    "SSE, slots apart": SLOTS_APART,
    "Deep Sets": DeepSets("mean"),
}
WAYS = {"whole set": "nll", "chunks averaged": "averaged_nll", "setfold.fold": "folded_nll"}


def runs(size: Size, seed: int) -> list[Run]:
    """Each method, encoded at once, by averaging chunks, and by a fold."""
    trainings = with_pools(replace(COMPLETION[size], seed=seed), POOLS)
    return [
        Run(
            method,
            training,
            partial(chunk_and_average_nll, task=training.task, chunk=CHUNKS[size]),
            seed=seed,
        )
        for method, training in trainings.items()
    ]


def section(records: Sequence[Record]) -> Section:
    """The three ways side by side."""
    values = {
        method: {way: report.metric(own, name) for way, name in WAYS.items()}
        for (method,), own in report.by(records, "method").items()
    }
    groups = {way: {method: values[method][way] for method in values} for way in WAYS}
    rows = [[method, *line.values()] for method, line in values.items()]
    drawing, (axes,) = style.figure(height=2.8)
    style.dots(axes, groups, NLL)
    style.legend(drawing)
    return Section(report.table([NLL, *WAYS], rows, digits=3), {"": drawing})


def headline(records: Sequence[Record]) -> str:
    """What averaging costs each method."""
    costs = {
        method: fmean(report.metric(own, "averaged_nll")) - fmean(report.metric(own, "nll"))
        for (method,), own in report.by(records, "method").items()
    }
    told = ", ".join(f"{method} {cost:+z.3f}" for method, cost in costs.items())
    return f"averaging chunks changes NLL by: {told}"


RECIPE = Recipe(
    number=2,
    name="inconsistency",
    title="What averaging chunks costs",
    claim="""A Set Transformer whose mini-batches are encoded independently and then averaged completes
    CelebA images worse than one that sees the whole set; the Slot Set Encoder does not suffer.""",
    runs=runs,
    section=section,
    headline=headline,
    holds="open",
    verdict="",
    cut="As for image completion: 200 pixels of 32 x 32 images, in chunks of 50.",
    minutes=10,
)
