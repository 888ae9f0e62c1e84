"""Look for a better encoder that folds in one pass, at equal parameters.

    python -m experiments run one-pass --size small     # about 100 minutes on one core

Not in the paper.
Measured: 100 points: Places 0.8504; Deep Sets, max 0.8332; Max, weighted means, mass 0.8320; Maxima
of every layer 0.8312; Mean, max, slots 0.8271; Mean and max 0.8246; SSE, slots apart 0.8242; SSE,
many slots 0.8242; SSE, sharp 0.8213; SSE → Set Transformer 0.8013; Deep Sets 0.7518. 1000 points:
Places 0.8385; Mean, max, slots 0.8381; Maxima of every layer 0.8283; Mean and max 0.8234; Deep
Sets, max 0.8230; Max, weighted means, mass 0.8222; SSE, slots apart 0.8164; SSE, many slots 0.8087;
SSE, sharp 0.8054; SSE → Set Transformer 0.8050; Deep Sets 0.7829.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from experiments import report
from experiments.combined import Beside, EveryLayer, Sharp
from experiments.pools import DeepSets, Slots, WideKeys
from experiments.recipe import Recipe, Run, Size
from experiments.recipes import modelnet_long
from experiments.recipes.common import against, curve_section, ends, measured, with_methods
from experiments.recipes.settings import CLOUD_METHODS
from experiments.records import Record
from experiments.report import Section
from experiments.statistics import ACCURACY, Comparison, Part
from experiments.tasks.growing_clouds import tested_accuracies

EPOCHS = {Size.SMOKE: 1, Size.SMALL: 15, Size.PAPER: 200}
POINTS = modelnet_long.POINTS
_MAXIMA = Slots(16, 64, "max", slots="learned", attention="softmax", similarity="cosine", width=64)
_MEANS = replace(_MAXIMA, num_slots=8, aggregate=("weighted_mean", "mass"), width=33)
# 317,000 to 368,000 parameters at 40 classes.
CLOUDS: dict[str, dict[str, Any]] = {
    "Deep Sets, max": modelnet_long.METHODS["Deep Sets, max, matched"],
    "Deep Sets": {**modelnet_long.METHODS["Deep Sets, max, matched"], "pool": DeepSets("mean")},
    "Mean and max": {"pool": DeepSets(("max", "mean")), "dim": 436},
    "Maxima of every layer": {"pool": EveryLayer(), "dim": 320},
    "SSE, slots apart": {"pool": _MAXIMA, "dim": 208},
    "SSE, sharp": {
        "pool": Sharp(**{**vars(_MAXIMA)}),
        "dim": 208,
    },
    "SSE, many slots": {
        "pool": WideKeys(**{**vars(_MAXIMA), "num_slots": 64, "width": 16}),
        "dim": 208,
    },
    "Max, weighted means, mass": {"pool": Beside(("max",), _MEANS), "dim": 332},
    "Mean, max, slots": {
        "pool": Beside(("mean", "max"), replace(_MAXIMA, num_slots=8, width=32)),
        "dim": 272,
    },
    "SSE → Set Transformer": {**CLOUD_METHODS["SSE → Set Transformer"], "dim": 224},
    "Places": modelnet_long.METHODS["Places"],
}


def runs(size: Size, seed: int) -> list[Run]:
    """Train each method and test it with each number of points."""
    base = replace(modelnet_long.training_of(size, seed), epochs=EPOCHS[size], validations=3)
    return [
        measured(method, training, tested_accuracies, {"task": "point clouds"}, points=POINTS[size])
        for method, training in with_methods(base, CLOUDS).items()
    ]


def section(records: Sequence[Record]) -> Section:
    """Plot accuracy against the number of points."""
    values = report.traces(records, "accuracy", "points")
    return curve_section(values, "points", "accuracy", best=max, digits=4, log=True)


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Compare each candidate with a maximum of features; a mean of features is no candidate."""
    values, unit = report.traces(records, "accuracy", "points"), " points"
    plain, average = "Deep Sets, max", "Deep Sets"
    found = []
    for method in CLOUDS:
        if method != plain:
            part = Part.ASIDE if method == average else Part.CLAIM
            found += against(values, method, [plain], ACCURACY, unit, part=part, at=(100, 1000))
    return found


def headline(records: Sequence[Record]) -> str:
    """Rank the methods with the fewest and with the most points."""
    return ends(report.traces(records, "accuracy", "points"), " points", best=max, digits=4)


RECIPE = Recipe(
    number=26,
    name="one-pass",
    title="In search of a better encoder in one pass",
    claim="""This experiment is not in the paper. Which encoders that fold in one pass beat Deep
    Sets with as many parameters?""",
    runs=runs,
    section=section,
    headline=headline,
    comparisons=comparisons,
    new=True,
    test_items=2_446,
    summary="Other encoders in one pass are more accurate on ModelNet40 than Deep Sets of their size",
    verdict="",
    cut="""The paper has no such experiment. 15 epochs; everything else is as in the section before.
    All methods have about as many parameters.""",
    minutes=100,
    seeds={Size.SMOKE: 1, Size.SMALL: 5, Size.PAPER: 3},
)
