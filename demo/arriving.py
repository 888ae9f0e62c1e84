"""Train two models on 4,500 digits, and complete held-out digits as their pixels arrive."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from demo import processes
from demo.completion import Completion, grid_model, train, transformer_model
from demo.sheet import Sheet
from demo.streaming import (
    PIXELS_SEEN,
    Encodings,
    Outcome,
    Unseen,
    averaged,
    folded,
    outcomes,
    streamed,
    unseen_digits,
    whole,
)

LIMIT = 1e-6  # largest relative difference of a fold to the whole set, in float64
SLOTS = "slots on a grid, streamed"
WHOLE = "Set Transformer, whole set"
FOLDED = "Set Transformer, 2 passes"
WRONG = "WRONG: chunk and average"


class Job(NamedTuple):
    """A model to train, and the ways in which it encodes digits."""

    build: Callable[[], Completion]
    share: float  # of the training steps; a step of the Set Transformer takes longer
    ways: dict[str, Encodings]


JOBS = {
    "slots on a grid": Job(grid_model, 1.0, {SLOTS: streamed}),
    "Set Transformer": Job(transformer_model, 0.5, {WHOLE: whole, FOLDED: folded, WRONG: averaged}),
}
NOTES = {
    "28, 112, 392, 784 pixels": "mean squared error per pixel of the completed digits after this many "
    "of their 784 pixels, over {digits} held-out digits. Brightness is from -1 (black) to 1 "
    "(white); 0 is a perfect completion.",
    "NLL": "negative log-likelihood per pixel after all pixels; lower is better.",
    "difference": "largest difference between this encoding and the encoding of the whole set by "
    "the same model, relative to its largest number (float64). Rounding gives about 1e-15.",
    SLOTS: "PlacedSlotEncoder absorbs each chunk of 28 pixels into a state of 392 numbers and "
    "discards it.",
    WHOLE: "keeps all pixels in memory and encodes them at once. It was trained for half as many "
    "steps as the slots, because its steps take longer.",
    FOLDED: "setfold.fold reads the chunks twice, one at a time.",
    WRONG: "the Set Transformer encodes each chunk as if it were the whole digit, and the "
    "encodings are averaged.",
}


class Arrived(NamedTuple):
    """Results for the digits."""

    unseen: Unseen
    outcomes: dict[str, Outcome]

    def failure(self) -> str | None:
        """Return an error message if a fold differs from the whole set, else None."""
        apart = [way for way in (SLOTS, FOLDED) if not self.outcomes[way].difference <= LIMIT]
        return (
            f"failed: {'; '.join(apart)}: differs from the whole set by more than {LIMIT:g}."
            if apart
            else None
        )

    def sheet(self) -> Sheet:
        """Make the table of all methods."""
        shown = [PIXELS_SEEN.index(pixels) for pixels in (28, 112, 392, 784)]
        pixels = [f"{PIXELS_SEEN[number]} pixels" for number in shown]
        headings = ["method", *pixels, "NLL", "difference"]
        rows = [
            [
                way,
                *(f"{outcome.errors[number]:.3f}" for number in shown),
                f"{outcome.likelihoods[-1]:.2f}",
                "" if way == WHOLE else f"{outcome.difference:.1e}",
            ]
            for way, outcome in self.outcomes.items()
        ]
        digits = len(self.unseen.images)
        notes = {term: text.format(digits=digits) for term, text in NOTES.items()}
        return Sheet("Error of the completed digits", headings, rows, notes)


def learn_and_complete(job: Job, steps: int, count: int, done: Any) -> dict[str, Outcome]:
    """Train a model and complete digits in several ways; runs in its own process."""
    # Evaluate in float64. In float32 the head magnifies rounding errors to about 1e-5.
    model = train(job.build, steps, done).double()
    return outcomes(model, unseen_digits(count), job.ways)


def complete_digits(steps: int, count: int, console: Console) -> Arrived:
    """Train and evaluate both models at the same time, in one process each."""
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn())
    each = [math.ceil(steps * job.share) for job in JOBS.values()]
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        tasks = [bars.add_task(name, total=n) for name, n in zip(JOBS, each, strict=True)]

        def show(done: list[int]) -> None:
            for task, steps_done in zip(tasks, done, strict=True):
                bars.update(task, completed=steps_done)

        jobs = [
            partial(learn_and_complete, job, n, count)
            for job, n in zip(JOBS.values(), each, strict=True)
        ]
        slots, transformer = processes.run(jobs, show)
        show(each)
    return Arrived(unseen_digits(count), slots | transformer)
