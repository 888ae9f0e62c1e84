"""Train two models on 4,500 digits, and let the pixels of others arrive chunk by chunk."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from demo import processes
from demo.completion import Completion, slot_model, train, transformer_model
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

LIMIT = 1e-6  # how far a fold may be from the whole set, relatively, in float64
SLOTS = "Slot Set Encoder, streamed"
WHOLE = "Set Transformer, whole set"
FOLDED = "Set Transformer, 2 passes"
WRONG = "WRONG: chunk and average"
JOBS: dict[str, tuple[Callable[[], Completion], dict[str, Encodings]]] = {
    "Slot Set Encoder": (slot_model, {SLOTS: streamed}),
    "Set Transformer": (transformer_model, {WHOLE: whole, FOLDED: folded, WRONG: averaged}),
}
CAPTION = """\
Mean squared error of a pixel (brightness from -1 to 1), over {digits} unseen digits, after so many \
pixels; last, the negative log-likelihood per pixel after all. difference: of the encoding \
from that of the whole set, the largest, relatively, in float64. WRONG: the Set Transformer \
encodes every chunk by itself, and the encodings are averaged."""


class Arrived(NamedTuple):
    """What came of the digits."""

    unseen: Unseen
    outcomes: dict[str, Outcome]

    def failure(self) -> str | None:
        """What went wrong, if something did."""
        apart = [way for way in (SLOTS, FOLDED) if not self.outcomes[way].difference <= LIMIT]
        return (
            f"failed: {'; '.join(apart)}: not within {LIMIT:g} of the whole set." if apart else None
        )

    def sheet(self) -> Sheet:
        """The ways side by side."""
        shown = [PIXELS_SEEN.index(pixels) for pixels in (28, 112, 784)]
        headings = ["", *(f"{PIXELS_SEEN[number]} px" for number in shown), "NLL", "difference"]
        rows = [
            [
                way,
                *(f"{outcome.errors[number]:.3f}" for number in shown),
                f"{outcome.likelihoods[-1]:.2f}",
                "" if way == WHOLE else f"{outcome.difference:.1e}",
            ]
            for way, outcome in self.outcomes.items()
        ]
        caption = CAPTION.format(digits=len(self.unseen.images))
        return Sheet("Error of the completed digits", headings, rows, caption)


def learn_and_complete(
    build: Callable[[], Completion], ways: dict[str, Encodings], steps: int, count: int, done: Any
) -> dict[str, Outcome]:
    """What one process does: train a model, and let it complete digits in some ways."""
    # In float32 folds are exact to about 1e-5 here: the head magnifies what sets digits apart.
    return outcomes(train(build, steps, done).double(), unseen_digits(count), ways)


def complete_digits(steps: int, count: int, console: Console) -> Arrived:
    """Both models at once, one process each."""
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        tasks = [bars.add_task(name, total=steps) for name in JOBS]

        def show(done: list[int]) -> None:
            for task, steps_done in zip(tasks, done, strict=True):
                bars.update(task, completed=steps_done)

        jobs = [partial(learn_and_complete, *job, steps, count) for job in JOBS.values()]
        slots, transformer = processes.run(jobs, show)
        show([steps] * len(jobs))
    return Arrived(unseen_digits(count), slots | transformer)
