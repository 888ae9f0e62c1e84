"""All encoders compared: which fold, in how many passes, and which cannot."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from setfold.core.primitives import SetEncoder
from setfold.laws.gallery import CHUNK, DIM_IN, EXHIBITS, Exhibit
from setfold.laws.law import difference
from setfold.laws.laws import LAWS
from setfold.laws.report import CONSISTENCY_LAW, FAILS, HOLDS, NOT_APPLICABLE, Report
from setfold.laws.wrong_way import ChunkAverage, PublishedSlotSetEncoder

ELEMENTS = 64  # in a set that is encoded in chunks and averaged
SETS = 8
MARKS = {HOLDS: "✓", FAILS: "✗", NOT_APPLICABLE: "·"}
LAW_NAMES = (*(law.name for law in LAWS), CONSISTENCY_LAW)
WIDTH = 150  # columns of the table as text


@dataclass(frozen=True)
class Entry:
    """The results for one encoder.

    Attributes:
        name: the name of the row.
        report: the results for each law.
        chunk_average: the relative error of encoding chunks and averaging. For a deliberately wrong
            encoder, the error of what it does with chunks.
        obstacle: why one pass is not enough; empty if it is.
        wrong: whether the encoder is wrong on purpose.
    """

    name: str
    report: Report
    chunk_average: float
    obstacle: str
    wrong: bool = False

    @property
    def verdict(self) -> str:
        """Whether and in how many passes the encoder folds."""
        if self.report.folds:
            passes = self.report.passes or 1
            return "folds in one pass" if passes == 1 else f"folds in {passes} passes"
        if self._mark(CONSISTENCY_LAW) == MARKS[HOLDS]:
            return "chunks combine"
        return "cannot be folded"

    @property
    def as_claimed(self) -> bool:
        """Whether the encoder behaves as its attribute `passes` says."""
        if self.wrong:
            return True
        if self.report.passes is not None:
            return self.report.folds
        return self.report.broken == (CONSISTENCY_LAW,)

    @property
    def marks(self) -> str:
        """One mark for each law, in the order of LAW_NAMES."""
        return "".join(map(self._mark, LAW_NAMES))

    @property
    def fold_error(self) -> float | None:
        """The largest relative error of a fold against the whole set in float64."""
        found = [f for f in self.report.findings if f.law == "any partition"]
        return found[0].errors.get("float64") if found else None

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of the table."""
        error = "" if self.fold_error is None else f"{self.fold_error:.1e}"
        average = f"{self.chunk_average:.1e}"
        return self.name, self.verdict, self.marks, error, average, self.obstacle

    def _mark(self, law: str) -> str:
        verdicts = [f.verdict for f in self.report.findings if f.law == law]
        return MARKS[verdicts[0] if verdicts else NOT_APPLICABLE]

    def as_dict(self) -> dict[str, Any]:
        """The entry as a dict that json.dumps accepts."""
        return {
            "encoder": self.name,
            "verdict": self.verdict,
            "as_claimed": self.as_claimed,
            "chunk_average": self.chunk_average,
            "obstacle": self.obstacle,
            "report": self.report.as_dict(),
        }


@dataclass(frozen=True)
class Survey:
    """The results for all encoders; prints as a table."""

    entries: tuple[Entry, ...]

    @property
    def passed(self) -> bool:
        """Whether every encoder behaves as its attribute `passes` says."""
        return all(entry.as_claimed for entry in self.entries)

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        """The survey as a dict that json.dumps accepts."""
        return {"passed": self.passed, "encoders": [entry.as_dict() for entry in self.entries]}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDTH
        table = Table(title=self._title(), title_justify="left", title_style="bold")
        table.add_column("encoder", no_wrap=wide, overflow="fold")
        table.add_column("verdict", no_wrap=True)
        table.add_column("laws", no_wrap=True)
        table.add_column("fold", justify="right", no_wrap=True)
        table.add_column("chunk + average", justify="right", no_wrap=wide, overflow="fold")
        if wide:
            table.add_column("why not in one pass")
        for entry in self.entries:
            row = entry.row if wide else entry.row[:-1]
            table.add_row(*row, style="" if entry.as_claimed else "bold red")
        yield table
        if not wide:
            yield from (f"{e.name}: {e.obstacle}." for e in self.entries if e.obstacle)
        numbered = "  ".join(f"{i} {name}" for i, name in enumerate(LAW_NAMES, start=1))
        marks = "  ".join(f"{mark} {verdict}" for verdict, mark in MARKS.items())
        yield f"laws, from left to right: {numbered}"
        yield (
            f"{marks}; fold: the largest relative error of a fold over any chunks, in float64; "
            f"chunk + average: the relative error of encoding {ELEMENTS} elements in chunks of "
            f"{CHUNK} and averaging (in rows that start with WRONG: of what they do with chunks)."
        )

    def _title(self) -> str:
        wrong = [entry.name for entry in self.entries if not entry.as_claimed]
        if not wrong:
            return "Every encoder behaves as documented."
        return f"Not as documented: {', '.join(wrong)}."

    def __str__(self) -> str:
        buffer = io.StringIO()
        Console(file=buffer, width=WIDTH, color_system=None).print(self)
        return buffer.getvalue()


def compare(
    check: Callable[..., Report], progress: Callable[[int, int, str], None], **options: Any
) -> Survey:
    """Check every exhibit.

    Args:
        check: `setfold.check`.
        progress: a callback, called with the number of encoders done, the total number, and the
            name of the next one.
        options: keyword arguments of `check`.
    """
    entries = []
    for number, exhibit in enumerate(EXHIBITS):
        progress(number, len(EXHIBITS), exhibit.name)
        entries.append(examine(exhibit, check, **options))
    progress(len(EXHIBITS), len(EXHIBITS), "")
    return Survey(tuple(entries))


def examine(exhibit: Exhibit, check: Callable[..., Report], **options: Any) -> Entry:
    """Check one exhibit; see `compare`."""
    with torch.random.fork_rng(devices=[]):
        # the name, not the place: another row in the gallery must not change the other rows
        name = hashlib.blake2b(exhibit.name.encode(), digest_size=4).digest()
        torch.manual_seed(int.from_bytes(name))
        encoder = exhibit.make().eval()
        report = check(encoder, DIM_IN, **options)
        average = chunking_error(encoder)
    obstacle = getattr(encoder, "obstacle", "")
    return Entry(exhibit.name, report, average, obstacle, exhibit.wrong)


def chunking_error(encoder: SetEncoder) -> float:
    """The relative error of encoding chunks and averaging, compared with the whole set.

    A deliberately wrong encoder is compared with the encoder that it wraps instead.
    """
    right: Any = encoder.double()
    wrong: SetEncoder = ChunkAverage(right, CHUNK)
    if isinstance(right, ChunkAverage | PublishedSlotSetEncoder):
        wrong, right = right, right.encoder
    elements = torch.randn(SETS, ELEMENTS, DIM_IN, dtype=torch.float64)
    with torch.no_grad():
        return difference(wrong(elements), right(elements))
