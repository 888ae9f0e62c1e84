"""Tables and figures of the recipe `needles`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from experiments import report, style
from experiments.recipe import Size
from experiments.recipes.common import ranking
from experiments.records import Record
from experiments.report import Section
from experiments.statistics import Comparison, Measure

DEEP_SETS, MAXIMUM = "Deep Sets", "Deep Sets, max"
GATED, SLOTS = "Gated attention", "SSE, slots apart"
INSTANCES, STATISTICS = "Elements with bag labels", "Statistics, logistic regression"
STEPS, TIME, SUBSETS, MEMORY = "steps", "time", "time, subsets of", "memory"  # budgets of runs
AUC = Measure("AUC", larger_is_better=True, digits=3)
WORKS = 0.95  # AUC from which on a method works
Cell = tuple[int, float]  # elements of a bag, share of needles
Who = tuple[str, str]  # method, gradient
# The cell that the first figure and the headline are about.
KEYS = {Size.SMOKE: (60, 0.05), Size.SMALL: (10_000, 0.001), Size.PAPER: (10_000, 0.001)}

NOTES = """\
Columns are numbers of elements and shares of needles. AUC is that of test bags, with the weights
that have the best AUC on validation bags. *Exact*: gradients of whole bags, chunk by chunk
(`setfold.fold`). *Unbiased*: encodings of whole bags, and gradients estimated from one chunk.
*Subset*: one chunk replaces the bag and keeps its label. *Whole*: ordinary backpropagation.

At equal steps, all methods have seen equally many bags and labels. At equal CPU time, unbiased and
subset gradients get as many more steps as the time of exact ones allows, and so more bags and
labels; rows with exact gradients are the same in both tables. *Elements with bag labels*: a
classifier of single elements, trained as if each had the label of its bag. The score of a bag is
the mean of its 1, 10, 100 or 1,000 largest scores, whichever is best in validation. *Statistics*:
mean, deviation, minimum and maximum of each of the 64 numbers.

