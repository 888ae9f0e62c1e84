"""Make RESULTS.md and its figures from the records; helpers for the recipes' tables.

values = report.grid(records, "accuracy", "method", "points")  # {method: {points: [seeds]}}
rows = [[method, *line.values()] for method, line in values.items()]
text = report.table(["", "100", "200"], rows, best=max)
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure

from experiments import records as record_files
from experiments import style
from experiments.progress import duration
from experiments.recipe import Outcome, Recipe, Size, as_json
from experiments.records import Record
from setfold import InputError
from setfold.core.persist import write_atomically


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


def metric(records: Sequence[Record], name: str) -> list[float]:
    """Return one metric of each record."""
    found = [record.metrics.get(name) for record in records]
    for record, value in zip(records, found, strict=True):
        if not isinstance(value, int | float):
            raise KeyError(
                f"expected a number {name!r} among the metrics of {record.recipe}, "
                f"{record.method}; got {value!r}. Available metrics: {sorted(record.metrics)}."
            )
    return found  # type: ignore[return-value]  # checked in the loop


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
    """Return {outer: {inner: [metric of each seed]}}, for tables and style.curves, bars, dots."""
    values: dict[Any, dict[Any, list[float]]] = {}
    for (row, column), group in by(records, outer, inner).items():
        values.setdefault(row, {})[column] = metric(group, name)
    return values


def traces(
    records: Sequence[Record], y: str, x: str = "epoch"
) -> dict[str, dict[float, list[float]]]:
    """Return {method: {x: [value of each seed]}} of list metrics or histories."""
    lines: dict[str, dict[float, list[float]]] = {}
    for (method,), group in by(records, "method").items():
        line = lines.setdefault(method, {})
        for record in group:
            lists: Any = record.history if x in record.history else record.metrics
            for place, value in zip(lists[x], lists[y], strict=True):
                line.setdefault(place, []).append(value)
    return lines


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and sample standard deviation; None instead of the latter for a single value."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def summary(values: Sequence[float], digits: int = 4) -> str:
    """Format mean and standard deviation over seeds for a table.

    >>> summary([0.85, 0.86, 0.87], digits=3), summary([2.0], digits=1)
    ('0.860 ± 0.010', '2.0')
    """
    mean, deviation = mean_and_deviation(values)
    return f"{mean:z.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


# ---- tables --------------------------------------------------------------------------------------

Cell = str | float | Sequence[float] | None
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
        rows: cells: text, an int, a float, values over seeds, or None for an empty cell.
        digits: digits after the decimal point, except for ints.
        best: `max` or `min` to set the best value over seeds of each column in bold. Single
            numbers, such as the paper's, do not count.

    >>> print(table(["", "error"], [["paper", 0.5], ["ours", [0.25, 0.75]]], digits=2, best=min))
    | | error |
    |---|---:|
    | paper | 0.50 |
    | ours | **0.50 ± 0.35** |
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
    means = {
        place: round(fmean(cell), digits)
        for place, cell in enumerate(cells)
        if isinstance(cell, Sequence) and not isinstance(cell, str)
    }
    winner = best(means.values()) if best and means else None
    texts = [_cell(cell, digits) for cell in cells]
    won = {place for place, mean in means.items() if mean == winner}
    return [f"**{text}**" if place in won else text for place, text in enumerate(texts)]


def _cell(cell: Cell, digits: int) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return " ".join(cell.split()).replace("|", "\\|")
    if isinstance(cell, int):
        return f"{cell:,}"
    return summary([cell] if isinstance(cell, float) else cell, digits)


# ---- the page ------------------------------------------------------------------------------------

COLUMNS = 100  # width of prose; tables may be wider

_INTRODUCTION = """\
# Results

We reproduce the experiments of *Mini-Batch Consistent Slot Set Encoder for Scalable Set Encoding*
(NeurIPS 2021) at reduced size, and add some. Two variants of the Slot Set Encoder (SSE) have the
same encoding size. **As printed** follows the paper's text and pools the slots into one vector.
**Slots apart** concatenates the slots, for example 8 slots of 8 dimensions for 64 dimensions.
Negative log-likelihood (NLL) is in nats per dimension; lower is better. Numbers are means over
seeds. `python -m experiments report` generates this page from [results/records](results/records);
each section lists the command that made its records."""

_READING = """\
## How to read the sections

- **As printed** often loses the effect of attention. The attention weights of an element sum to one
  over the slots. So if slots hold sums or means and are then summed or averaged, attention cancels.
- **±** is the standard deviation over seeds. In figures, lines, markers and bars show the mean over
  seeds; bands and whiskers show the range from the lowest to the highest seed. In tables, the best
  value of each column is bold.
