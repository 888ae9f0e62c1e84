"""Fold ten million elements streamed, split, shuffled and whole: one answer."""

import os
import sys
from argparse import ArgumentParser
from functools import reduce
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from demo.picture import draw
from demo.processes import run
from demo.ways import WAYS, WRONG, Job, Report, make_encoder
from setfold import SetState

LIMIT = 1e-7  # how far the ways may differ, relative to the largest number of the encoding
CAPTION = """\
difference: relative, from streamed. wall: with drawing the elements. speed: of folding alone. \
memory: peak above start, of one process; to shuffle is to hold the set. One thread per process. \
WRONG: new slots for every chunk, and the chunks' encodings averaged."""


class Rate(ProgressColumn):
    """Millions of elements in a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed / 1e6:.1f} M/s" if speed else "")


def fold_all(size: int, workers: int, out: Path, console: Console) -> dict[str, Report]:
    """Fold in one way after the other, so that each has the machine to itself."""
    results = {}
    columns = (TextColumn("{task.description:10}"), BarColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        for way in (*WAYS, WRONG):
            # One call shows nothing of its progress, so its bar only moves to and fro.
            task = bars.add_task(way, total=None if way == "whole" else size)
            shares = workers if way == "split" else 1
            files = [out / f"{way}-{share}.safetensors" for share in range(shares)]
            jobs = [Job(way, size, share, shares, file) for share, file in enumerate(files)]
            reports = run(jobs, lambda done: bars.update(task, completed=done))  # noqa: B023
            bars.update(task, total=size, completed=size)
            results[way] = reports[0] if way == WRONG else gather(reports, files, size)
    return results


def gather(reports: list[Report], files: list[Path], size: int) -> Report:
    """Merge the states that the processes have written, and read the encoding."""
    state = reduce(SetState.merge, map(SetState.load, files))
    final = {size: make_encoder().readout(state)[0].numpy()}
    readings, chunks, wall, folding, memory = zip(*reports, strict=True)
    return Report(readings[0] | final, sum(chunks), max(wall), max(folding), max(memory))


def table_of(results: dict[str, Report], differences: dict[str, float], size: int) -> Table:
    """The ways side by side."""
    table = Table("way", title=f"{size:,} elements", caption=CAPTION, caption_justify="left")
    for heading in ("chunks", "difference", "wall (s)", "speed (M/s)", "memory (MB)"):
        table.add_column(heading, justify="right")
    for way in WAYS:
        _, chunks, wall, folding, memory = results[way]
        costs = (f"{wall:.1f}", f"{size / folding / 1e6:.1f}", f"{memory / 1e6:.0f}")
        table.add_row(way, f"{chunks:,}", f"{differences[way]:.1e}", *costs)
    table.add_section()
    table.add_row(WRONG, "", f"{differences[WRONG]:.1e}", style="bold")
    return table


@torch.no_grad()
def demonstrate(size: int, workers: int, out: Path) -> str | None:
    """Fold in all ways and show what came of it; what went wrong, if something did."""
    console = Console(highlight=False)
    console.print(f"A set of {size:,} elements, in one process or split over {workers}.\n")
    out.mkdir(parents=True, exist_ok=True)
    results = fold_all(size, workers, out, console)
    streamed = results["streamed"]
    differences = {way: result.distances(streamed)[size] for way, result in results.items()}
    console.print("", table_of(results, differences, size), "")
    console.print("Read while the stream ran, the encoding was this far from the final one:")
    for seen, distance in streamed.distances(streamed).items():
        if str(seen).strip("0") == "1":
            console.print(f"{seen:>12,} elements  {distance:.1e}")
    draw(out / "fold.png", results)
    console.print(f"\n{out / 'fold.png'}", soft_wrap=True)
    apart = [way for way in WAYS if not differences[way] <= LIMIT]  # so that NaN is far away
    return f"failed: not within {LIMIT:g} of streamed: {', '.join(apart)}." if apart else None


def main() -> str | None:
    """Read the command line and run the demo; what went wrong, if something did."""
    parser = ArgumentParser(prog="python -m demo", description=__doc__)
    workers = max(2, min(4, os.cpu_count() or 1))
    parser.add_argument("--elements", type=int, default=10_000_000, help="size of the set")
    parser.add_argument("--workers", type=int, default=workers, help="processes to split it over")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the picture")
    given = parser.parse_args()
    if given.elements < 1000 or given.workers < 1:
        parser.error("--elements must be 1000 or more, --workers 1 or more.")
    try:
        return demonstrate(given.elements, given.workers, given.out)
    except (KeyboardInterrupt, ChildProcessError) as error:
        return f"stopped. {error}".strip()


if __name__ == "__main__":
    sys.exit(main())
