"""Run recipes: train, measure, record.

Several processes can run the same recipes at once. Each takes the next run that no other process is
working on, so starting a command twice halves the time.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from experiments import records
from experiments.processes import circumstances, hold_together, launch
from experiments.progress import duration
from experiments.recipe import Recipe, Run, Size, as_json
from experiments.records import Record
from experiments.training import ASK_EVERY, BusyError, Trained, train
from setfold import SetfoldError
from setfold.learning.seeds import Draw, seed_for


@dataclass(frozen=True)
class Options:
    """Options for running recipes.

    Args:
        out: folder for trainings and records.
        device: "auto", "cpu", "cuda" or "mps".
        precision: "32-true" or "bf16-mixed".
        threads: number of CPU threads of torch; None for torch's default.
        again: repeat measurements that are already recorded; finished trainings are reused.
    """

    out: Path
    device: str = "auto"
    precision: str = "32-true"
    threads: int | None = None
    again: bool = False


@dataclass(frozen=True)
class _Job:
    """A run of a recipe, with one size and seed."""

    recipe: Recipe
    size: Size
    seed: int
    run: Run

    def __str__(self) -> str:
        settings = "".join(f", {name} {value}" for name, value in self.run.settings.items())
        return f"{self.recipe.name}: {self.run.method}{settings}, seed {self.seed}"

    @property
    def key(self) -> str:
        """Name of the lock file."""
        parts = [self.recipe.name, self.size, self.run.method, dict(self.run.settings), self.seed]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def training(self) -> Any:
        """Settings of the training as they appear in a record."""
        return as_json(self.run.training)

    def recorded_by(self, record: Record) -> bool:
        """Return whether a record belongs to this run with the same training."""
        return (record.size, record.method, record.settings, record.seed, record.training) == (
            self.size,
            self.run.method,
            self.run.settings,
            self.seed,
            self.training,
        )


def run(
    recipes: Sequence[Recipe],
    size: Size,
    seeds: Sequence[int] | None = None,
    *,
    options: Options,
    console: Console | None = None,
) -> list[str]:
    """Run recipes; skips runs that are already recorded.

    Args:
        recipes: recipes to run.
        size: size of the runs.
        seeds: seeds to run; None for all seeds of the recipe at this size.
        options: how to run them.
        console: console for progress; None for the default.

    Returns:
        Error messages, each once with the runs that failed. A failed run does not stop the others.
    """
    jobs = [
        _Job(recipe, size, seed, run)
        for recipe in recipes
        for seed in (range(recipe.seeds[size]) if seeds is None else seeds)
        for run in recipe.runs(size, seed)
    ]
    return _Runner(jobs, options.out / "records" / size, options, console).run()


class _Runner:
    """Processes jobs until each is recorded or has failed."""

    def __init__(
        self, jobs: list[_Job], folder: Path, options: Options, console: Console | None
    ) -> None:
        self.jobs, self.folder, self.options = jobs, folder, options
        place = launch(options.device, options.precision, options.threads)
        self.processes = place.processes
        self.console = (console or Console()) if place.processes.first else Console(quiet=True)
        self.began, self.started = _now(), time.monotonic()
        self.announced: set[str] = set()
        self.failures: dict[str, list[_Job]] = {}  # failed jobs by error message
        self.to_do = self._left()
        self.here = circumstances(place)

    def run(self) -> list[str]:
        """Run all jobs; retries those that other processes are working on."""
        left = self.jobs
        while left:
            later = [job for job in left if not self._settle(job)]
            if len(later) == len(left):
                time.sleep(ASK_EVERY)
            left = later
        return [f"{_describe(jobs)}: {error}" for error, jobs in self.failures.items()]

    def _settle(self, job: _Job) -> bool:
        """Run a job unless it is recorded; returns False if another process works on it."""
        lock = self.options.out / "running" / f"{job.key}.lock"
        with hold_together(self.processes, lock) as held:
            if not held:
                return False
            if self.processes.from_first(self._is_recorded(job)):
                return True
            self._announce(job)
            try:
                self._work(job)
            except BusyError:
                return False
            except (SetfoldError, OSError) as error:
                if self.processes.size > 1:  # the other processes are still in this run
                    raise
                self._fail(job, str(error))
            return True

    def _fail(self, job: _Job, error: str) -> None:
        """Collect a failure; an error that several runs share is printed in full only once."""
        known = self.failures.setdefault(error, [])
        text = f"same error as {known[0]}" if known else error
        self.console.print(f"failed: {text}", soft_wrap=True, markup=False)
        known.append(job)

    def _is_recorded(self, job: _Job) -> bool:
        return any(
            job.recorded_by(record)
            for record in records.read(self.folder, job.recipe.name)
            if not self.options.again or record.finished >= self.began
        )

    def _left(self) -> int:
        failed = {job.key for jobs in self.failures.values() for job in jobs}
        return sum(job.key not in failed and not self._is_recorded(job) for job in self.jobs)

    def _announce(self, job: _Job) -> None:
        if job.key in self.announced:
            return
        self.announced.add(job.key)
        left = self._left()
        line = f"[{len(self.jobs) - left + 1} of {len(self.jobs)}] {job}"
        done = self.to_do - left - sum(map(len, self.failures.values()))
        if done:  # by all processes that share the work
            pace = (time.monotonic() - self.started) / done
            line += f" (about {duration(pace * left)} left for all runs)"
        self.console.print(line, soft_wrap=True, markup=False)

    def _work(self, job: _Job) -> None:
        options, trained = self.options, None
        if job.run.training is not None:
            trained = train(
                job.run.training,
                out=options.out,
                device=options.device,
                precision=options.precision,
                threads=options.threads,
                console=self.console,
                wait=False,
            )
        if self.processes.first:
            records.write(self._measure(job, trained), self.folder)
        self.processes.from_first()  # all wait for the measurement

    def _measure(self, job: _Job, trained: Trained | None) -> Record:
        started = time.monotonic()
        torch.manual_seed(seed_for(Draw.MEASUREMENT, job.seed))
        model = None if trained is None else trained.model
        made = self.here if trained is None else trained.circumstances
        with torch.no_grad():
            metrics = job.run.measure(model)
        return Record(
            recipe=job.recipe.name,
            size=job.size,
            method=job.run.method,
            settings=dict(job.run.settings),
            seed=job.seed,
            metrics=metrics,
            history={} if trained is None else trained.history,
            training=job.training,
            parameters=None if model is None else sum(p.numel() for p in model.parameters()),
            command=self._command(job, made.machine["processes"]),
            commit=made.commit,
            versions=made.versions,
            machine=made.machine,
            seconds=time.monotonic() - started + (0 if trained is None else trained.seconds),
            finished=_now(),
            cpu_seconds=None if trained is None else trained.cpu_seconds,
        )

    def _command(self, job: _Job, processes: str | int) -> str:
        start = "python" if processes == 1 else f"torchrun --nproc-per-node {processes}"
        command = f"{start} -m experiments run {job.recipe.name} --size {job.size}"
        command += f" --seed {job.seed}"
        for name in ("device", "precision"):
            value = getattr(self.options, name)
            if value != getattr(Options, name):
                command += f" --{name} {value}"
        return command


def _describe(jobs: Sequence[_Job]) -> str:
    """Describe jobs in a few words."""
    return str(jobs[0]) if len(jobs) == 1 else f"{len(jobs)} runs, first {jobs[0]}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
