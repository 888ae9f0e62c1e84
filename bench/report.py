"""Report the results as tables in the terminal, Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Literal, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from bench.aggregations import AGGREGATIONS, FIRST, GROUP_NOTES, LAYOUTS
from bench.encoders import ENCODER_NOTES, ENCODERS
from bench.files import FILES_NOTES, READING, SHAPE
from bench.folds import passes
from bench.frames import FRAMES_NOTES, KERNEL
from bench.gradients import GRADIENT_NOTES, MODELS, Model
from bench.instructions import INSTRUCTION_NOTES, contenders
from bench.live import LIVE_NOTES, RAW, REWRITING
from bench.machine import described
from bench.memory import BESIDE_PEERS
from bench.peers import NOTES, OURS, PEERS
from bench.plan import FOLD_CHUNK, GRAPH_LIMIT, NARROW, ROWS_PER_GROUP, SHAPES, power
from bench.results import (
    TITLES,
    TORCH_KERNELS,
    Cell,
    MemoryCase,
    Results,
    StepCost,
    Target,
    Way,
    pass_name,
)
from bench.roofline import ROOFLINE_NOTES

Facts = dict[str, object]
Row = tuple[str, ...]
NOTHING = "–"
TOO_MUCH = f"> {GRAPH_LIMIT / 1e3:.0f} GB"
TARGET = "target"
DETAIL = "in detail"
TARGET_HEADING = (TARGET, "(d, K, d_out)", "measured", "wanted", "verdict")
WRAPPED = (TARGET, DETAIL)
NARROW_TERMINAL = 120  # columns; narrower terminals do not show the details
METHOD = """\
Times are CPU times of one thread after warm-up. The compared modules run in turn, and a ratio is
the median over rounds of the ratios within a round. Backward computes the gradients of the weights.
Speeds are multiples: 2× is twice as fast. If a target has several values, the worst counts. The
allocator keeps freed memory, so that no module waits for new pages after warm-up; the peers, which
allocate more than setfold, profit from it most. Memory is the peak of a process above its memory
with the input, after warm-up, with an allocator that returns large freed blocks, so that only used
memory counts."""


class Sheet(NamedTuple):
    """A table; alignment has one letter (l or r) per column."""

    title: str
    heading: Row
    rows: list[Row]
    alignment: str


def write(results: Results, facts: Facts, pictures: dict[str, str], directory: Path) -> list[str]:
    """Write results.json and benchmark.md; returns their names.

    Args:
        results: all measurements.
        facts: about the machine and the run.
        pictures: captions by file name.
        directory: folder for both files.
    """
    found = {
        "about": {**facts, "memory recycled": results.recycling},
        "targets": [target.described() for target in results.targets],
        "peers": [cell.described() for cell in results.cells],
        "instruction sets": [cell.described() for cell in results.instruction_sets],
        "rooflines": [roofline.described() for roofline in results.rooflines],
        "encoders": [cell.described() for cell in results.encoder_cells],
        "folds": [cost.described() for cost in results.folds],
        "files": [cost.described() for cost in results.files],
        "frames": [cost.described() for cost in results.frames],
        "groups": [cost.described() for cost in results.groups],
        "live sets": [cost.described() for cost in results.live],
        "live sets, per second of one core": dict(results.rates),
        "live sets, service": None if results.load is None else results.load.described(),
        "training steps": [cost.described() for cost in results.training_steps],
        "memory": [
            {**case._asdict(), "megabytes": megabytes} for case, megabytes in results.memory.items()
        ],
        "omissions": results.omissions,
        "steps, seconds": results.durations,
    }
    (directory / "results.json").write_text(json.dumps(found, indent=2) + "\n")
    (directory / "benchmark.md").write_text(_markdown(results, facts, pictures))
    return ["results.json", "benchmark.md"]


def show(results: Results, facts: Facts, console: Console) -> None:
    """Print all tables, with the targets last."""
    tables = (
        *peer_tables(results),
        *kernel_tables(results),
        *roofline_tables(results),
        *encoder_tables(results),
        *gradient_tables(results),
        *file_tables(results),
        *frame_tables(results),
        *group_tables(results),
        *live_tables(results),
    )
    for sheet in (*tables, target_sheet(results)):
        console.print(_drawn(sheet, console.width))
    for omission in results.omissions:
        console.print(omission, highlight=False)
    console.print(described(facts), highlight=False)
    console.print(_tally(results.targets), highlight=False)


# ---- the tables ----------------------------------------------------------------------------------


def target_sheet(results: Results) -> Sheet:
    """List the targets and their results, grouped by title."""
    heading = (*TARGET_HEADING, DETAIL)
    rows: list[Row] = []
    for number, title in TITLES.items():
        mine = [target for target in results.targets if target.number == number]
        if mine:
            rows.append((f"{number}. {title}",))
            rows += [_target_row(target) for target in mine]
    return Sheet("Targets", heading, rows, "llrrll")


def _target_row(target: Target) -> Row:
    shape = "" if target.shape is None else str(target.shape)
    verdict = "holds" if target.holds else "DOES NOT HOLD"
    return target.claim, shape, target.shown, target.wanted, verdict, target.detail


def _tally(targets: list[Target]) -> str:
    held = sum(target.holds for target in targets)
    return f"{held} of {len(targets)} targets hold on this CPU."


def peer_tables(results: Results) -> Iterator[Sheet]:
    """Make tables of the Slot Set Encoder and its peers: time, and memory if measured."""
    if not results.cells:
        return
    yield from time_sheets("Time", results.cells, PEERS)
    if results.memory:
        yield peer_memory_sheet(results)


def kernel_tables(results: Results) -> Iterator[Sheet]:
    """Make the table of instruction sets: time of torch kernels, and speeds relative to it."""
    if not results.instruction_sets:
        return
    names = list(contenders())
    rows: list[Row] = []
    for cell in results.instruction_sets:
        took = f"{cell.timings.seconds(TORCH_KERNELS) * 1e3:.3g} ms"
        speeds = (f"{cell.timings.ratio(TORCH_KERNELS, name):.2f}×" for name in names)
        rows.append((str(cell.shape), pass_name(cell.backward), took, *speeds))
    length = power(results.instruction_sets[0].length)
    title = f"Speed of {OURS} / its speed with {TORCH_KERNELS}, n = {length}"
    heading = ("(d, K, d_out)", "pass", f"{TORCH_KERNELS} took", *names)
    yield Sheet(title, heading, rows, "llr" + "r" * len(names))


def roofline_tables(results: Results) -> Iterator[Sheet]:
    """Make the table of arithmetic and reading, as shares of the limits of the core."""
    rows: list[Row] = []
    for found in results.rooflines:
        rows.append(
            (
                str(found.shape),
                pass_name(found.backward),
                f"{found.length:,}",
                f"{found.operations / found.seconds / 1e9:.1f}",
                f"{found.peak_operations / 1e9:.1f}",
                f"{found.arithmetic_share:.0%}",
                f"{found.bytes_read / found.seconds / 1e9:.2f}",
                f"{found.peak_bytes / 1e9:.2f}",
                f"{found.reading_share:.0%}",
            )
        )
    if rows:
        heading = (
            "(d, K, d_out)",
            "pass",
            "n",
            "GFLOP/s",
            "peak",
            "share",
            "GB/s",
            "peak",
            "share",
        )
        yield Sheet(f"Arithmetic and reading of {OURS}", heading, rows, "llrrrrrrr")


def encoder_tables(results: Results) -> Iterator[Sheet]:
    """Make tables of every encoder: time, folds, and memory if measured."""
    if not results.encoder_cells:
        return
    yield from time_sheets("Time of every encoder", results.encoder_cells, ENCODERS)
    yield fold_sheet(results)
    if results.memory:
        yield from encoder_memory_sheets(results)


def gradient_tables(results: Results) -> Iterator[Sheet]:
    """Make tables of training steps: time and memory of each model."""
    for model in MODELS:
        costs = [cost for cost in results.training_steps if cost.model == model.title]
        if costs:
            yield step_time_sheet(model, costs)
            yield step_memory_sheet(results, model)


def file_tables(results: Results) -> Iterator[Sheet]:
    """Make tables of sets in files: time per element, ratio to reading alone, and memory."""
    for cost in results.files:
        rows: list[Row] = []
        for name in cost.timings.samples:
            nanoseconds = cost.timings.seconds(name) / cost.rows * 1e9
            memory = f"{cost.megabytes[name]:,.0f}"
            known = READING in cost.timings.samples
            ratio = f"{cost.timings.ratio(name, READING):.2f}×" if known else NOTHING
            rows.append((name, f"{nanoseconds:.0f}", ratio, memory))
        title = (
            f"CPU time and peak memory, {power(cost.rows)} elements in {cost.files} files, {SHAPE}"
        )
        yield Sheet(title, ("", "ns / element", f"/ {READING}", "MB"), rows, "lrrr")


def frame_tables(results: Results) -> Iterator[Sheet]:
    """Make the table of sets in data frames: time per element, and ratio to the kernel."""
    for cost in results.frames:
        rows: list[Row] = []
        for name in cost.timings.samples:
            nanoseconds = cost.timings.seconds(name) / cost.rows * 1e9
            rows.append((name, f"{nanoseconds:.0f}", f"{cost.timings.ratio(name, KERNEL):.2f}×"))
        title = f"CPU time of encode_frame, {power(cost.rows)} elements, {SHAPE}"
        yield Sheet(title, ("", "ns / element", f"/ {KERNEL}"), rows, "lrr")


def group_tables(results: Results) -> Iterator[Sheet]:
    """Make the table of aggregations: time relative to the first, and memory or what padding needs."""
    if not results.groups:
        return
    groups = results.plan.groups
    rows = groups * ROWS_PER_GROUP
    table: list[Row] = []
    for name, found in AGGREGATIONS.items():
        row = [name]
        for cost in results.groups:
            known = name in cost.timings.samples
            row.append(f"{cost.timings.ratio(name, FIRST):.2f}" if known else NOTHING)
        for layout, sizes in LAYOUTS.items():
            case, least = MemoryCase(name, layout, rows), found.padding(sizes(groups))
            known, fits = case in results.memory, found.bears(sizes(groups))
            needed = f"{results.memory[case]:,.0f}" if known else NOTHING
            row.append(needed if fits else f"> {least:,.0f}")
        table.append(tuple(row))
    took = (f"{cost.timings.seconds(FIRST) * 1e3:.3g} ms" for cost in results.groups)
    table.append((f"{FIRST} took", *took, NOTHING, NOTHING))
    times = (f"{'f+b' if c.backward else 'f'} {c.layout.split()[0]}" for c in results.groups)
    heading = ("", *times, *(f"MB {layout.split()[0]}" for layout in LAYOUTS))
    title = f"Time of aggregations / {FIRST}'s, and peak memory, {rows:,} rows, {groups:,} groups"
    yield Sheet(title, heading, table, "l" + "r" * (len(heading) - 1))


def live_tables(results: Results) -> Iterator[Sheet]:
    """Make the tables of live sets: batches, the work of a core, and the service."""
    for cost in results.live:
        rows: list[Row] = []
        for name in cost.wall.samples:
            took, used = cost.wall.seconds(name) * 1e3, cost.cpu.seconds(name) * 1e3
            speed = "" if name == REWRITING else f"{cost.wall.ratio(RAW, name):.2f}×"
            rate = f"{cost.touched / cost.wall.seconds(name):,.0f}"
            rows.append((name, f"{took:,.1f}", f"{used:,.1f}", rate, speed or NOTHING))
        title = f"Batches of {cost.touched:,} sets, {power(cost.kept)} sets kept in {cost.database}"
        yield Sheet(title, ("", "ms", "CPU ms", "sets/s", f"/ {RAW}"), rows, "lrrrr")
    if results.rates:
        rows = [(what, f"{rate:,.0f}") for what, rate in results.rates]
        yield Sheet("Work of one core", ("", "per second"), rows, "lr")
    if results.load is not None:
        found = results.load
        rows = [
            ("updates per second", f"{found.rate:,.0f}"),
            ("median time of an update, ms", f"{1e3 * median(found.updates):.1f}"),
            ("CPU time of an update, µs", f"{1e6 * found.service_cpu / len(found.updates):.0f}"),
            ("median time of a read by one client, ms", f"{1e3 * median(found.reads):.2f}"),
            ("memory before, MB", f"{found.before:.0f}"),
            ("memory after, MB", f"{found.after:.0f}"),
        ]
        title = f"The service, updates of one element, {found.clients} clients"
        yield Sheet(title, ("", ""), rows, "lr")


def time_sheets(what: str, cells: list[Cell], names: Iterable[str]) -> Iterator[Sheet]:
    """Make a table of time ratios for each shape, with setfold's time in the last row."""
    for shape in SHAPES:
        mine = sorted(
            (cell for cell in cells if cell.shape == shape),
            key=lambda cell: (cell.backward, cell.length),
        )
        heading = ("n", *(cell.column for cell in mine))
        rows = [(name, *(_ratio(cell, name) for cell in mine)) for name in names]
        times = (f"{cell.timings.seconds(OURS) * 1e3:.3g} ms" for cell in mine)
        title = f"{what} / {OURS}'s time, (d, K, d_out) = {shape}"
        yield Sheet(title, heading, [*rows, (f"{OURS} took", *times)], "l" + "r" * len(mine))


