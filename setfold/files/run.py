"""Run: read, merge, write out. What is done is written down now and then, so that it can go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from setfold.core.encoder import StreamingSetEncoder
from setfold.files import budget as memory
from setfold.files.engines.task import Piece, Step, Task
from setfold.files.journal import Work
from setfold.files.outputs import Sink
from setfold.files.plan import Plan
from setfold.files.tables.runs import COPIES, in_order, read_run, write_run
from setfold.files.tables.spill import BUCKETS
from setfold.files.tables.store import Store
from setfold.files.tables.table import StateTable, read_out

Engine = Callable[[Task, Sequence[Piece], int, int], Iterator[Step]]


class Progress(NamedTuple):
    """How far a run is."""

    doing: str  # "reading", "merging" or "writing"
    done: float  # of `total`: bytes, buckets or sets
    total: float
    elements: int
    seconds: float  # of this process
    memory: int  # bytes, now
    begun: float = 0.0  # what was done before this process

    @property
    def rate(self) -> float:
        """How much of `done` is done in a second."""
        return (self.done - self.begun) / self.seconds if self.seconds else 0.0

    @property
    def left(self) -> float | None:
        """Seconds that what it is doing will still take; None where that cannot be told yet."""
        if not self.begun < self.done <= self.total:
            return None
        return (self.total - self.done) / self.rate if self.rate else None


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Args:
        sets: in the output.
        elements: that they are made of.
        skipped: rows and files that were left out.
        seconds: that it took, all its parts together.
        bytes_read: of the inputs.
        spills: how often memory was emptied to disk.
        bytes_spilled: that went there.
        peak_memory: the most bytes that this process has had.
        out: the files that were written.
        report: the file that lists what was left out; None if nothing was.
    """

    sets: int
    elements: int
    skipped: int
    seconds: float
    bytes_read: int
    spills: int
    bytes_spilled: int
    peak_memory: int
    out: tuple[str, ...]
    report: str | None

    @property
    def rate(self) -> float:
        """Elements in a second."""
        return self.elements / self.seconds if self.seconds else 0.0


class Output(NamedTuple):
    """A file to be written: of encodings, or of states."""

    path: Path
    sink: type[Sink]
    states: bool
    metadata: Mapping[bytes, bytes] | None = None


