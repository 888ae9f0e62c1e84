"""Helpers for recipes: build runs from trainings, and tables and headlines from records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from experiments import report, style
from experiments.pools import Pool
from experiments.recipe import Metrics, Run, Task, TaskT, Training
from experiments.report import Section

Best = Callable[[Iterable[float]], float]


def with_task(training: Training[TaskT], **changes: Any) -> Training[TaskT]:
    """Return the same training with some fields of its task changed."""
    return replace(training, task=replace(training.task, **changes))


def with_pools(training: Training[TaskT], pools: Mapping[str, Pool]) -> dict[str, Training[TaskT]]:
    """Return the same training for each method; only the set encoder differs."""
    return {method: with_task(training, pool=pool) for method, pool in pools.items()}


def with_methods(
    training: Training[TaskT], methods: Mapping[str, Mapping[str, Any]]
) -> dict[str, Training[TaskT]]:
    """Return the same training for each method, where more than the set encoder differs."""
    return {method: with_task(training, **changes) for method, changes in methods.items()}


def tested(method: str, training: Training[Task], **settings: str | int | float) -> Run:
    """Return a run that measures the task's validation metric on the test split."""
    measure = partial(training.task.evaluate, split="test")
    return Run(method, training, measure, settings, training.seed)


def measured(
    method: str,
    training: Training[TaskT],
    measure: Callable[..., Metrics],
    settings: Mapping[str, str | int | float] | None = None,
    **arguments: Any,
) -> Run:
    """Return a run that calls measure(model, task=..., **arguments) after training."""
    bound = partial(measure, task=training.task, **arguments)
    return Run(method, training, bound, settings or {}, training.seed)


def untrained(
    measures: Mapping[str, Callable[..., Metrics]], seed: int, **arguments: Any
) -> list[Run]:
    """Return a run without training for each method; it calls measure(None, **arguments)."""
    return [
        Run(method, None, partial(measure, **arguments), seed=seed)
        for method, measure in measures.items()
    ]


def table_of(
    values: Mapping[str, Mapping[float, Sequence[float]]],
    corner: str,
    *,
    best: Best | None = None,
    digits: int = 3,
    paper: Mapping[str, Mapping[float, float]] | None = None,
) -> str:
    """Make a table of {method: {x: [value of each seed]}}, with the paper's numbers below each."""
    columns = sorted({x for line in values.values() for x in line})
    rows: list[list[report.Cell]] = []
    for method in style.looks(values):
        rows.append([method, *(values[method].get(x) for x in columns)])
        if paper and method in paper:
            rows.append([f"{method}, paper", *(paper[method].get(x) for x in columns)])
    return report.table([corner, *(f"{x:,g}" for x in columns)], rows, digits=digits, best=best)


def curve_section(
    values: Mapping[str, Mapping[float, Sequence[float]]],
    xlabel: str,
    ylabel: str,
    *,
    best: Best,
    digits: int = 3,
    log: bool = False,
) -> Section:
    """Make a table and a line plot of {method: {x: [value of each seed]}}."""
    drawing, (axes,) = style.figure(height=3.2)
    style.curves(axes, values, xlabel, ylabel, log=log)
    style.legend(drawing)
    return Section(table_of(values, xlabel, best=best, digits=digits), {"": drawing})


def ranking(values: Mapping[str, Sequence[float]], *, best: Best, digits: int = 3) -> str:
    """List methods and their means over seeds, best first.

    >>> ranking({"Deep Sets": [0.5, 0.7], "PMA": [0.25]}, best=min, digits=2)
    'PMA 0.25; Deep Sets 0.60'
    """
    means = {method: fmean(seeds) for method, seeds in values.items()}
    order = sorted(means, key=lambda method: means[method], reverse=best is max)
    return "; ".join(f"{method} {means[method]:z.{digits}f}" for method in order)


def ends(
    values: Mapping[str, Mapping[float, Sequence[float]]], unit: str, *, best: Best, digits: int = 3
) -> str:
    """Rank the methods at the first and at the last x of the curves.

    >>> ends({"PMA": {100: [0.25], 200: [0.5]}}, " points", best=max, digits=2)
    '100 points: PMA 0.25. 200 points: PMA 0.50'
    """
    places = sorted({x for line in values.values() for x in line})
    return ". ".join(
        f"{x:g}{unit}: {ranking(at(values, x), best=best, digits=digits)}"
        for x in (places[0], places[-1])
    )


def at(
    values: Mapping[str, Mapping[float, Sequence[float]]], x: float
) -> dict[str, Sequence[float]]:
    """Return the methods' values at one x of their curves."""
    return {method: line[x] for method, line in values.items() if x in line}
