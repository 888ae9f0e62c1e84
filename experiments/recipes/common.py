"""Helpers for recipes: runs from trainings; tables, comparisons and headlines from records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from experiments import report, style
from experiments.pools import Pool
from experiments.recipe import Metrics, Run, Task, TaskT, Training
from experiments.report import Section
from experiments.statistics import Comparison, Measure, Part, Seeds, mean

Best = Callable[[Iterable[float]], float]
Lines = Mapping[str, Mapping[float, Seeds]]  # {method: {x: {seed: value}}}


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
    values: Lines,
    corner: str,
    *,
    best: Best | None = None,
    digits: int = 3,
    paper: Mapping[str, Mapping[float, float]] | None = None,
) -> str:
    """Make a table of {method: {x: {seed: value}}}, with the paper's numbers below each."""
    columns = sorted({x for line in values.values() for x in line})
    rows: list[list[report.Cell]] = []
    for method in style.looks(values):
        rows.append([method, *(values[method].get(x) for x in columns)])
        if paper and method in paper:
            rows.append([f"{method}, paper", *(paper[method].get(x) for x in columns)])
    return report.table([corner, *(f"{x:,g}" for x in columns)], rows, digits=digits, best=best)


def curve_section(
    values: Lines,
    xlabel: str,
    ylabel: str,
    *,
    best: Best,
    digits: int = 3,
    log: bool = False,
) -> Section:
    """Make a table and a line plot of {method: {x: {seed: value}}}."""
    drawing, (axes,) = style.figure(height=3.2)
    style.curves(axes, values, xlabel, ylabel, log=log)
    style.legend(drawing)
    return Section(table_of(values, xlabel, best=best, digits=digits), {"": drawing})


def was_run(values: Mapping[str, Any], *methods: str) -> bool:
    """Return whether there are values of these methods; sections appear before all runs are there."""
    return all(method in values for method in methods)


def against(
    values: Lines,
    ours: str,
    baselines: Sequence[str],
    measure: Measure,
    unit: str,
    *,
    part: Part = Part.CLAIM,
    at: Sequence[float] | None = None,
) -> list[Comparison]:
    """Compare a method with others, seed by seed, at each x that was measured for both.

    Args:
        values: {method: {x: {seed: value}}}.
        ours: method that the claim says is better.
        baselines: methods that it is compared with; those that were not run are left out.
        measure: what the values are.
        unit: what x is, such as " points".
        part: what the comparisons count for.
        at: only at these x, in this order; None for all.

    >>> from experiments.statistics import ACCURACY
    >>> values = {"PMA": {100: {0: 0.5, 1: 0.6}}, "SSE": {100: {0: 0.7, 1: 0.9}}}
    >>> [one.where for one in against(values, "SSE", ["PMA"], ACCURACY, " points")]
    ['100 points']
    """
    return [
        Comparison(ours, other, _label(x, unit), values[ours][x], values[other][x], measure, part)
        for other in baselines
        if was_run(values, ours, other)
        for x in (sorted(values[ours]) if at is None else at)
        if x in values[ours] and x in values[other]
    ]


def in_pairs(
    values: Mapping[str, Seeds],
    pairs: Mapping[tuple[str, str], Part],
    measure: Measure,
    where: str,
) -> list[Comparison]:
    """Compare methods that have one value per seed.

    Args:
        values: {method: {seed: value}}.
        pairs: {(ours, baseline): what the comparison counts for}; pairs that were not run are left
            out.
        measure: what the values are.
        where: setting of all comparisons.
    """
    return [
        Comparison(ours, other, where, values[ours], values[other], measure, part)
        for (ours, other), part in pairs.items()
        if was_run(values, ours, other)
    ]


def changes(
    values: Lines,
    methods: Sequence[str],
    pairs: Sequence[tuple[float, float]],
    measure: Measure,
    unit: str,
    *,
    part: Part = Part.CLAIM,
) -> list[Comparison]:
    """Compare methods at one x with themselves at another, seed by seed.

    Args:
        values: {method: {x: {seed: value}}}.
        methods: the methods; those that were not run are left out.
        pairs: (x, baseline): the claim says that x is better; pairs that were not measured are left
            out (smoke runs have fewer).
        measure: what the values are.
        unit: what x is, such as " levels".
        part: what the comparisons count for.
    """
    return [
        Comparison(
            _label(x, unit),
            _label(y, unit),
            method,
            values[method][x],
            values[method][y],
            measure,
            part,
        )
        for method in methods
        if was_run(values, method)
        for x, y in pairs
        if {x, y} <= values[method].keys()
    ]


def _label(x: float, unit: str) -> str:
    return f"{x:,g}{unit.removesuffix('s') if x == 1 else unit}"


def ranking(values: Mapping[str, Seeds], *, best: Best, digits: int = 3) -> str:
    """List methods and their means over seeds, best first.

    >>> ranking({"Deep Sets": {0: 0.5, 1: 0.7}, "PMA": {0: 0.25}}, best=min, digits=2)
    'PMA 0.25; Deep Sets 0.60'
    """
    means = {method: mean(seeds) for method, seeds in values.items()}
    order = sorted(means, key=lambda method: means[method], reverse=best is max)
    return "; ".join(f"{method} {means[method]:z.{digits}f}" for method in order)


def ends(values: Lines, unit: str, *, best: Best, digits: int = 3) -> str:
    """Rank the methods at the first and at the last x of the curves.

    >>> ends({"PMA": {100: {0: 0.25}, 200: {0: 0.5}}}, " points", best=max, digits=2)
    '100 points: PMA 0.25. 200 points: PMA 0.50'
    """
    places = sorted({x for line in values.values() for x in line})
    return ". ".join(
        f"{x:g}{unit}: {ranking(at(values, x), best=best, digits=digits)}"
        for x in (places[0], places[-1])
    )


def at(values: Lines, x: float) -> dict[str, Seeds]:
    """Return the methods' values at one x of their curves."""
    return {method: line[x] for method, line in values.items() if x in line}
