"""Compute class centroids of images with slots on a grid, although features have no coordinates.

    python -m experiments run places-features --size small     # about 8 minutes on two busy cores

Not in the paper.
Measured: 1 supports: Deep Sets 0.2078; SSE, wide slots 0.2033; Linear, mean, wide 0.1914; Places,
4 × 4 0.1825; Linear, mean 0.1794; Mean of the features 0.1620. 500 supports: Linear, mean 0.5298;
Mean of the features 0.5143; Places, 4 × 4 0.5112; Linear, mean, wide 0.5089; SSE, wide slots
0.4956; Deep Sets 0.4899.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from experiments import report
from experiments.places import Plane
from experiments.pools import LinearMean
from experiments.recipe import Recipe, Run, Size
from experiments.recipes.common import against, curve_section, ends, untrained, with_methods
from experiments.recipes.image_centroids import SUPPORTS
from experiments.recipes.settings import IMAGE_METHODS, IMAGES
from experiments.records import Record
from experiments.report import Section
from experiments.statistics import ACCURACY, Comparison, Part, Seeds
from experiments.tasks.closed_form import mean_accuracy

WAY = {Size.SMOKE: 10, Size.SMALL: 200, Size.PAPER: 200}
BOUND = 12.0  # 98 of 100 images are inside; the standard deviations are 4.5 and 4.2
METHODS: dict[str, dict[str, Any]] = {
    "Deep Sets": IMAGE_METHODS["Deep Sets"],
    "SSE, wide slots": IMAGE_METHODS["SSE, wide slots"],
    "Places, 4 × 4": {"pool": Plane(BOUND), "layers": 0},
    "Linear, mean": IMAGE_METHODS["Linear, mean"],
    "Linear, mean, wide": {"pool": LinearMean(1362), "layers": 0},  # the parameters of places
}
UNTRAINED = {"Mean of the features": mean_accuracy}


def runs(size: Size, seed: int) -> list[Run]:
    """Measure each method, and the mean of the features itself, with each support size."""
    trainings = with_methods(replace(IMAGES[size], seed=seed), METHODS)
    arguments: dict[str, Any] = {"supports": SUPPORTS[size], "ways": (WAY[size],)}
    return [
        *(
            Run(method, one, partial(one.task.growing, **arguments), seed=seed)
            for method, one in trainings.items()
        ),
        *untrained(UNTRAINED, seed, task=IMAGES[size].task, **arguments),
    ]


def values_of(records: Sequence[Record]) -> dict[str, dict[float, Seeds]]:
    """Return {method: {supports: {seed: accuracy}}}."""
    key = next(name for name in records[0].metrics if name != "supports")
    return report.traces(records, key, "supports")


def section(records: Sequence[Record]) -> Section:
    """Plot accuracy against the size of support sets."""
    found = values_of(records)
    label = "support images per class"
    return curve_section(found, label, "accuracy", best=max, digits=4, log=True)


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Compare places with the same model without a grid, and with other methods."""
    values, unit, sizes = values_of(records), " images", (500, 10, 1)
    linear, others = ("Linear, mean", "Linear, mean, wide"), ("Deep Sets", *UNTRAINED)
    return [
        *against(values, "Places, 4 × 4", linear, ACCURACY, unit, at=sizes),
        *against(values, "Places, 4 × 4", others, ACCURACY, unit, part=Part.ASIDE, at=sizes),
    ]


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
    comparisons=comparisons,
    new=True,
    test_items=10_000,
    summary="On features without coordinates, a grid is better than a mean of linear features",
    verdict="""The mean of one linear layer, with a sixteenth of the parameters, is better than
    places from 5 images on, by 1.2 to 1.9 percentage points; with one image no difference is shown.
    With as many parameters as places, in two linear layers without an activation between them, it
    is better with one image, and no difference is shown with 10 and 500. Places are better than
    Deep Sets from 10 images on, by up to 2.1 points, but not because of the grid: the model with
    places has no network before it, so its linear layer sees means of the features themselves. With
    500 images the mean of the features, which nobody trained, is better than places. With one image
    most of the 16 slots are empty, and places are worse than Deep Sets by 2.5 points. Use places
    where elements have coordinates.""",
    cut="""The paper has no such experiment. 2 epochs, as for image centroids above. The bounds of the
    grid contain 98 of 100 training images; the others are clamped to its border. Parameters are
    matched only between places and the wide linear layers. The mean of the features has no random
    weights, so its seeds are equal.""",
    minutes=8,
)
