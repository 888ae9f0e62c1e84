"""RESULTS.md and its figures, from the records alone; and what recipes set their tables with.

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
from typing import Any

from matplotlib.figure import Figure

from experiments import records as record_files
from experiments import style
from experiments.progress import duration
from experiments.recipe import Recipe, Size, as_json
from experiments.records import Record
from setfold import InputError
from setfold.core.persist import write_atomically


@dataclass(frozen=True)
class Section:
    """What a recipe makes of its records.

    Args:
        table: Markdown.
        figures: by name; "" for the only or the first one.
        notes: Markdown below the figures, such as what they show.
    """

    table: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    notes: str = ""


# ---- values of records ---------------------------------------------------------------------------


def metric(records: Sequence[Record], name: str) -> list[float]:
    """One number of each record."""
    found = [record.metrics.get(name) for record in records]
    for record, value in zip(records, found, strict=True):
        if not isinstance(value, int | float):
            raise KeyError(
                f"expected a number {name!r} among the metrics of {record.recipe}, "
                f"{record.method}; there are {sorted(record.metrics)}, and this is {value!r}."
            )
    return found  # type: ignore[return-value]  # the loop has seen to it


def by(records: Sequence[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """Records by method, by seed or by what their settings have under a name.

    Methods come in the order of style.METHODS, the rest sorted.
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
            f"records of {record.recipe}, {record.method} cannot be told apart by {name!r}; "
            f"expected one of {sorted(found)}."
        )
    return found[name]


def grid(records: Sequence[Record], name: str, outer: str, inner: str) -> dict[Any, dict[Any, Any]]:
    """A metric over seeds, {outer: {inner: [values]}}: for style.curves, bars, dots and tables."""
    values: dict[Any, dict[Any, list[float]]] = {}
    for (row, column), group in by(records, outer, inner).items():
        values.setdefault(row, {})[column] = metric(group, name)
    return values


def traces(
    records: Sequence[Record], y: str, x: str = "epoch"
) -> dict[str, dict[float, list[float]]]:
    """Lists of metrics or of the history over seeds, {method: {x: [values]}}: for style.curves."""
    lines: dict[str, dict[float, list[float]]] = {}
    for (method,), group in by(records, "method").items():
        line = lines.setdefault(method, {})
        for record in group:
            lists: Any = record.history if x in record.history else record.metrics
            for place, value in zip(lists[x], lists[y], strict=True):
                line.setdefault(place, []).append(value)
    return lines


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation of a sample; None for a single value."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def summary(values: Sequence[float], digits: int = 4) -> str:
    """Mean and standard deviation over seeds, as tables have them.

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
    """A Markdown table; columns of numbers are aligned to the right.

    Args:
        headers: of the columns.
        rows: cells: text, a whole number, a number, values over seeds, None for nothing.
        digits: after the point, of all but whole numbers.
        best: `max` or `min`, for the best values over seeds of each column in bold. Single
            numbers, such as the paper's, do not compete.

    >>> print(table(["", "error"], [["paper", 0.5], ["ours", [0.25, 0.75]]], digits=2, best=min))
    | | error |
    |---|---:|
    | paper | 0.50 |
    | ours | **0.50 ± 0.35** |
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"expected {len(headers)} cells, as there are headers; got {row!r}.")
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

_INTRODUCTION = """\
# Results

The paper's experiments, and some beyond it, at the size `{size}`. All numbers and figures are made
from the records in [results/records](results/records) by `python -m experiments report`."""

_READING = """\
## How to read

- *As printed* follows the paper's text, which pools the slots into one vector. An element's weights
  add up to one over the slots, so attention cancels where slots that hold sums or means are summed
  or averaged. *Slots apart* has as many dimensions, but spreads them over the slots: for 64, say,
  8 slots of 8.
- *±* is the standard deviation over seeds. In figures, lines, markers and bars are means over
  seeds; bands and whiskers reach from the lowest seed to the highest.
- *Wide slots* read more numbers than their share, and a linear layer makes as many dimensions of
  them as the others have; *SSE → Set Transformer* lets a Set Transformer do that. Both still fold
  in one pass. Each section lists parameters and time, which differ between methods.
- Weights, rates and all other choices were made on a validation split. Where they began, at
  settings that are known from earlier short runs, the test split had been looked at.
- *Holds?* is whether the paper's claim holds in our setting. Each section says what was cut
  against the paper's."""


def render(
    recipes: Sequence[Recipe], records: Mapping[str, Sequence[Record]], size: Size = Size.SMALL
) -> tuple[str, dict[str, Figure]]:
    """The text of RESULTS.md, and the figures by the names of their files in results/.

    Args:
        recipes: in the order of the page.
        records: by the recipes' names; those of other sizes, and of incomplete seeds, are left out.
        size: whose results are shown; the recipes' verdicts are about the small one, and left out
            for others.
    """
    found = {one.name: complete(one, records.get(one.name, ()), size) for one in recipes}
    figures: dict[str, Figure] = {}
    parts = [_INTRODUCTION.format(size=size), _glance(recipes, found, size), _READING]
    parts.append(_circumstances([one for several in found.values() for one in several]))
    for recipe in recipes:
        parts.append(f'<a id="{recipe.name}"></a>\n\n## {recipe.number}. {recipe.title}')
        parts.append(f"**The paper.** {_flat(recipe.claim)}")
        if found[recipe.name]:
            parts.extend(_told(recipe, found[recipe.name], size, figures))
        else:
            parts.append(f"Not run yet: `{_command(recipe, size)}`.")
    return "\n\n".join(part for part in parts if part) + "\n", figures


