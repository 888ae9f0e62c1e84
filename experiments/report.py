"""Values and tables of the records, for the recipes' sections. page.py makes RESULTS.md of them.

values = report.grid(records, "accuracy", "method", "points")  # {method: {points: {seed: value}}}
rows = [[method, *line.values()] for method, line in values.items()]
text = report.table(["", "100", "200"], rows, best=max)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure

from experiments import style
from experiments.records import Record
from experiments.statistics import Seeds, interval, leaders


@dataclass(frozen=True)
class Section:
    """Tables and figures that a recipe makes from its records.

    Args:
        table: Markdown tables.
        figures: figures by name; "" for the only or the first one.
        notes: Markdown below the figures that explains tables and figures.
    """

    table: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    notes: str = ""


# ---- values of records ---------------------------------------------------------------------------


def metric(records: Sequence[Record], name: str) -> Seeds:
    """Return one metric of records that differ in their seeds only."""
    found: dict[int, float] = {}
    for record in records:
        value = record.metrics.get(name)
        if not isinstance(value, int | float):
            raise KeyError(
                f"expected a number {name!r} among the metrics of {record.recipe}, "
                f"{record.method}; got {value!r}. Available metrics: {sorted(record.metrics)}."
            )
        _add(found, record, value)
    return found


def _add(found: dict[int, float], record: Record, value: float) -> None:
    if record.seed in found:
        raise ValueError(
            f"expected one record for each seed; got several of {record.recipe}, {record.method} "
            f"with seed {record.seed}. Group records by their settings first, with `by`."
        )
    found[record.seed] = value


def by(records: Sequence[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """Group records by "method", "seed" or the name of a setting.

    Methods are in the order of style.METHODS, everything else is sorted.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in sorted(records, key=lambda record: record.seed):
        key = tuple(_setting(record, name) for name in names)
        groups.setdefault(key, []).append(record)
    order = {method: place for place, method in enumerate(style.looks(r.method for r in records))}

    def rank(key: tuple[Any, ...]) -> list[tuple[bool, Any]]:
        known = [order[v] if name == "method" else v for name, v in zip(names, key, strict=True)]
        return [(isinstance(value, str), value) for value in known]

    return {key: groups[key] for key in sorted(groups, key=rank)}


def _setting(record: Record, name: str) -> Hashable:
    found = {"method": record.method, "seed": record.seed, **record.settings}
    if name not in found:
        raise KeyError(
            f"cannot group records of {record.recipe}, {record.method} by {name!r}; "
            f"expected one of {sorted(found)}."
        )
    return found[name]


def grid(records: Sequence[Record], name: str, outer: str, inner: str) -> dict[Any, dict[Any, Any]]:
    """Return {outer: {inner: {seed: metric}}}, for tables and style.curves, bars, dots."""
    values: dict[Any, dict[Any, Seeds]] = {}
    for (row, column), group in by(records, outer, inner).items():
        values.setdefault(row, {})[column] = metric(group, name)
    return values


def traces(records: Sequence[Record], y: str, x: str = "epoch") -> dict[str, dict[float, Seeds]]:
    """Return {method: {x: {seed: value}}} of list metrics or histories."""
    lines: dict[str, dict[float, Seeds]] = {}
    for (method,), group in by(records, "method").items():
        found: dict[float, dict[int, float]] = {}
        for record in group:
            lists: Any = record.history if x in record.history else record.metrics
            for place, value in zip(lists[x], lists[y], strict=True):
                _add(found.setdefault(place, {}), record, value)
        lines[method] = dict(found)
    return lines


def summary(seeds: Seeds, digits: int = 4) -> str:
    """Format the mean over seeds and half the width of its 95% interval for a table.

    >>> summary({0: 0.85, 1: 0.86, 2: 0.87}, digits=3), summary({0: 2.0}, digits=1)
    ('0.860 ± 0.025', '2.0')
    """
    return plus_minus(interval(seeds.values()), digits)


def plus_minus(found: tuple[float, float | None], digits: int, sign: str = "-") -> str:
    """Format a mean and half the width of its interval; a sign "+" is written, too.

    >>> plus_minus((-0.0001, 0.12), 2), plus_minus((0.5, None), 2, sign="+")
    ('0.00 ± 0.12', '+0.50')
    """
    middle, half = found
    return f"{middle:{sign}z.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


# ---- tables and text -----------------------------------------------------------------------------

Cell = str | float | Seeds | None
COLUMNS = 100  # width of prose; tables may be wider
_NUMBER = re.compile(r"[-−–+±×%<>≈.,:/\d\se()*]*")


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    digits: int = 4,
    best: Callable[[Iterable[float]], float] | None = None,
) -> str:
    """Format a Markdown table; columns of numbers are right-aligned.

    Args:
        headers: column headers.
        rows: cells: text, an int, a float, {seed: value}, or None for an empty cell.
        digits: digits after the decimal point, except for ints.
        best: `max` or `min` to set values in bold: of each column the best mean over seeds, and all
            that are not shown to be worse. Numbers of one seed, or the paper's, do not count.

    >>> rows = [["paper", 0.5], ["theirs", {0: 0.8, 1: 0.9}], ["ours", {0: 0.4, 1: 0.5}]]
    >>> print(table(["", "error"], rows, digits=2, best=min))
    | | error |
    |---|---:|
    | paper | 0.50 |
    | theirs | 0.85 ± 0.64 |
    | ours | **0.45 ± 0.64** |
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"expected {len(headers)} cells, one per header; got {row!r}.")
    columns = [_column(cells, digits, best) for cells in zip(*rows, strict=True)]
    rules = ["---:" if all(map(_NUMBER.fullmatch, cells)) else "---" for cells in columns]
    lines = [headers, *zip(*columns, strict=True)]
    first, *others = [" ".join(["|", *(f"{cell} |".lstrip() for cell in line)]) for line in lines]
    return "\n".join([first, f"|{'|'.join(rules)}|", *others])


def _column(
    cells: Sequence[Cell], digits: int, best: Callable[[Iterable[float]], float] | None
) -> list[str]:
    several = {place: cell for place, cell in enumerate(cells) if isinstance(cell, Mapping)}
    bold = leaders(several, best is max, digits) if best else set()
    texts = [_cell(cell, digits) for cell in cells]
    return [f"**{text}**" if place in bold else text for place, text in enumerate(texts)]


def _cell(cell: Cell, digits: int) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return " ".join(cell.split()).replace("|", "\\|")
    if isinstance(cell, int):
        return f"{cell:,}"
    return summary(cell, digits) if isinstance(cell, Mapping) else plus_minus((cell, None), digits)


def wrap(text: str, indent: str = "") -> str:
    """Wrap a paragraph or, with an indent, an item of a list."""
    flat = " ".join(text.split())
    return fill(
        flat, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
