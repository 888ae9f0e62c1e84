"""Measure ModelNet40 accuracy against the number of points (the paper's Table 1).

    python -m experiments run modelnet --size small     # about 105 minutes on two busy cores

Paper, at 100 / 200 / 500 / 1000 / 5000 points: Deep Sets .8428 .8518 .8574 .8528 .8883, Set
Transformer .8258 .8443 .8545 .8511 .8604, SSE learned .8556 .8633 .8710 .8720 .8784, SSE random
.8532 .8667 .8699 .8743 .8853.
Measured: 100 points: Deep Sets, max, matched 0.8434; SSE, as printed, learned 0.8382; ISAB, max
0.8373; Deep Sets, max 0.8359; SSE, slots apart 0.8339; SSE, as printed, random 0.8322; SSE → Set
Transformer 0.8275; Set Transformer 0.8122. 1000 points: Deep Sets, max, matched 0.8592; ISAB, max
0.8591; SSE, as printed, learned 0.8535; Deep Sets, max 0.8506; SSE, slots apart 0.8498; SSE, as
printed, random 0.8496; SSE → Set Transformer 0.8490; Set Transformer 0.8384.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments import report, style
from experiments.recipe import Recipe, Run, Size, Training
from experiments.recipes.common import (
    against,
    at,
    ends,
    measured,
    table_of,
    with_methods,
    with_task,
)
from experiments.recipes.settings import (
    CLOUD_METHODS,
    CLOUDS,
    FINE_TUNING,
    PAPER_CLOUD_METHODS,
)
from experiments.records import Record
from experiments.report import Section
from experiments.statistics import ACCURACY, Comparison, Part
from experiments.tasks.classification import PointClouds, tested_accuracy

POINTS = {
    Size.SMOKE: (20, 40),
    Size.SMALL: (100, 200, 500, 1000),
    Size.PAPER: (100, 200, 500, 1000, 2000),
}
MOST_TRAINED = {Size.SMOKE: 40, Size.SMALL: 200, Size.PAPER: 2000}  # most points in training
PAPER: dict[str, dict[float, float]] = {
    "Deep Sets, max": {100: 0.8428, 200: 0.8518, 500: 0.8574, 1000: 0.8528},
    "Set Transformer": {100: 0.8258, 200: 0.8443, 500: 0.8545, 1000: 0.8511},
    "SSE, as printed, learned": {100: 0.8556, 200: 0.8633, 500: 0.8710, 1000: 0.8720},
    "SSE, as printed, random": {100: 0.8532, 200: 0.8667, 500: 0.8699, 1000: 0.8743},
}

MATCHED = """\
*Matched*: Deep Sets with wider layers before and after the maximum, for as many parameters as *SSE,
as printed*."""


def training_of(size: Size, seed: int) -> dict[str, Training[PointClouds]]:
    """Return each method's training with the fewest points."""
    methods = PAPER_CLOUD_METHODS if size is Size.PAPER else CLOUD_METHODS
    base = with_task(replace(CLOUDS[size], seed=seed), points=POINTS[size][0])
    found = with_methods(base, methods)
    if size is Size.PAPER:
        found["Deep Sets, max"] = replace(found["Deep Sets, max"], clip=5.0)
    return found


def runs(size: Size, seed: int) -> list[Run]:
    """Test each method with each number of points."""
    return [
        measured(
            method,
            _with_points(training, size, min(points, MOST_TRAINED[size])),
            tested_accuracy,
            {"points": points},
            points=points,
        )
        for method, training in training_of(size, seed).items()
        for points in POINTS[size]
    ]


def _with_points(training: Training[PointClouds], size: Size, points: int) -> Training[PointClouds]:
    """Train with more points: fine-tune, or train from scratch at the paper's size."""
    if points == training.task.points or size is Size.PAPER:
        return with_task(training, points=points)
    tuning = replace(FINE_TUNING[size], task=training.task, seed=training.seed, start=training)
    return with_task(tuning, points=points)


