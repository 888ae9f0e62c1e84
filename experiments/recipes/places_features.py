"""Compute class centroids of images with slots on a grid, although features have no coordinates.

    python -m experiments run places-features --size small     # about 10 minutes on two busy cores

Not in the paper.
Measured: not run yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from experiments import report
from experiments.places import Plane
from experiments.recipe import Outcome, Recipe, Run, Size
from experiments.recipes.common import curve_section, ends, with_methods
from experiments.recipes.image_centroids import SUPPORTS
from experiments.recipes.settings import IMAGE_METHODS, IMAGES
from experiments.records import Record
from experiments.report import Section

WAY = {Size.SMOKE: 10, Size.SMALL: 200, Size.PAPER: 200}
BOUND = 12.0  # 98 of 100 images are inside; the standard deviations are 4.5 and 4.2
METHODS: dict[str, dict[str, Any]] = {
    "Deep Sets": IMAGE_METHODS["Deep Sets"],
    "SSE, wide slots": IMAGE_METHODS["SSE, wide slots"],
    "Places, 4 × 4": {"pool": Plane(BOUND), "layers": 0},
}


def runs(size: Size, seed: int) -> list[Run]:
    """Measure each method with each support size."""
    trainings = with_methods(replace(IMAGES[size], seed=seed), METHODS)
    return [
        Run(
            method,
            one,
            partial(one.task.growing, supports=SUPPORTS[size], ways=(WAY[size],)),
            seed=seed,
        )
        for method, one in trainings.items()
    ]


def values_of(records: Sequence[Record]) -> dict[str, dict[float, list[float]]]:
    """Return {method: {supports: [accuracy of each seed]}}."""
    key = next(name for name in records[0].metrics if name != "supports")
    return report.traces(records, key, "supports")


def section(records: Sequence[Record]) -> Section:
    """Plot accuracy against the size of support sets."""
    found = values_of(records)
    label = "support images per class"
    return curve_section(found, label, "accuracy", best=max, digits=4, log=True)


def headline(records: Sequence[Record]) -> str:
    """Rank the methods with the fewest and with the most supports."""
    return ends(values_of(records), " supports", best=max, digits=4)


RECIPE = Recipe(
    number=22,
    name="places-features",
    title="Slots with places: features without coordinates",
    claim="""This experiment is not in the paper. Features of images have 256 dimensions and no
    coordinates, and a grid over all of them is out of the question. Do slots on a grid over the
    first two principal components help?""",
    runs=runs,
    section=section,
    headline=headline,
    outcome=Outcome.PLACES,
    holds="open",
    summary="",
    verdict="",
    cut="",
    minutes=10,
)
