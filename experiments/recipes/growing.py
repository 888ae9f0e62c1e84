"""Helpers for the recipes that complete pictures from growing sets of pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from experiments import report, style
from experiments.pools import DeepSets
from experiments.recipe import Run, Training
from experiments.recipes.common import ends, measured, table_of, with_methods
from experiments.recipes.settings import NLL, SLOTS_APART
from experiments.records import Record
from experiments.report import Section
from experiments.tasks.completion import Attended, Completion, Everything, Reader, Vector, completed

READERS: dict[str, Reader] = {
    "Deep Sets": Vector(DeepSets("mean")),
    "SSE, slots attended": Attended(SLOTS_APART),
    "All pixels attended": Everything(),
}
ERROR = "squared error"


def completion_runs(
    training: Training[Completion],
    readers: Mapping[str, Reader],
    pixels: Sequence[int],
    settings: Mapping[str, str | int | float] | None = None,
) -> list[Run]:
    """Train each model and measure it with each number of pixels."""
    trainings = with_methods(training, {name: {"reader": one} for name, one in readers.items()})
    return [
        measured(method, one, completed, settings, numbers=tuple(pixels))
        for method, one in trainings.items()
    ]


def completion_section(records: Sequence[Record], notes: str) -> Section:
    """Show squared error and NLL against the number of pixels."""
    errors = report.traces(records, "error", "pixels")
    likelihoods = report.traces(records, "nll", "pixels")
    drawing, (left, right) = style.figure(columns=2, height=3.0)
    style.curves(left, errors, "pixels", ERROR, log=True)
    style.curves(right, likelihoods, "pixels", NLL, log=True)
    style.legend(drawing)
    times = [
        [method, f"{fmean(one.cpu_seconds or 0 for one in own) / 60:.1f}"]
        for (method,), own in report.by(records, "method").items()
    ]
    tables = [
        table_of(errors, f"{ERROR} by pixels seen", best=min, digits=4),
        table_of(likelihoods, f"{NLL} by pixels seen", best=min),
        report.table(["method", "CPU minutes of training"], times),
    ]
    return Section("\n\n".join(tables), {"": drawing}, notes)


def progress_table(records: Sequence[Record], corner: str = "validation NLL") -> str:
    """Show validation NLL after half of the training and after all of it."""
    rows: list[list[report.Cell]] = []
    for method, line in report.traces(records, "nll").items():
        first, last = min(line), max(line)
        rows.append([method, line[first] if first < last else None, line[last]])
    return report.table([corner, "half of the training", "all"], rows, best=min)


def completion_headline(records: Sequence[Record]) -> str:
    """Rank the models by squared error with the fewest and with the most pixels."""
    errors = report.traces(records, "error", "pixels")
    return "Squared error with " + ends(errors, " pixels", best=min, digits=4)
