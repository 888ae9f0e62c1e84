"""Ten million elements, folded streamed, split, shuffled and whole: one answer."""

from functools import partial, reduce
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from demo import processes
from demo.sheet import Sheet
from demo.ways import WAYS, WRONG, Report, Share, average_wrongly, fold, make_encoder
from setfold import SetState

LIMIT = 1e-7  # how far the ways may differ, relative to the largest number of the encoding
CAPTION = """\
difference: relative, from streamed. wall: with drawing the elements. speed: of folding alone. \
memory: peak above start, of one process; to shuffle is to hold the set. One thread per process. \
WRONG: new slots for every chunk, and the chunks' encodings averaged."""


class Folded(NamedTuple):
    """What came of all ways."""

    size: int
    results: dict[str, Report]

    @property
    def differences(self) -> dict[str, float]:
        """How far each way's encoding is from the stream's, relatively."""
        streamed = self.results["streamed"]
        return {way: one.distances(streamed)[self.size] for way, one in self.results.items()}

    @property
    def approach(self) -> dict[int, float]:
        """How far the encoding was from the final one while the stream ran, by elements seen."""
        streamed = self.results["streamed"]
        powers = (seen for seen in streamed.readings if str(seen).strip("0") == "1")
        distances = streamed.distances(streamed)
        return {seen: distances[seen] for seen in powers}

    def failure(self) -> str | None:
        """What went wrong, if something did."""
        differences = self.differences
        apart = [way for way in WAYS if not differences[way] <= LIMIT]  # so that NaN is far away
        return f"failed: not within {LIMIT:g} of streamed: {', '.join(apart)}." if apart else None

    def sheet(self) -> Sheet:
        """The ways side by side."""
        rows = []
        for way in WAYS:
            _, chunks, wall, folding, memory = self.results[way]
            costs = [f"{wall:.1f}", f"{self.size / folding / 1e6:.1f}", f"{memory / 1e6:.0f}"]
            rows.append([way, f"{chunks:,}", f"{self.differences[way]:.1e}", *costs])
        rows.append([WRONG, "", f"{self.differences[WRONG]:.1e}", "", "", ""])
        headings = ["way", "chunks", "difference", "wall (s)", "speed (M/s)", "memory (MB)"]
        return Sheet(f"{self.size:,} elements", headings, rows, CAPTION)


class Rate(ProgressColumn):
    """Millions of elements in a second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed / 1e6:.1f} M/s" if speed else "")


def fold_all(size: int, workers: int, out: Path, console: Console) -> Folded:
    """Fold in one way after the other, so that each has the machine to itself."""
    results = {}
    columns = (TextColumn("{task.description:10}"), BarColumn(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        for way in (*WAYS, WRONG):
            # One call shows nothing of its progress, so its bar only moves to and fro.
            task = bars.add_task(way, total=None if way == "whole" else size)
            count = workers if way == "split" else 1
            files = [out / f"{way}-{number}.safetensors" for number in range(count)]
            shares = [Share(way, size, number, count, file) for number, file in enumerate(files)]
            jobs = [partial(average_wrongly if way == WRONG else fold, share) for share in shares]
            reports = processes.run(jobs, lambda done: bars.update(task, completed=sum(done)))  # noqa: B023
            bars.update(task, total=size, completed=size)
            results[way] = reports[0] if way == WRONG else gather(reports, files, size)
    return Folded(size, results)


@torch.no_grad()
def gather(reports: list[Report], files: list[Path], size: int) -> Report:
    """Merge the states that the processes have written, and read the encoding."""
    state = reduce(SetState.merge, map(SetState.load, files))
    final = {size: make_encoder().readout(state)[0].numpy()}
    readings, chunks, wall, folding, memory = zip(*reports, strict=True)
    return Report(readings[0] | final, sum(chunks), max(wall), max(folding), max(memory))