def _ratio(cell: Cell, name: str) -> str:
    if name not in cell.timings.samples:
        return NOTHING
    return f"{cell.timings.ratio(name, OURS):.2f}"


def fold_sheet(results: Results) -> Sheet:
    """Make the table of the time of folds, relative to one call on the whole set."""
    rows: list[Row] = []
    for cost in results.folds:
        row = [cost.name, str(cost.passes)]
        for timings in (cost.forward, cost.training):
            row.append(f"{timings.seconds('whole') * 1e3:.3g} ms")
            row.append(f"{timings.ratio('fold', 'whole'):.2f}×")
        rows.append(tuple(row))
    length, chunk = power(max(results.plan.lengths)), power(FOLD_CHUNK)
    title = f"Time of one call, and ratio for a fold in chunks of {chunk}, n = {length}, {NARROW}"
    return Sheet(title, ("", "passes", "f", "f fold", "f+b", "f+b fold"), rows, "lrrrrr")


def step_time_sheet(model: Model, costs: list[StepCost]) -> Sheet:
    """Make the table of the time of training steps, and the ratio to exact gradients."""
    heading = [title for cost in costs for title in (f"n = {power(cost.length)}", "/ exact")]
    rows = [
        (label, *(cell for cost in costs for cell in _step_time(cost, label)))
        for label in model.lines
    ]
    title = f"CPU time of one training step, {model.title}, {NARROW}"
    return Sheet(title, ("", *heading), rows, "l" + "r" * len(heading))


