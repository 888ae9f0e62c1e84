"""Complete digits from up to 784 pixels after training with at most 100.

    python -m experiments run places-digits --size small     # about 25 minutes on two busy cores

Not in the paper.
Measured: Squared error with 15 pixels: Places, 14 × 14 0.2283; Deep Sets 0.2557; SSE, slots
attended 0.2578; All pixels attended 0.2582. 784 pixels: Places, 14 × 14 0.0693; Deep Sets 0.2308;
All pixels attended 0.2323; SSE, slots attended 0.2404.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments import report
from experiments.places import Painting
from experiments.recipe import Recipe, Run, Size, Training
from experiments.recipes import places_faces
from experiments.recipes.common import against, changes, with_task
from experiments.recipes.growing import (
    READERS,
    completion_headline,
    completion_runs,
    completion_section,
    progress_table,
)
from experiments.records import Record
from experiments.report import Section
from experiments.statistics import SQUARED_ERROR, Comparison, Part
from experiments.tasks.completion import Completion, Painted, Reader

PIXELS = {
    Size.SMOKE: (20, 60),
    Size.SMALL: (15, 28, 56, 112, 196, 392, 784),
    Size.PAPER: (15, 28, 56, 112, 196, 392, 784),
}
MODELS: dict[str, Reader] = {"Places, 14 × 14": Painted(Painting(14)), **READERS}
TARGETS = 64  # instead of 256 for faces: more steps in the same CPU time
TESTED = 250  # of 10,000 test digits, the same for all models


def training_of(size: Size, seed: int) -> Training[Completion]:
    """Return the training on faces, on digits; there are seven times as many."""
    training = replace(places_faces.TRAININGS[size], seed=seed)
    if size is Size.SMALL:
        training = with_task(
            replace(training, epochs=1, batch_size=8, validations=2), targets=TARGETS
        )
    most = min(100, training.task.most)
    return with_task(training, pictures="digits", side=28, fewest=15, most=most, tested=TESTED)


def runs(size: Size, seed: int) -> list[Run]:
    """Train each model and measure it with each number of pixels."""
    return completion_runs(training_of(size, seed), MODELS, PIXELS[size])


def section(records: Sequence[Record]) -> Section:
    """Show squared error and NLL against the number of pixels, and progress in training."""
    found = completion_section(records, NOTES)
    return replace(found, table=f"{found.table}\n\n{progress_table(records)}")


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Compare all pixels with as many as in training, and places with all others."""
    values, unit = report.traces(records, "error", "pixels"), " pixels"
    places, grown = "Places, 14 × 14", [(784, 112)]
    return [
        *changes(values, [places], grown, SQUARED_ERROR, unit),
        *against(values, places, list(READERS), SQUARED_ERROR, unit, at=(784, 56)),
        *changes(values, list(READERS), grown, SQUARED_ERROR, unit, part=Part.ASIDE),
    ]


NOTES = """\
Trained with 15 to 100 pixels. Brightness is from -1 to 1, and errors cover all pixels, seen or
not. *Places, 14 × 14* keeps 392 numbers of a set, Deep Sets and SSE 64, *All pixels attended* 64
numbers for every pixel. The last table is the mean over 15, 39 and 100 pixels."""

RECIPE = Recipe(
    number=21,
    name="places-digits",
    title="Slots with places: digits that grow",
    claim="""This experiment is not in the paper. Models are trained with at most 100 pixels of a
    digit and then see up to all 784. Do slots on a grid get better as the sets grow beyond those of
    training, and are they better than others?""",
    runs=runs,
    section=section,
    headline=completion_headline,
    comparisons=comparisons,
    new=True,
    summary="Slots on a grid improve with eight times as many pixels as in training, and beat others",
    verdict="""Places improve from 112 to 784 pixels by 0.0466, and are better than all others with
    every number of pixels, in both measures. A grid fills up as pixels arrive, and its densities
    are bounded before the network sees them. Deep Sets and attended slots improve, too, but by a
    tenth of that or less; for attention to all pixels no change is shown. That says how fast they
    learn rather than what they can do: attention to all pixels, which could read any pixel that it
    is given, has an error of 0.2323 even if it is given all of them. On faces, with more pixels in
    training, it is close to places. So places need far fewer steps here, and nothing is said about
    long training. An epoch of places takes 1.2 to 2 times the CPU time of the others, but places
    are ahead after half of it, as the last table shows. With all pixels known, places still have an
    error: 14 × 14 slots for 28 × 28 pixels do not keep every pixel.""",
    cut="""The paper has no such experiment. One epoch on 55,000 digits in batches of 8, with 64
    pixels of each digit to predict instead of 256 for faces: in a short trial on validation
    digits, attention learned slightly more from more and smaller steps in the same CPU time. Longer
    training was not measured. 250 of 10,000 test digits, the same
    for all methods. Everything else is as for faces. Many other programs were running, so CPU times
    are good to about a third.""",
    minutes=25,
)
