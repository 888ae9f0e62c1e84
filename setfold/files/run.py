"""Run a plan: read, merge and write, with checkpoints on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from setfold.core.encoder import StreamingSetEncoder
from setfold.core.persist import replace_durably, sync
from setfold.errors import FileError, InputError, NonFiniteError, SetfoldError
from setfold.files.budget import current_memory, peak_memory
from setfold.files.columns import stored_type
from setfold.files.engines.task import Shard, Skipped, Step, Task
from setfold.files.journal import START_OVER, WorkFolder
from setfold.files.outputs import Sink, split_ids
from setfold.files.plan import Plan
from setfold.files.results import read_totals
from setfold.files.tables.absorb import blames_elements, find_finite, find_marks, reason_of
from setfold.files.tables.arrow import RESULT
from setfold.files.tables.sorted_runs import (
    COPIES,
    merge_sorted_runs,
    read_sorted_run,
    write_sorted_run,
)
from setfold.files.tables.spill import BUCKETS
from setfold.files.tables.store import Store
from setfold.files.tables.table import StateTable, read_out
from setfold.files.work_folder import publish_outputs, report_of

NOT_FINITE = "its {} is not finite: its elements are too large together"

Engine = Callable[[Task, Sequence[Shard], int, int], Generator[Step, None, None]]


class Progress(NamedTuple):
    """Progress of a run, for callbacks."""

    phase: str  # "reading", "merging" or "writing"
    done: float  # out of `total`: bytes, buckets or sets
    total: float
    elements: int
    seconds: float  # since the phase began in this process
    memory: int  # resident memory in bytes
    resumed_at: float = 0.0  # the value of `done` when this process began

    @property
    def rate(self) -> float:
        """By how much `done` grows per second."""
        return (self.done - self.resumed_at) / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated time until the phase ends; None if there is no estimate yet."""
        if not self.resumed_at < self.done <= self.total:
            return None
        return (self.total - self.done) / self.rate if self.rate else None