class Run:
    """A plan being carried out.

    Args:
        plan: what to do.
        work: where to keep what is needed to go on.
        engine: what computes the steps.
        outputs: what to write.
        progress: is told how far it is, after every step.
    """

    def __init__(
        self,
        plan: Plan,
        work: Work,
        engine: Engine,
        outputs: Sequence[Output],
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.plan, self.work, self.engine, self.outputs = plan, work, engine, outputs
        self.progress = progress
        self.encoder: StreamingSetEncoder = plan.task.encoder
        self.store = Store(self.encoder, work.spill, plan.division.budget)
        self.journal = work.begin(plan.job())
        self.before, self.begun = self.journal.seconds, self.journal.read
        self.started = self.phase_started = time.monotonic()

    def run(self) -> Summary:
        """Do what is left to do."""
        if self.journal.buckets is None:
            self.work.restore(self.store)
            self._read()
        self._write(self._tables())
        return published(self.work)

    # ---- read ----------------------------------------------------------------------------------

    def _read(self) -> None:
        journal, pieces = self.journal, self.plan.pieces
        if not journal.piece and not journal.rows and not journal.skipped:
            self.work.note(self.plan.skipped)
            journal.skipped = len(self.plan.skipped)
        ends = _running([piece.bytes for piece in pieces])
        for step in self.engine(self.plan.task, pieces, journal.piece, journal.rows):
            for table in step.tables:
                self.store.add(table)
            self.work.note(step.skipped)
            piece = pieces[step.piece]
            share = step.rows / (piece.stop - piece.start) if piece.stop is not None else 0.5
            journal.count(step, ends[step.piece] - piece.bytes * (1 - min(share, 1.0)))
            if self.work.is_due():
                self._save(self.store)
            self._tell("reading", journal.read, self.plan.bytes)
        journal.read = ends[-1] if ends else 0.0

    def _save(self, store: Store | None = None) -> None:
        self.journal.seconds = self.before + time.monotonic() - self.started
        self.work.save(store)

    # ---- merge ---------------------------------------------------------------------------------

    def _tables(self) -> Iterator[StateTable]:
        """All sets in the order of their names."""
        journal = self.journal
        if journal.buckets is None and self.store.fits():
            yield from self.store.drain()
        else:
            self._merge()
            folder = self.work.folder / "runs"
            yield from in_order([read_run(folder / name) for name in journal.runs])
        journal.spills, journal.spilled = self.store.spills, self.store.spilled

    def _merge(self) -> None:
        """Bucket by bucket, until all are sorted runs on disk."""
        journal, store = self.journal, self.store
        self.phase_started = time.monotonic()
        if journal.buckets is None:
            journal.buckets = store.close()
            journal.memory, journal.spills, journal.spilled = None, store.spills, store.spilled
            self._save()
        store.spills, store.spilled = journal.spills, journal.spilled
        total = len(journal.buckets)
        while journal.buckets:
            bucket = journal.buckets[0]
            journal.runs.append(f"{bucket:02d}.run")
            self._complete(bucket, self.work.folder / "runs" / journal.runs[-1])
            journal.buckets.pop(0)
            journal.spills, journal.spilled = store.spills, store.spilled
            self._save()
            store.drop_bucket(bucket)  # only now: before, a kill would have lost it
            self._tell("merging", total - len(journal.buckets), total)

    def _complete(self, bucket: int, path: Path) -> None:
        """Make one run of a bucket, of several if it had to be divided again."""
        parts, each, window = [], 1, self.store.budget // (COPIES * BUCKETS)
        for number, table in enumerate(self.store.drain_bucket(bucket)):
            parts.append(path.with_suffix(f".{number}"))
            each = max(each, table.nbytes // len(table))
            rows = max(1, window // each)
            write_run(parts[-1], [table], rows)
        if len(parts) == 1:
            parts[0].replace(path)
            return
        write_run(path, in_order([read_run(part) for part in parts]), rows)
        for part in parts:
            part.unlink()

    # ---- write ---------------------------------------------------------------------------------

    def _write(self, tables: Iterator[StateTable]) -> None:
        journal, folder = self.journal, self.work.folder
        names = {f"output-{number}": output for number, output in enumerate(self.outputs)}
        sinks = {name: o.sink(folder / name, o.metadata) for name, o in names.items()}
        journal.sets = 0
        self.phase_started = time.monotonic()
        for table in _or_empty(tables, self.plan.set_type, self.encoder):
            for name, output in names.items():
                for part in table.parts() if output.states else read_out(self.encoder, table):
                    sinks[name].write(part)
            journal.sets += len(table)
            self._tell("writing", journal.sets, 0)
        for sink in sinks.values():
            sink.close()
        journal.publish = {name: str(output.path.resolve()) for name, output in names.items()}
        self._save()

    def _tell(self, doing: str, done: float, total: float) -> None:
        if self.progress is not None:
            seconds = time.monotonic() - self.phase_started
            begun = self.begun if doing == "reading" else 0.0
            elements = self.journal.elements
            self.progress(Progress(doing, done, total, elements, seconds, memory.used(), begun))


def published(work: Work) -> Summary:
    """Give complete outputs their names; the end of a run, or of one that was killed just before."""
    journal = work.journal
    assert journal is not None
    work.publish()
    return Summary(
        journal.sets,
        journal.elements,
        journal.skipped,
        journal.seconds,
        round(journal.read),
        journal.spills,
        journal.spilled,
        memory.peak(),
        tuple(journal.publish.values()),
        work.report(),
    )


def _running(sizes: Sequence[float]) -> list[float]:
    """The sums of the first one, two, ... sizes."""
    total, found = 0.0, []
    for size in sizes:
        total += size
        found.append(total)
    return found


def _or_empty(
    tables: Iterator[StateTable], kind: pa.DataType, encoder: StreamingSetEncoder
) -> Iterator[StateTable]:
    """The tables, or one without sets: an output has its columns even if nothing is in it."""
    first: Any = next(tables, None)
    yield first or StateTable(pa.array([], kind), encoder.initial_state(0))
    yield from tables