def _step_time(cost: StepCost, label: str) -> tuple[str, str]:
    if label not in cost.timings.samples:
        return NOTHING, NOTHING
    seconds, ratio = cost.timings.seconds(label), cost.timings.ratio(label, Way.EXACT)
    took = f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
    return took, f"{ratio:.2f}×"


def step_memory_sheet(results: Results, model: Model) -> Sheet:
    """Make the table of the peak memory of training steps, above the set where it is in memory."""
    lengths = results.plan.gradient_lengths
    cases = {
        label: [MemoryCase(name, way, n) for n in lengths]
        for label, (name, way) in model.lines.items()
    }
    title = f"Peak memory of one training step above the input, MB, {model.title}, {NARROW}"
    return _memory_sheet(results, title, [power(n) for n in lengths], cases, TOO_MUCH)


def peer_memory_sheet(results: Results) -> Sheet:
    """Make the table of peak memory of the Slot Set Encoder and its peers."""
    lengths = results.plan.memory_lengths
    cases = {
        label: [MemoryCase(name, way, n) for n in lengths]
        for label, (name, way) in BESIDE_PEERS.items()
    }
    title = f"Peak memory above the input, MB, {NARROW}"
    return _memory_sheet(results, title, [power(n) for n in lengths], cases)


def encoder_memory_sheets(results: Results) -> Iterator[Sheet]:
    """Make the tables of peak memory of every encoder: whole sets, and folds."""
    plan = results.plan
    whole = [("f+b", Way.WHOLE, n) for n in plan.encoder_memory_lengths]
    folds = {"f": Way.STREAMED, "f+b": Way.TRAINED}
    folded = [(doing, way, n) for doing, way in folds.items() for n in plan.fold_lengths]
    for seen, names, columns in (
        ("of whole sets", ENCODERS, whole),
        (f"of folds in chunks of {power(FOLD_CHUNK)}", passes(), folded),
    ):
        heading = [f"{doing} {power(n)}" for doing, _, n in columns]
        cases = {name: [MemoryCase(name, way, n) for _, way, n in columns] for name in names}
        yield _memory_sheet(results, f"Peak memory {seen}, MB, {NARROW}", heading, cases)