@dataclass(frozen=True)
class Summary:
    """Statistics of a complete run.

    Args:
        sets: Number of sets in the first output.
        elements: Number of elements in those sets.
        skipped: Number of rows, files and sets that were skipped.
        seconds: Duration of the run, including the time before it was interrupted.
        bytes_read: Size of the inputs.
        spills: How often tables were spilled to disk.
        bytes_spilled: How many bytes were spilled.
        peak_memory: Peak memory of this process in bytes.
        out: The files that were written.
        report: The file that lists what was skipped; None if nothing was.
        outside: Number of elements outside the grids of the model, which were clamped or dropped;
            None if the model has no grid, or if the outputs were complete before.
        was_complete: Whether the outputs were complete before. Nothing was computed, so `seconds`
            and `spills` are 0.
        features: The features of an element, as for --features; empty if no rows were read.
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
    outside: int | None = None
    was_complete: bool = False
    features: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """Elements per second."""
        return self.elements / self.seconds if self.seconds else 0.0


class Output(NamedTuple):
    """A file to write, with encodings or with states."""

    path: Path
    sink: type[Sink]
    holds_states: bool
    metadata: Mapping[bytes, bytes] = {}
    digest: str = ""  # of everything that determines the content


class Run:
    """Executes a plan.

    Args:
        plan: What to read.
        work: The work folder, for checkpoints and temporary files.
        engine: The function that computes the steps.
        outputs: What to write.
        progress: Callback that is called after every step.
    """

    def __init__(
        self,
        plan: Plan,
        work: WorkFolder,
        engine: Engine,
        outputs: Sequence[Output],
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.plan, self.work, self.engine, self.outputs = plan, work, engine, outputs
        self.progress = progress
        self.encoder: StreamingSetEncoder = plan.task.encoder
        self.journal = work.open_journal(plan.signature())
        self.store = Store(
            self.encoder,
            work.spill_folder,
            plan.budget.store_bytes,
            on_spill=self.journal.count_spill,
        )
        self.seconds_before, self.read_before = self.journal.seconds, self.journal.read
        self.started = self.phase_started = time.monotonic()

    def run(self) -> Summary:
        """Execute the plan, or the rest of it if an interrupted run is resumed."""
        if self.journal.buckets is None:
            self.work.restore(self.store)
            self._read()
        self._write(self._tables())
        return replace(publish(self.work), features=self.plan.features)

    @property
    def _id_types(self) -> list[pa.DataType]:
        """The types of the columns of a set id, if it has several."""
        return [kind for _, kind in self.plan.task.columns.id_fields]

    # ---- read ----------------------------------------------------------------------------------

    def _read(self) -> None:
        journal, shards = self.journal, self.plan.shards
        if not journal.shard and not journal.rows and not journal.skipped:
            self.work.log_skipped(self.plan.skipped)
            journal.skipped = len(self.plan.skipped)
        ends = list(accumulate(shard.bytes for shard in shards))
        # Closed before an error is handled, so that no thread of the engine outlives the run.
        with closing(self.engine(self.plan.task, shards, journal.shard, journal.rows)) as steps:
            for step in steps:
                for table in step.tables:
                    for output in self.outputs:
                        types = () if output.holds_states else self._id_types
                        output.sink.check_ids(table.sets, types)
                    self.store.add(table)
                self.work.log_skipped(step.skipped)
                shard = shards[step.shard]
                share = step.rows / (shard.stop - shard.start) if shard.stop is not None else 0.5
                journal.count_step(step, ends[step.shard] - shard.bytes * (1 - min(share, 1.0)))
                if self.work.is_save_due():
                    self._save(self.store)
                self._report_progress("reading", journal.read, self.plan.bytes)
        journal.read = ends[-1] if ends else 0.0

    def _save(self, store: Store | None = None) -> None:
        self.journal.seconds = self.seconds_before + time.monotonic() - self.started
        self.work.save(store)

    # ---- merge ---------------------------------------------------------------------------------

    def _tables(self) -> Iterator[StateTable]:
        """Yield the states of all sets, sorted by set id."""
        if self.journal.buckets is None and self.store.fits():
            yield from self.store.drain()
        else:
            self._merge()
            folder = self.work.runs_folder
            runs = [read_sorted_run(folder / name) for name in self.journal.sorted_runs]
            yield from merge_sorted_runs(runs)

    def _merge(self) -> None:
        """Merge bucket by bucket, until each is a sorted run on disk."""
        journal, store = self.journal, self.store
        self.phase_started = time.monotonic()
        if journal.buckets is None:
            journal.buckets = store.close()
            journal.lengths = store.lengths()
            store.sync()
            journal.snapshot = None
            self._save()
        total = len(journal.buckets)
        while journal.buckets:
            bucket = journal.buckets[0]
            journal.sorted_runs.append(f"{bucket:02d}.run")
            self._merge_bucket(bucket, self.work.runs_folder / journal.sorted_runs[-1])
            journal.buckets.pop(0)
            self._save()
            store.drop_bucket(bucket)  # after the checkpoint, which no longer needs it
            self._report_progress("merging", total - len(journal.buckets), total)

    def _merge_bucket(self, bucket: int, path: Path) -> None:
        """Write a bucket as one sorted run. A bucket that was split again has several parts."""
        parts, set_bytes, window = [], 1, self.store.budget // (COPIES * BUCKETS)
        for number, table in enumerate(self.store.drain_bucket(bucket, self.journal.lengths)):
            parts.append(path.with_suffix(f".{number}"))
            set_bytes = max(set_bytes, table.nbytes // len(table))
            rows = max(1, window // set_bytes)
            write_sorted_run(parts[-1], [table], rows)
        if not parts:
            raise FileError(f"bucket {bucket} has no tables. {START_OVER}")
        if len(parts) == 1:
            replace_durably(parts[0], path)
            return
        write_sorted_run(path, merge_sorted_runs([read_sorted_run(part) for part in parts]), rows)
        sync(path)
        sync(path.parent)
        for part in parts:
            part.unlink()

    # ---- write ---------------------------------------------------------------------------------

    def _write(self, tables: Iterator[StateTable]) -> None:
        journal, folder = self.journal, self.work.folder
        names = {f"output-{number}": output for number, output in enumerate(self.outputs)}
        for name in names:  # left by an interrupted run, which may still have it open
            (folder / name).unlink(missing_ok=True)
        sinks = {
            name: o.sink(folder / name, {**o.metadata, RESULT: o.digest.encode()})
            for name, o in names.items()
        }
        fields = self.plan.task.columns.id_fields
        sets = dict.fromkeys(names, 0)
        elements = dict.fromkeys(names, 0)
        journal.outside = None
        self.phase_started = time.monotonic()
        for table in _ensure_one(tables, self.plan.set_type, self.encoder):
            table = self._without_overflows(table)
            if (outside := table.outside) is not None:
                journal.outside = (journal.outside or 0) + outside
            for name, output in names.items():
                for part in table.parts() if output.holds_states else self._read_out(table):
                    sinks[name].write(part if output.holds_states else split_ids(part, fields))
                    sets[name] += len(part)
                    elements[name] += int(np.sum(part["count"].to_numpy()))
            self._report_progress("writing", max(sets.values()), 0)
        for name, sink in sinks.items():
            sink.close()
            sync(folder / name)
        first = next(iter(names))
        journal.sets, journal.elements = sets[first], elements[first]
        journal.outputs = {name: str(output.path) for name, output in names.items()}
        journal.digests = {name: sink.result for name, sink in sinks.items()}
        self._save()

    def _without_overflows(self, table: StateTable) -> StateTable:
        """Return the sets whose states are finite."""
        marks = find_marks(table)
        if not marks.any():
            return table
        self._leave_out(table.sets.filter(pa.array(marks)), NOT_FINITE.format("state"))
        return table.take(np.flatnonzero(~marks))

    def _read_out(self, table: StateTable) -> Iterator[pa.Table]:
        """Yield the encodings of all sets, except those that are not finite or cannot be computed."""
        for part in self._encodings(table):
            finite = find_finite(part)
            if not finite.all():
                self._leave_out(
                    part["set"].filter(pa.array(~finite)), NOT_FINITE.format("encoding")
                )
                part = part.filter(pa.array(finite))
            yield part

    def _encodings(self, table: StateTable) -> Iterator[pa.Table]:
        """Yield the encodings of all sets, except those for which the model raises an error."""
        done = 0
        try:
            for part in read_out(self.encoder, table, self.plan.task.threads):
                done += len(part)
                yield part
        except Exception as error:  # a head may contain any code
            rest = np.arange(done, len(table))
            if not (blames_elements(error) and len(rest)):
                raise
            if len(rest) == 1:
                advice = "Correct the head of the model"
                self._leave_out(table.sets.slice(done), reason_of(error), advice, InputError)
                rest = rest[:0]  # so that the output has its columns even if no set is left
            for half in np.array_split(rest, min(len(rest), 2) or 1):
                yield from self._encodings(table.take(half))

    def _leave_out(
        self,
        sets: pa.Array | pa.ChunkedArray,
        reason: str,
        advice: str = "Scale the features, compute in float64",
        kind: type[SetfoldError] = NonFiniteError,
    ) -> None:
        """List sets that are not written, or raise an error that names the first one."""
        show = self.plan.task.columns.show_id
        if not self.plan.task.skip:
            raise kind(
                f"the set {show(sets[0])} cannot be written: {reason}. {advice}, or leave out such sets "
                "with --on-error skip --restart."
            )
        self.work.log_skipped([Skipped(None, None, reason, show(name)) for name in sets])
        self.journal.skipped += len(sets)

    def _report_progress(self, phase: str, done: float, total: float) -> None:
        if self.progress is not None:
            seconds = time.monotonic() - self.phase_started
            resumed_at = self.read_before if phase == "reading" else 0.0
            elements, memory = self.journal.elements, current_memory()
            self.progress(Progress(phase, done, total, elements, seconds, memory, resumed_at))


def publish(work: WorkFolder) -> Summary:
    """Move complete outputs to their final names, and return the summary of the run."""
    journal = work.journal
    assert journal is not None
    report = publish_outputs(work)
    return Summary(
        journal.sets,
        journal.elements,
        journal.skipped,
        journal.seconds,
        round(journal.read),
        journal.spills,
        journal.bytes_spilled,
        peak_memory(),
        tuple(journal.outputs.values()),
        report,
        journal.outside,
    )


def summarize_complete(plan: Plan, outputs: Sequence[Output]) -> Summary:
    """Return the summary of outputs that an earlier run has completed.

    Raises:
        FileError: One of them is damaged.
    """
    (sets, elements), *_ = [read_totals(output.path) for output in outputs]
    report = report_of(outputs[0].path)
    skipped = len(report.read_bytes().splitlines()) if report.exists() else 0
    return Summary(
        sets,
        elements,
        skipped,
        0.0,
        plan.bytes,
        0,
        0,
        peak_memory(),
        tuple(str(output.path) for output in outputs),
        str(report) if skipped else None,
        was_complete=True,
        features=plan.features,
    )


def _ensure_one(
    tables: Iterator[StateTable], set_type: pa.DataType, encoder: StreamingSetEncoder
) -> Iterator[StateTable]:
    """Yield the tables, or one empty table, so that an empty output still has its columns."""
    first: Any = next(tables, None)
    yield first or StateTable.of_state(
        pa.array([], stored_type(set_type)), encoder.initial_state(0)
    )
    yield from tables
