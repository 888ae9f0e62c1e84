"""ModelNet40 while points arrive, 100 at a time (the paper's Figure 3d).

    python -m experiments run modelnet-streaming --size small     # measures what `modelnet` trains

Paper: trained on 100 points, Deep Sets gets worse on 200 to 500, the Slot Set Encoder better (a plot
without numbers).
Here: nothing is run yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments import report
from experiments.recipe import Recipe, Run, Size
from experiments.recipes.common import curve_section, ends, measured
from experiments.recipes.modelnet import training_of
from experiments.records import Record
from experiments.report import Section
from experiments.tasks.classification import streamed_accuracy

CHUNKS = {Size.SMOKE: (20, 3), Size.SMALL: (100, 5), Size.PAPER: (100, 5)}


def runs(size: Size, seed: int) -> list[Run]:
    """Each method, read after each chunk."""
    chunk, steps = CHUNKS[size]
    return [
        measured(method, training, streamed_accuracy, chunk=chunk, steps=steps)
        for method, training in training_of(size, seed).items()
    ]


def section(records: Sequence[Record]) -> Section:
    """Accuracy against the number of points that have arrived."""
    values = report.traces(records, "accuracy", "points")
    return curve_section(values, "points seen", "accuracy", best=max, digits=4)


def headline(records: Sequence[Record]) -> str:
    """The methods after the first and after the last chunk."""
    return ends(report.traces(records, "accuracy", "points"), " points", best=max, digits=4)


RECIPE = Recipe(
    number=13,
    name="modelnet-streaming",
    title="Point clouds that grow",
    claim="""Trained on 100 points and tested on 100 to 500 in chunks of 100, Deep Sets degrades as the set
    grows, while the Slot Set Encoder gets better.""",
    runs=runs,
    section=section,
    headline=headline,
    holds="open",
    verdict="",
    cut="As for point cloud classification.",
    minutes=5,
)
