"""Complete CelebA images of 64 × 64 pixels from streams of pixels: six neural processes.

    python -m experiments run neural-processes-large --size small     # about 20 minutes on one core

Not in the paper.
Measured: not yet.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.recipe import Recipe, Run, Size, Training
from experiments.recipes import places_large_faces
from experiments.recipes.neural_processes import (
    Pictures,
    comparisons,
    in_small_steps,
    process_runs,
    processes_headline,
    processes_section,
)
from experiments.records import Record
from experiments.report import Section
from experiments.tasks.completion import Completion

EPOCHS = 8


def _large_faces(size: Size, seed: int) -> Training[Completion]:
    return in_small_steps(places_large_faces.training_of(size, seed), size, EPOCHS)


DATA = {"CelebA, 64 × 64": Pictures(_large_faces, 32, places_large_faces.PIXELS)}


def runs(size: Size, seed: int) -> list[Run]:
    """Train each model and measure it with each number of pixels."""
    return process_runs(DATA, size, seed)


def section(records: Sequence[Record]) -> Section:
    """Show NLL and squared error by pixels seen."""
    return processes_section(records)


RECIPE = Recipe(
    number=29,
    name="neural-processes-large",
    title="Streaming completion of larger faces",
    claim="""This experiment is not in the paper. Images have 64 × 64 pixels, four times as many as
    in "Streaming completion as a neural process". Do encoders that fold in one pass still come close
    to attention to all pixels?""",
    runs=runs,
    section=section,
    headline=processes_headline,
    comparisons=comparisons,
    new=True,
    summary="Encoders that attend in one pass complete larger images better than Deep Sets",
    verdict="",
    cut="""The paper has no such experiment. 8,000 steps. 125 of 1,000 test images, the
    same for all methods, because attention to 4000 pixels is slow to measure. Everything else is as
    for images of 32 × 32 pixels: the same models but for the grid, and no choice was made on these
    images.""",
    minutes=20,
    seeds={Size.SMOKE: 1, Size.SMALL: 3, Size.PAPER: 3},
)