def _memory_sheet(
    results: Results,
    title: str,
    columns: list[str],
    cases: dict[str, list[MemoryCase]],
    unmeasured_whole: str = NOTHING,
) -> Sheet:
    def cell(case: MemoryCase) -> str:
        otherwise = unmeasured_whole if case.way is Way.WHOLE else NOTHING
        return f"{results.memory[case]:.1f}" if case in results.memory else otherwise

    rows = [(label, *map(cell, mine)) for label, mine in cases.items()]
    return Sheet(title, ("n", *columns), rows, "l" + "r" * len(columns))


# ---- output --------------------------------------------------------------------------------------


def _drawn(sheet: Sheet, width: int) -> Table:
    table = Table(title=sheet.title, title_justify="left", box=box.SIMPLE_HEAD)
    detailed = width >= NARROW_TERMINAL or DETAIL not in sheet.heading
    shown = len(sheet.heading) - (not detailed)
    for name, letter in list(zip(sheet.heading, sheet.alignment, strict=True))[:shown]:
        justify: Literal["left", "right"] = "right" if letter == "r" else "left"
        table.add_column(name, justify=justify, no_wrap=name not in WRAPPED)
    for row in sheet.rows:
        if len(row) == 1:  # a heading between rows
            table.add_section()
            table.add_row(f"[bold]{row[0]}[/bold]")
        else:
            style = (
                "bold" if row[0] in (OURS, Way.EXACT) else "red" if "DOES NOT HOLD" in row else None
            )
            table.add_row(*row[:shown], style=style)
    return table


