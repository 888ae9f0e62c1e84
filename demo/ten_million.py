"""Fold ten million elements streamed, split, shuffled and whole, and compare the encodings."""

from functools import partial, reduce
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from demo import processes
from demo.sheet import Sheet
from demo.ways import WAYS, WRONG, Report, Share, average_wrongly, fold, make_encoder
from setfold import SetState

LIMIT = 1e-7  # largest difference of the ways, relative to the largest number of the encoding
NOTES = {
    "streamed": "one process reads the set in chunks and keeps only the state.",
    "split": "several processes each stream a part of the set; their states are merged.",
    "shuffled": "random order, in chunks of 1 to 100,000 elements; shuffling needs the whole set "
    "in memory.",
    "whole": "one call on the whole set.",
    "WRONG": "draws new random slots for each chunk and averages the encodings of the chunks.",
    "chunks": "number of chunks that were folded.",
    "difference": "largest difference to the streamed encoding, relative to its largest number.",
    "wall": "elapsed time, including the generation of the elements.",
    "speed": "million elements per second, for folding alone, with one thread per process.",
    "memory": "peak memory of one process above its memory at the start.",
}


class Folded(NamedTuple):
    """Results of all ways to fold the set."""

    size: int
    results: dict[str, Report]

    @property
    def differences(self) -> dict[str, float]:
        """Relative difference of each way's encoding to the streamed one."""
        streamed = self.results["streamed"]
        return {way: one.distances(streamed)[self.size] for way, one in self.results.items()}

    @property
    def approach(self) -> dict[int, float]:
        """Relative difference to the final encoding while streaming, by elements seen."""
        streamed = self.results["streamed"]
        powers = (seen for seen in streamed.readings if str(seen).strip("0") == "1")
        distances = streamed.distances(streamed)
        return {seen: distances[seen] for seen in powers}

    def failure(self) -> str | None:
        """Return an error message if the encodings differ, else None."""
        differences = self.differences
        apart = [
            way for way in WAYS if not differences[way] <= LIMIT
        ]  # `not <=`, so that NaN fails
        return (
            f"failed: differs from streamed by more than {LIMIT:g}: {', '.join(apart)}."
            if apart
            else None
        )

    def sheet(self) -> Sheet:
        """Make the table of all ways."""
        rows = []
        for way in WAYS:
            _, chunks, wall, folding, memory = self.results[way]
            costs = [f"{wall:.1f}", f"{self.size / folding / 1e6:.1f}", f"{memory / 1e6:.0f}"]
            rows.append([way, f"{chunks:,}", f"{self.differences[way]:.1e}", *costs])
        rows.append([WRONG, "", f"{self.differences[WRONG]:.1e}", "", "", ""])
        headings = ["way", "chunks", "difference", "wall (s)", "speed (M/s)", "memory (MB)"]
        return Sheet(f"{self.size:,} elements", headings, rows, NOTES)


class Rate(ProgressColumn):
    """Progress column: million elements per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed / 1e6:.1f} M/s" if speed else "")


def fold_all(size: int, workers: int, out: Path, console: Console) -> Folded:
    """Fold in one way after the other, so that they do not compete for the machine."""
    results = {}
    columns = (TextColumn("{task.description:10}"), BarColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        for way in (*WAYS, WRONG):
            # One call reports no progress, so its bar is indeterminate.
            task = bars.add_task(way, total=None if way == "whole" else size)
            count = workers if way == "split" else 1
            files = [out / f"{way}-{number}.safetensors" for number in range(count)]
            shares = [Share(way, size, number, count, file) for number, file in enumerate(files)]
            jobs = [partial(average_wrongly if way == WRONG else fold, share) for share in shares]
            show = partial(_show, bars, task)
            reports = processes.run(jobs, show)
            bars.update(task, total=size, completed=size)
            results[way] = reports[0] if way == WRONG else gather(reports, files, size)
    return Folded(size, results)


def _show(bars: Progress, task: TaskID, done: list[int]) -> None:
    bars.update(task, completed=sum(done))


@torch.no_grad()
def gather(reports: list[Report], files: list[Path], size: int) -> Report:
    """Merge the states that the processes wrote, and read the encoding."""
    state = reduce(SetState.merge, map(SetState.load, files))
    final = {size: make_encoder().readout(state)[0].numpy()}
    readings, chunks, wall, folding, memory = zip(*reports, strict=True)
    return Report(readings[0] | final, sum(chunks), max(wall), max(folding), max(memory))