def complete(recipe: Recipe, records: Sequence[Record], size: Size) -> list[Record]:
    """The records of those seeds of which all runs are there: half a comparison is none.

    A record that was trained with other settings than the recipe has now is of another run.
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
    """Write RESULTS.md and results/*.png into a folder, each file whole or not at all.

    Returns:
        What was written.
    """
    records = {recipe.name: record_files.read(records_folder, recipe.name) for recipe in recipes}
    if not any(complete(recipe, records[recipe.name], size) for recipe in recipes):
        raise InputError(
            f"there is nothing to report: {records_folder} has no seed of size {size} of which all "
            "runs are recorded. Name the folder that `run` has named, or run a recipe."
        )
    text, figures = render(recipes, records, size)
    contents = {out / "results" / name: style.png(figure) for name, figure in figures.items()}
    contents[out / "RESULTS.md"] = text.encode()  # last, so that it never shows what is not there
    (out / "results").mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        write_atomically(path, content)
    return list(contents)


def _glance(recipes: Sequence[Recipe], records: Mapping[str, Sequence[Record]], size: Size) -> str:
    rows: list[list[Cell]] = []
    for recipe in recipes:
        mine = records[recipe.name]
        here = recipe.headline(mine) if mine else "not run yet"
        holds = recipe.holds if mine and size is Size.SMALL else None
        claim = re.split(r"(?<=[.!?])\s+(?=[A-Z])", _flat(recipe.claim))[0]  # the first sentence
        rows.append([recipe.number, f"[{recipe.title}](#{recipe.name})", claim, here, holds])
    headers = ["#", "experiment", "the paper", "here", "holds?"]
    return f"## At a glance\n\n{table(headers, rows)}"


def _told(
    recipe: Recipe, records: Sequence[Record], size: Size, figures: dict[str, Figure]
) -> list[str]:
    """The paragraphs of a recipe that was run; adds its figures."""
    section = recipe.section(records)
    pictures = []
    for name, figure in section.figures.items():
        file = f"{recipe.name}-{name}.png" if name else f"{recipe.name}.png"
        figures[file] = figure
        about = f"{recipe.title}: {name}" if name else recipe.title
        pictures.append(f"![{about}](results/{file})")
    holds = recipe.holds[:1].upper() + recipe.holds[1:]
    verdict = [f"**Holds? {holds}.** {_flat(recipe.verdict)}", f"**Cut.** {_flat(recipe.cut)}"]
    return [
        f"**Here.** {_flat(recipe.headline(records))}",
        section.table,
        *pictures,
        section.notes,
        _costs(records),
        *(verdict if size is Size.SMALL else []),
        f"**Settings.** {_settings(records)}. Run it: `{_command(recipe, size)}`.",
    ]


def _costs(records: Sequence[Record]) -> str:
    """What each method has in parameters, and takes in time."""
    rows = []
    for (method,), own in by(records, "method").items():
        sizes = {one.parameters for one in own if one.parameters is not None}
        if sizes:
            time = duration(median(one.seconds for one in own))
            rows.append([method, _several(sizes), time])
    return table(["", "parameters", "time of a run, median"], rows) if rows else ""


def _settings(records: Sequence[Record]) -> str:
    """What the runs were made with, in brief."""
    trainings = [record.training for record in records if record.training]
    told = {
        "runs": f"{len(records):,}",
        "seeds": f"{len({record.seed for record in records})}",
        "epochs": _several(training["epochs"] for training in trainings),
        "batch": _several(training["batch_size"] for training in trainings),
        "rate": _several(training["rate"] for training in trainings),
    }
    return "; ".join(f"{name} {value}" for name, value in told.items() if value)


def _circumstances(records: Sequence[Record]) -> str:
    """Where all the numbers come from."""
    if not records:
        return ""
    lines = [
        f"{len(records):,} runs took about {duration(_seconds(records))}; a training that several "
        f"runs share counts once. The last run ended {max(one.finished for one in records)}.",
        f"Commit: {_counted(_commit(record) for record in records)}.",
        f"Machine: {_counted(_spelled(record.machine) for record in records)}.",
        f"Versions: {_counted(_spelled(record.versions) for record in records)}.",
    ]
    return "\n".join(["## How it was run", "", *(f"- {line}" for line in lines)])


def _seconds(records: Sequence[Record]) -> float:
    """The time of all runs. Each has that of its training, though the training may be shared."""
    longest: dict[str, float] = {}
    for number, record in enumerate(records):
        key = json.dumps(record.training, sort_keys=True) if record.training else str(number)
        longest[key] = max(record.seconds, longest.get(key, 0))
    return sum(longest.values())


def _commit(record: Record) -> str:
    """The commits that made it: several if a training was resumed, or begun, by another one."""
    several = record.commit.split(", ")
    return ", ".join(c[:12] + " with changes" * c.endswith("+") for c in several)


def _spelled(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _counted(texts: Iterable[str]) -> str:
    """Each text, and how many runs have it if not all do."""
    counts = Counter(texts)
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{text} ({count:,} runs)" for text, count in sorted(counts.items()))


def _several(values: Iterable[float]) -> str:
    """The different values: all of them if they are few, else from the least to the largest.

    >>> _several([256, 64, 64]), _several([1000, 2000, 3000, 4000, 5000]), _several([])
    ('64 / 256', '1,000 to 5,000', '')
    """
    texts = [f"{value:,}" for value in sorted(set(values))]
    return " / ".join(texts) if len(texts) <= 4 else f"{texts[0]} to {texts[-1]}"


def _command(recipe: Recipe, size: Size) -> str:
    return f"python -m experiments run {recipe.name} --size {size}"


def _flat(text: str) -> str:
    return " ".join(text.split())
