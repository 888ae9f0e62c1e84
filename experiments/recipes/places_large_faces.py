"""Complete CelebA images of 64 × 64 pixels with slots on a grid, from 20 to 4000 pixels.

    python -m experiments run places-large-faces --size small     # about 20 minutes on two busy cores

Not in the paper.
Measured: not run yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.places import Painting
from experiments.recipe import Outcome, Recipe, Run, Size, Training
from experiments.recipes import places_faces
from experiments.recipes.common import with_task
from experiments.recipes.growing import (
    READERS,
    completion_headline,
    completion_runs,
    completion_section,
)
from experiments.records import Record
from experiments.report import Section
from experiments.tasks.completion import Completion, Painted, Reader

PIXELS = {
    Size.SMOKE: (20, 60),
    Size.SMALL: (20, 100, 500, 1000, 2000, 4000),
    Size.PAPER: (20, 100, 500, 1000, 2000, 4000),
}
MODELS: dict[str, Reader] = {"Places, 32 × 32": Painted(Painting(32)), **READERS}
TESTED = 125  # of 1,000 test images, the same for all models; attention to 4000 pixels is slow


def training_of(size: Size, seed: int) -> Training[Completion]:
    """Return the training on small faces, with fewer epochs and up to 1000 pixels."""
    training = replace(places_faces.TRAININGS[size], seed=seed)
    if size is Size.SMALL:
        training = replace(training, epochs=2, batch_size=8, validations=2)
    most = 60 if size is Size.SMOKE else 1000
    return with_task(training, side=64, most=most, tested=TESTED)


def runs(size: Size, seed: int) -> list[Run]:
    """Train each model and measure it with each number of pixels."""
    return completion_runs(training_of(size, seed), MODELS, PIXELS[size])


def section(records: Sequence[Record]) -> Section:
    """Show squared error and NLL against the number of pixels."""
    return completion_section(records, NOTES)


NOTES = """\
Trained with 20 to 1000 pixels. *Places, 32 × 32* keeps 4,096 numbers of a set, Deep Sets and SSE
64, *All pixels attended* 64 numbers for every pixel."""

RECIPE = Recipe(
    number=23,
    name="places-large-faces",
    title="Slots with places: larger faces",
    claim="""This experiment is not in the paper. Images have 64 × 64 pixels, four times as many as
    above. Is a finer grid still better than other folds, and how far is it from attention to all
    pixels?""",
    runs=runs,
    section=section,
    headline=completion_headline,
    outcome=Outcome.PLACES,
    holds="open",
    summary="",
    verdict="",
    cut="",
    minutes=20,
)