A method *works* if its AUC is at least 0.95 on average over seeds, with this share of needles and
with all larger ones. *With a needle*: share of the subsets of positive bags that hold one; the last
row is exact gradients of whole bags. Memory is that of a step on 8 bags with gated attention, above
the memory before it, and includes the elements of a chunk or bag. CPU times include validation, and
are means over seeds; so is the x axis of the first figure."""


# ---- values of records ---------------------------------------------------------------------------


def equal(records: Sequence[Record], budget: str) -> list[Record]:
    """Return the records of trainings with a budget; exact gradients define both."""
    return [r for r in records if r.settings["budget"] == budget or is_exact(r)]


def is_exact(record: Record) -> bool:
    """Return whether a record is that of a training with exact gradients."""
    return (record.settings["gradient"], record.settings["budget"]) == ("exact", STEPS)


def in_cells(records: Sequence[Record], budget: str) -> dict[Who, dict[Cell, list[Record]]]:
    """Return {(method, gradient): {cell: records of all seeds}}."""
    found: dict[Who, dict[Cell, list[Record]]] = {}
    groups = report.by(equal(records, budget), "method", "gradient", "elements", "share")
    for (method, gradient, elements, share), group in groups.items():
        found.setdefault((method, gradient), {})[elements, share] = group
    return found


def values_of(records: Sequence[Record], budget: str) -> dict[Who, dict[Cell, Any]]:
    """Return {(method, gradient): {cell: AUC of all seeds}}."""
    return {
        who: {cell: report.metric(group, "auc") for cell, group in line.items()}
        for who, line in in_cells(records, budget).items()
    }


def in_key(records: Sequence[Record]) -> list[Record]:
    """Return the records of the cell that the first figure is about."""
    key = KEYS[Size(records[0].size)]
    return [r for r in records if (r.settings["elements"], r.settings["share"]) == key]


def _name(method: str, gradient: str) -> str:
    return method if gradient == "none" else f"{method}, {gradient}"


def _label(cell: Cell) -> str:
    return f"{cell[0]:,} elements, {cell[1]:.1%} needles"


# ---- tables --------------------------------------------------------------------------------------


def auc_table(values: Mapping[Who, Mapping[Cell, Any]], corner: str) -> str:
    """Show AUC by method and cell."""
    cells = sorted({cell for line in values.values() for cell in line})
    rows = [[_name(*who), *(line.get(cell) for cell in cells)] for who, line in values.items()]
    headers = [corner, *(f"{elements:,}, {share:.1%}" for elements, share in cells)]
    return report.table(headers, rows, digits=3, best=max)


def limits_table(records: Sequence[Record]) -> str:
    """Show the smallest share of needles with which each method works."""
    found = in_cells(records, TIME)
    sizes = sorted({elements for line in found.values() for elements, _ in line})
    rows = [[_name(*who), *(_limit(line, size) for size in sizes)] for who, line in found.items()]
    headers = ["works from this share on, equal CPU time", *(f"{size:,}" for size in sizes)]
    return report.table(headers, rows)


def _limit(line: Mapping[Cell, Sequence[Record]], elements: int) -> str | None:
    tried = sorted((share for size, share in line if size == elements), reverse=True)
    found = "no share" if tried else None
    for share in tried:
        if fmean(float(str(one.metrics["auc"])) for one in line[elements, share]) < WORKS:
            break
        found = f"{share:.1%}"
    return found


def seconds_table(records: Sequence[Record]) -> str:
    """Show the CPU time of trainings at equal CPU time, on average over shares and seeds."""
    groups = report.by(equal(records, TIME), "method", "gradient", "elements")
    lines: dict[str, dict[int, str]] = {}
    for (method, gradient, elements), group in groups.items():
        lines.setdefault(_name(method, gradient), {})[elements] = f"{_seconds(group):.1f}"
    sizes = sorted({elements for line in lines.values() for elements in line})
    rows = [[name, *(line.get(size) for size in sizes)] for name, line in lines.items()]
    headers = ["CPU seconds, equal CPU time", *(f"{size:,}" for size in sizes)]
    return report.table(headers, rows)


def _seconds(records: Sequence[Record]) -> float:
    return fmean(record.cpu_seconds or 0.0 for record in records)


def subsets_table(records: Sequence[Record]) -> str:
    """Show AUC by the number of elements of a subset, at equal CPU time, in one cell."""
    elements, share = key = KEYS[Size(records[0].size)]
    groups: dict[int, list[Record]] = {}
    for record in in_key(records):
        if record.method == GATED and record.training is not None:
            if is_exact(record):
                groups.setdefault(elements, []).append(record)
            elif record.settings["gradient"] == "subset" and record.settings["budget"] != STEPS:
                groups.setdefault(record.training["task"]["chunk"], []).append(record)
    rows: list[list[report.Cell]] = [
        [
            size,
            f"{with_needle(elements, round(share * elements), size):.0%}",
            report.metric(group, "auc"),
            f"{_seconds(group):.1f}",
        ]
        for size, group in sorted(groups.items())
    ]
    headers = [f"subset of ({GATED}, {_label(key)})", "with a needle", "AUC", "CPU seconds"]
    return report.table(headers, rows, digits=3)


def with_needle(elements: int, needles: int, subset: int) -> float:
    """Return the probability that a subset of a positive bag holds a needle.

    >>> with_needle(elements=4, needles=1, subset=1), with_needle(4, 2, 3)
    (0.25, 1.0)
    """
    none = 1.0
    for place in range(needles):
        none *= max(0, elements - subset - place) / (elements - place)
    return 1 - none


def memory_table(records: Sequence[Record]) -> str:
    """Show peak memory by gradient and number of elements."""
    own = [record for record in records if record.settings["budget"] == MEMORY]
    values = report.grid(own, "megabytes", "gradient", "elements")
    sizes = sorted({size for line in values.values() for size in line})
    rows = [[gradient, *(line.get(size) for size in sizes)] for gradient, line in values.items()]
    headers = ["peak memory of a step (MB)", *(f"{size:,}" for size in sizes)]
    return report.table(headers, rows, digits=1)


# ---- figures -------------------------------------------------------------------------------------


def progress_figure(records: Sequence[Record]) -> Figure:
    """Draw the validation AUC of each gradient against CPU time, in one cell."""
    drawing, panels = style.figure(columns=2, height=2.8, titles=[GATED, SLOTS])
    own = equal(in_key(records), TIME)
    for axes, method in zip(panels, (GATED, SLOTS), strict=True):
        lines: dict[str, dict[float, Any]] = {}
        groups = report.by([r for r in own if r.method == method], "gradient")
        for (gradient,), group in groups.items():
            seconds = _seconds(group)
            line = report.traces(group, "auc")[method]  # by the part of the training that is done
            lines[gradient] = {done * seconds: seeds for done, seeds in line.items()}
        style.curves(axes, lines, "CPU seconds", "AUC on validation bags")
    style.legend(drawing)
    return drawing


def shares_figure(values: Mapping[Who, Mapping[Cell, Any]]) -> Figure:
    """Draw AUC against the share of needles: encoders above, gradients of one encoder below."""
    shares = Counter(
        elements for elements, _ in {cell for line in values.values() for cell in line}
    )
    sizes = sorted(elements for elements, tried in shares.items() if tried > 1)
    titles = [f"{what}, {size:,} elements" for what in ("encoders", GATED) for size in sizes]
    drawing, panels = style.figure(len(sizes), rows=2, height=2.6, titles=titles)
    encoders = {who[0]: line for who, line in values.items() if who[1] in ("exact", "none")}
    gradients = {who[1]: line for who, line in values.items() if who[0] == GATED}
    rows = [(lines, size) for lines in (encoders, gradients) for size in sizes]
    for axes, (lines, size) in zip(panels, rows, strict=True):
        shown = {
            name: {100 * share: seeds for (own, share), seeds in line.items() if own == size}
            for name, line in lines.items()
        }
        style.curves(axes, shown, "needles (%)", "AUC", log=True)
    style.legend(drawing)
    return drawing


def section(records: Sequence[Record]) -> Section:
    """Compare encoders and gradients at equal steps and at equal CPU time."""
    steps, time = (values_of(records, budget) for budget in (STEPS, TIME))
    tables = [
        auc_table(steps, "AUC, equal steps"),
        auc_table(time, "AUC, equal CPU time"),
        limits_table(records),
        seconds_table(records),
        subsets_table(records),
        memory_table(records),
    ]
    figures = {"": progress_figure(records), "shares": shares_figure(time)}
    return Section("\n\n".join(tables), figures, NOTES)


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Compare exact gradients with those of subsets, at equal steps and at equal CPU time."""
    key, found = KEYS[Size(records[0].size)], []
    for budget, label in ((STEPS, "equal steps"), (TIME, "equal time")):
        values = values_of(records, budget)
        for method in (SLOTS, GATED):
            exact, subset = (values.get((method, g), {}) for g in ("exact", "subset"))
            for cell in sorted({*exact} & {*subset}, key=lambda cell: (cell != key, cell)):
                names = f"{method}, exact", f"{method}, subset"
                seeds = exact[cell], subset[cell]
                found.append(Comparison(*names, f"{_label(cell)}, {label}", *seeds, AUC))
    return found


def headline(records: Sequence[Record]) -> str:
    """Rank all methods in one cell, at equal steps and at equal CPU time."""
    key = KEYS[Size(records[0].size)]
    ranked = {}
    for budget in (STEPS, TIME):
        lines = values_of(records, budget).items()
        here = {_name(*who): line[key] for who, line in lines if key in line}
        ranked[budget] = ranking(here, best=max)
    return f"AUC with {_label(key)}. Equal steps: {ranked[STEPS]}. Equal CPU time: {ranked[TIME]}"