def section(records: Sequence[Record]) -> Section:
    """Plot accuracy against the number of points."""
    values = report.grid(records, "accuracy", "method", "points")
    numbers = sorted({points for line in values.values() for points in line})
    groups = {f"{points} points": at(values, points) for points in numbers}
    marks = {
        f"{points} points": {
            method: line[points] for method, line in PAPER.items() if points in line
        }
        for points in numbers
    }
    drawing, (axes,) = style.figure(height=3.4)
    style.dots(axes, groups, "accuracy", paper=marks)
    style.legend(drawing)
    table = table_of(values, "points", best=max, digits=4, paper=PAPER)
    return Section(table, {"": drawing}, MATCHED)


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Compare the encoder as printed with Deep Sets and the Set Transformer, others with Deep Sets."""
    values, unit = report.grid(records, "accuracy", "method", "points"), " points"
    matched, plain = "Deep Sets, max, matched", "Deep Sets, max"
    baselines = (matched, plain, "Set Transformer")
    found = [
        one
        for slots in ("learned", "random")
        for one in against(values, f"SSE, as printed, {slots}", baselines, ACCURACY, unit)
    ]
    for method, others in (("SSE, slots apart", [plain]), ("ISAB, max", [matched, plain])):
        found += against(values, method, others, ACCURACY, unit, part=Part.ASIDE, at=(100, 1000))
    return found


def headline(records: Sequence[Record]) -> str:
    """Rank the methods with the fewest and with the most points."""
    values = report.grid(records, "accuracy", "method", "points")
    return ends(values, " points", best=max, digits=4)


RECIPE = Recipe(
    number=12,
    name="modelnet",
    title="Point cloud classification",
    claim="""The Slot Set Encoder, with learned (D) or random (R) slots, is more accurate on
    ModelNet40 than Deep Sets and the Set Transformer at 100, 200, 500 and 1000 points. At 5000
    points Deep Sets is more accurate.""",
    runs=runs,
    section=section,
    headline=headline,
    comparisons=comparisons,
    test_items=2_446,
    summary="SSE is more accurate on ModelNet40 than Deep Sets and the Set Transformer",
    verdict="""As printed with learned slots, the Slot Set Encoder is ahead of the Set Transformer
    with every seed: by 2.6 percentage points at 100 and 200 points, of which 200 points remain
    after the correction, and by less with more points. Against Deep Sets with as many parameters it
    is behind with every seed at every number of points, by 0.5 to 1 points; at 200 and 500 points
    this is shown for these shapes, without the correction. Against Deep Sets of the paper's form,
    which has 0.4 times as many parameters, it has the higher mean at all four sizes, by 0.2 to 0.6
    points. So what it gains is what a wider network gains. With random slots it is further behind
    the matched Deep Sets, by 1 to 1.2 points, and four slots apart, with half the parameters, are
    level with the smaller one. Unlike for images, the encoder as printed works here: nothing
    cancels if the maxima of the slots are pooled by a maximum. But a maximum over learned features
    does most of the work and attention weights add little, which we think is why all methods are so
    close. One ISAB before the maximum, which folds in two passes, lets elements interact and is
    better than the smaller Deep Sets at 1000 points, by 0.8 points; the matched one is level with
    it in one pass. A Set Transformer over the slots gains nothing, because the elements are pooled
    before it sees them. Few methods gain from 500 to 1000 points; their weights were fine-tuned
    with 200. After a tenth of the paper's epochs, the methods of the paper are below its numbers by
    0.2 to 2.5 points, Deep Sets least; section 25 trains longer.""",
    cut="""20 epochs instead of 200. Layers before the pool have 128, 128 and 256 units instead of
    256 each. Models are trained with 100 points. For more points, they are fine-tuned for one epoch
    with 200 points and tested with 200, 500 and 1000. There are no results for 5000 points: the
    prepared file has 2,048 points per shape. It also lacks 141 of the 12,311 shapes.""",
    minutes=105,
    seeds={Size.SMOKE: 1, Size.SMALL: 3, Size.PAPER: 3},
)