def _markdown(results: Results, facts: Facts, pictures: dict[str, str]) -> str:
    commit = facts["commit"] or "unknown"
    lines = ["# Benchmark of setfold and its peers", "", _wrapped(f"{described(facts)}.")]
    lines += ["", METHOD, ""]
    run = f"`{facts['command']}`, {facts['date']}, commit {commit}, {facts['minutes']} minutes."
    lines += [_wrapped(run), ""]
    lines += ["## Targets", "", _tally(results.targets), "", *_github(target_sheet(results))]
    lines += [
        "",
        *map(_wrapped, results.omissions),
        "Columns: f is forward, f+b is forward+backward.",
    ]
    lines += _chapter("The Slot Set Encoder and its peers", peer_tables(results), NOTES)
    lines += _chapter("Instruction sets", kernel_tables(results), INSTRUCTION_NOTES)
    lines += _chapter("Limits of the core", roofline_tables(results), ROOFLINE_NOTES)
    lines += _chapter("Every encoder", encoder_tables(results), ENCODER_NOTES)
    lines += _chapter("Gradients of sets that do not fit", gradient_tables(results), GRADIENT_NOTES)
    lines += _chapter("Sets in files", file_tables(results), FILES_NOTES)
    lines += _chapter("Sets in data frames", frame_tables(results), FRAMES_NOTES)
    lines += _chapter("Groups of rows in graphs", group_tables(results), GROUP_NOTES)
    lines += _chapter("Live sets", live_tables(results), LIVE_NOTES)
    lines += ["", "## Pictures"] if pictures else []
    for file, caption in pictures.items():
        lines += ["", f"![{caption}]({file})"]
    return "\n".join(lines) + "\n"


def _chapter(title: str, sheets: Iterable[Sheet], notes: tuple[str, ...]) -> list[str]:
    lines = []
    for sheet in sheets:
        lines += [f"### {sheet.title}", "", *_github(sheet), ""]
    if not lines:
        return []
    return ["", f"## {title}", "", *lines, *(_wrapped(f"- {note}", "  ") for note in notes)]


def _wrapped(text: str, indent: str = "") -> str:
    return fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _github(sheet: Sheet) -> list[str]:
    rule = tuple("---:" if letter == "r" else "---" for letter in sheet.alignment)
    missing = len(rule) - 1
    rows = [row if len(row) > 1 else (f"**{row[0]}**", *[""] * missing) for row in sheet.rows]
    return [f"| {' | '.join(cells)} |" for cells in (sheet.heading, rule, *rows)]
