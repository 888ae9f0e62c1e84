"""The results as tables in the terminal, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from bench.machine import described
from bench.peers import NOTES, OURS, PEERS
from bench.plan import NARROW, SHAPES, power
from bench.results import TITLES, Cell, Results, Target

Facts = dict[str, object]
Row = tuple[str, ...]
NOTHING = "–"
TARGET = "target"
DETAIL = "in detail"
TARGET_HEADING = (TARGET, "(d, K, d_out)", "measured", "wanted", "verdict", "default allocator")
WRAPPED = (TARGET, DETAIL)
NARROW_TERMINAL = 120  # columns; below, details are left to the files
METHOD = (
    "CPU time of one thread after warm-up; contenders take turns, and a ratio is the median over "
    "rounds of quotients within a round. Backward computes the gradients of the weights. Speeds "
    "are multiples: 2× is twice as fast. Where several values were taken, the worst one counts. The "
    "allocator was told to keep what is freed, so that after warm-up nobody waits for new pages; "
    "where it matters, the value with glibc's default is given too, which depends on what the "
    "process did before."
)


class Sheet(NamedTuple):
    """A table before it is drawn; alignment is one letter, l or r, per column."""

    title: str
    heading: Row
    rows: list[Row]
    alignment: str


def write(results: Results, facts: Facts, directory: Path) -> None:
    """Write results.json and table.md."""
    directory.mkdir(parents=True, exist_ok=True)
    found = {
        "about": {**facts, "memory recycled": results.recycling},
        "targets": [target.described() for target in results.targets],
        "peers": [cell.described() for cell in results.cells],
        "memory": [{**asdict(point), "median": point.megabytes} for point in results.memory],
    }
    (directory / "results.json").write_text(json.dumps(found, indent=2) + "\n")
    (directory / "table.md").write_text(_markdown(results, facts))


def show(results: Results, facts: Facts, console: Console) -> None:
    """Print everything as tables, the targets last."""
    for sheet in (*peer_sheets(results.cells), *memory_sheets(results), target_sheet(results)):
        console.print(_drawn(sheet, console.width))
    console.print(described(facts), highlight=False)
    console.print(_tally(results.targets), highlight=False)


# ---- the tables ----------------------------------------------------------------------------------


def target_sheet(results: Results) -> Sheet:
    """Promises and what became of them, under the titles that they belong to."""
    heading = (*TARGET_HEADING, DETAIL)
    rows: list[Row] = []
    for number, title in TITLES.items():
        mine = [target for target in results.targets if target.number == number]
        if mine:
            rows.append((f"{number}. {title}",))
            rows += [_target_row(target) for target in mine]
    return Sheet("Targets", heading, rows, "llrrlrl")


def _target_row(target: Target) -> Row:
    shape = "" if target.shape is None else str(target.shape)
    verdict = "holds" if target.holds else "DOES NOT HOLD"
    return (
        target.claim,
        shape,
        target.shown,
        target.wanted,
        verdict,
        target.shown_by_default,
        target.detail,
    )


def _tally(targets: list[Target]) -> str:
    held = sum(target.holds for target in targets)
    return f"{held} of {len(targets)} targets hold on this CPU."


def peer_sheets(cells: list[Cell]) -> Iterator[Sheet]:
    """For each shape, the peers by n; setfold's own time in the last row."""
    for shape in SHAPES:
        mine = sorted(
            (cell for cell in cells if cell.shape == shape),
            key=lambda cell: (cell.backward, cell.length),
        )
        heading = ("n", *(f"{'f+b' if c.backward else 'f'} {power(c.length)}" for c in mine))
        rows = [(name, *(_ratio(cell, name) for cell in mine)) for name in PEERS]
        times = (f"{cell.timings.seconds(OURS) * 1e3:.3g} ms" for cell in mine)
        title = f"Time / {OURS}'s time, (d, K, d_out) = {shape}"
        yield Sheet(title, heading, [*rows, (f"{OURS} took", *times)], "l" + "r" * len(mine))


def _ratio(cell: Cell, name: str) -> str:
    if name not in cell.timings.samples:
        return NOTHING
    return f"{cell.timings.ratio(name, OURS):.2f}"


def memory_sheets(results: Results) -> Iterator[Sheet]:
    """Peak memory by n, if it was measured."""
    if not results.memory:
        return
    lengths = sorted({point.length for point in results.memory})
    found = {(point.name, point.length): f"{point.megabytes:.1f}" for point in results.memory}
    names = dict.fromkeys(point.name for point in results.memory)
    rows = [(name, *(found.get((name, n), NOTHING) for n in lengths)) for name in names]
    heading = ("n", *(power(n) for n in lengths))
    title = f"Peak memory above the input, MB, {NARROW}"
    yield Sheet(title, heading, rows, "l" + "r" * len(lengths))


# ---- how they are drawn --------------------------------------------------------------------------


def _drawn(sheet: Sheet, width: int) -> Table:
    table = Table(title=sheet.title, title_justify="left", box=box.SIMPLE_HEAD)
    detailed = width >= NARROW_TERMINAL or DETAIL not in sheet.heading
    shown = len(sheet.heading) - (not detailed)
    for name, letter in list(zip(sheet.heading, sheet.alignment, strict=True))[:shown]:
        justify: Literal["left", "right"] = "right" if letter == "r" else "left"
        table.add_column(name, justify=justify, no_wrap=name not in WRAPPED)
    for row in sheet.rows:
        if len(row) == 1:  # a title among the rows
            table.add_section()
            table.add_row(f"[bold]{row[0]}[/bold]")
        else:
            style = "bold" if row[0] == OURS else "red" if "DOES NOT HOLD" in row else None
            table.add_row(*row[:shown], style=style)
    return table


def _markdown(results: Results, facts: Facts) -> str:
    commit = facts["commit"] or "unknown"
    lines = ["# setfold beside its peers", "", f"{described(facts)}.", METHOD, ""]
    lines += [f"`{facts['command']}`, {facts['date']}, commit {commit}.", ""]
    lines += ["## Targets", "", _tally(results.targets), "", *_github(target_sheet(results))]
    lines += ["", "## Peers", "", "f is forward, f+b is forward+backward.", ""]
    for sheet in peer_sheets(results.cells):
        lines += [f"### {sheet.title}", "", *_github(sheet), ""]
    lines += [f"- {note}" for note in NOTES]
    for sheet in memory_sheets(results):
        lines += ["", f"## {sheet.title}", "", *_github(sheet)]
    return "\n".join(lines) + "\n"


def _github(sheet: Sheet) -> list[str]:
    rule = tuple("---:" if letter == "r" else "---" for letter in sheet.alignment)
    missing = len(rule) - 1
    rows = [row if len(row) > 1 else (f"**{row[0]}**", *[""] * missing) for row in sheet.rows]
    return [f"| {' | '.join(cells)} |" for cells in (sheet.heading, rule, *rows)]