- **Deep Sets** is the element-wise form without message passing, which streams. The aggregate is
  the mean unless the name says otherwise. **PMA** is the Set Transformer's attention pooling
  without the self-attention layers before it. **ISAB** is its self-attention through inducing
  points.
- **Wide slots** have more dimensions than their share of the encoding; a linear layer maps their
  concatenation to the encoding size. **SSE → Set Transformer** applies a Set Transformer to the
  slots instead. Both still need one pass only.
- **Places**: `setfold.PlacedSlotEncoder`, slots on a grid that elements attend to by distance, and
  a network that knows the grid. It is not in the paper. These sections also state the CPU time of
  training.
- **Slots attended**: the decoder attends to the slots instead of reading one vector.
- Each section lists parameters and run time, which differ between methods.
- Weights, learning rates and all other choices were selected on a validation split. The starting
  point of this tuning came from earlier short runs that had used the test split.
- **Does it hold?** refers to the paper's claim in our setting. Each section lists the differences
  from the paper's setup."""


def render(
    recipes: Sequence[Recipe], records: Mapping[str, Sequence[Record]], size: Size = Size.SMALL
) -> tuple[str, dict[str, Figure]]:
    """Return the text of RESULTS.md, and the figures by their file names in results/.

    Args:
        recipes: recipes in the order of the page.
        records: records by recipe name; other sizes and incomplete seeds are ignored.
        size: size to report. Verdicts were written for size "small" and are left out for others.
    """
    found = {one.name: complete(one, records.get(one.name, ()), size) for one in recipes}
    figures: dict[str, Figure] = {}
    parts = [_INTRODUCTION, _summary(recipes, found, size), _READING]
    parts.append(_provenance([one for several in found.values() for one in several], size))
    for recipe in recipes:
        parts.append(f'<a id="{recipe.name}"></a>\n\n## {recipe.number}. {recipe.title}')
        parts.append(_wrap(f"**Claim.** {recipe.claim}"))
        if found[recipe.name]:
            parts.extend(_paragraphs(recipe, found[recipe.name], size, figures))
        else:
            parts.append(f"Not run yet: `{_command(recipe, size)}`")
    return "\n\n".join(part for part in parts if part) + "\n", figures


def complete(recipe: Recipe, records: Sequence[Record], size: Size) -> list[Record]:
    """Return the records of all seeds whose runs are complete; the other seeds are ignored.

    A record counts only if its training has the settings that the recipe has now.
    """
    found = []
    for seed in sorted({one.seed for one in records}):
        own = [one for one in records if (one.size, one.seed) == (size, seed)]
        wanted = [
            (run.method, dict(run.settings), as_json(run.training))
            for run in recipe.runs(size, seed)
        ]
        counting = [one for one in own if (one.method, one.settings, one.training) in wanted]
        if len(counting) == len(wanted):
            found.extend(counting)
    return found


def write(
    recipes: Sequence[Recipe], records_folder: Path, out: Path, size: Size = Size.SMALL
) -> list[Path]:
    """Write RESULTS.md and results/*.png to a folder; each file is written atomically.

    Returns:
        The paths of the files.
    """
    records = {recipe.name: record_files.read(records_folder, recipe.name) for recipe in recipes}
    if not any(complete(recipe, records[recipe.name], size) for recipe in recipes):
        raise InputError(
            f"nothing to report: {records_folder} contains no complete seed of size {size}. Pass "
            "the folder that `run` printed as --records, or run a recipe first."
        )
    text, figures = render(recipes, records, size)
    contents = {out / "results" / name: style.png(figure) for name, figure in figures.items()}
    contents[out / "RESULTS.md"] = text.encode()  # last: it must not refer to missing figures
    (out / "results").mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        write_atomically(path, content)
    return list(contents)


def _summary(recipes: Sequence[Recipe], records: Mapping[str, Sequence[Record]], size: Size) -> str:
    """List the results in a few lines each, grouped by whether the paper's claims hold."""
    groups: dict[str, list[str]] = {outcome: [] for outcome in Outcome}
    for recipe in recipes:
        found = records[recipe.name]
        if not found:
            group, text = "Not run yet", f"{recipe.title}."
        elif size is Size.SMALL and recipe.outcome is not None:
            group, text = recipe.outcome, recipe.summary
        else:
            group, text = "Measured", f"{recipe.title}: {recipe.headline(found)}."
        line = f"- {text} [§{recipe.number}](#{recipe.name})"
        groups.setdefault(group, []).append(_wrap(line, "  "))
    listed = ["\n".join([f"**{name}**", "", *lines]) for name, lines in groups.items() if lines]
    return "\n\n".join(["## Summary", *listed])


