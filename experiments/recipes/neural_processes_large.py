"""Complete CelebA images of 64 × 64 pixels from streams of pixels: six neural processes.

    python -m experiments run neural-processes-large --size small     # about 20 minutes on one core

Not in the paper.
Measured: CelebA, 64 × 64: NLL with 4000 pixels: Places, 32 × 32 -0.666; All pixels attended -0.586;
LBANP -0.413; CMANP -0.155; SSE, slots attended -0.038; Deep Sets 0.105.
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
    in "Streaming completion as a neural process". Do encoders that fold in one pass still come
    close to attention to all pixels?""",
    runs=runs,
    section=section,
    headline=processes_headline,
    comparisons=comparisons,
    new=True,
    summary="Encoders that attend in one pass complete larger images better than Deep Sets",
    verdict="""All three encoders that attend in one pass are better than Deep Sets. Only slots with
    places come close to attention to all pixels, and on these images they have the lower mean NLL
    and squared error at every number of pixels; with 1,000 pixels the difference is shown, with
    4,000 it is not. They no longer improve from 2,000 to 4,000 pixels, four times as many as in
    training, where attention still does. CMANP and attended slots gain little from more than 500
    pixels and are behind attention to all pixels by 0.4 to 0.6 nats with 1,000 and more. LBANP,
    which reads all pixels in every layer, is between them and attention. The training is short for
    all. LBANP and attention to all pixels still improved much in its second half, places little,
    and places took twice the CPU time of attention, so longer training may change the order of
    these.""",
    cut="""The paper has no such experiment. 8,000 steps. The second and third seed were run after
    the result of the first was known. 125 of 1,000 test images, the same for all methods, because
    attention to 4000 pixels is slow to measure. Everything else is as for images of 32 × 32 pixels:
    the same models but for the grid, and no choice was made on these images.""",
    minutes=20,
    seeds={Size.SMOKE: 1, Size.SMALL: 3, Size.PAPER: 3},
)