def _paragraphs(
    recipe: Recipe, records: Sequence[Record], size: Size, figures: dict[str, Figure]
) -> list[str]:
    """Return the paragraphs of a recipe with records, and add its figures to `figures`."""
    section = recipe.section(records)
    pictures = []
    for name, figure in section.figures.items():
        file = f"{recipe.name}-{name}.png" if name else f"{recipe.name}.png"
        figures[file] = figure
        about = f"{recipe.title}: {name}" if name else recipe.title
        pictures.append(f"![{about}](results/{file})")
    verdict = [
        f"**Does it hold? {_capitalised(recipe.holds)}.** {recipe.verdict}",
        f"**Differences from the paper's setup.** {recipe.cut}",
    ]
    return [
        _wrap(f"**Measured.** {_capitalised(recipe.headline(records))}."),
        section.table,
        *pictures,
        section.notes,
        *(map(_wrap, verdict) if size is Size.SMALL else []),
        _costs(records),
        _wrap(f"**Settings.** {_settings(records)}."),
        f"**Command.** `{_command(recipe, size)}`",
    ]


def _costs(records: Sequence[Record]) -> str:
    """Make a table of each method's parameters and run time."""
    rows = []
    for (method,), own in by(records, "method").items():
        sizes = {one.parameters for one in own if one.parameters is not None}
        if sizes:
            time = duration(median(one.seconds for one in own))
            rows.append([method, _distinct(sizes), time])
    return table(["method", "parameters", "median time per run"], rows) if rows else ""


def _settings(records: Sequence[Record]) -> str:
    """Summarise the settings of the runs."""
    trainings = [record.training for record in records if record.training]
    settings = {
        "runs": f"{len(records):,}",
        "seeds": f"{len({record.seed for record in records})}",
        "epochs": _distinct(training["epochs"] for training in trainings),
        "batch size": _distinct(training["batch_size"] for training in trainings),
        "learning rate": _distinct(training["rate"] for training in trainings),
    }
    return "; ".join(f"{name}: {value}" for name, value in settings.items() if value)


def _provenance(records: Sequence[Record], size: Size) -> str:
    """Describe the commits, the machine and the versions behind the numbers."""
    if not records:
        return ""
    lines = [
        f"Size `{size}`: {len(records):,} runs took about {duration(_seconds(records))}; a "
        "training that several runs share is counted once. The last run finished at "
        f"{max(one.finished for one in records)}.",
        f"Commits: {_counted(_commit(record) for record in records)}.",
        f"Machine: {_counted(_spelled(record.machine) for record in records)}.",
        f"Versions: {_counted(_spelled(record.versions) for record in records)}.",
    ]
    return "\n".join(
        ["## How the experiments were run", "", *(_wrap(f"- {x}", "  ") for x in lines)]
    )


def _seconds(records: Sequence[Record]) -> float:
    """Return the total time of all runs; a training that runs share is counted once."""
    longest: dict[str, float] = {}
    for number, record in enumerate(records):
        key = json.dumps(record.training, sort_keys=True) if record.training else str(number)
        longest[key] = max(record.seconds, longest.get(key, 0))
    return sum(longest.values())


def _commit(record: Record) -> str:
    """Shorten the commits of a record; there are several if another commit resumed the training."""
    several = record.commit.split(", ")
    return ", ".join(c[:12] + " with local changes" * c.endswith("+") for c in several)


def _spelled(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _counted(texts: Iterable[str]) -> str:
    """List distinct texts, with the number of runs for each if there is more than one."""
    counts = Counter(texts)
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(
        f"{text} ({count:,} {'run' if count == 1 else 'runs'})"
        for text, count in sorted(counts.items())
    )


def _distinct(values: Iterable[float]) -> str:
    """List distinct values: up to four in full, more as a range.

    >>> _distinct([256, 64, 64]), _distinct([1000, 2000, 3000, 4000, 5000]), _distinct([])
    ('64 / 256', '1,000 to 5,000', '')
    """
    texts = [f"{value:,}" for value in sorted(set(values))]
    return " / ".join(texts) if len(texts) <= 4 else f"{texts[0]} to {texts[-1]}"


def _command(recipe: Recipe, size: Size) -> str:
    return f"python -m experiments run {recipe.name} --size {size}"


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _wrap(text: str, indent: str = "") -> str:
    """Wrap a paragraph or, with an indent, an item of a list."""
    flat = " ".join(text.split())
    return fill(
        flat, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
