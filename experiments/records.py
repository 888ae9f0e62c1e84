"""Records of runs: the measured numbers and everything needed to reproduce them.

Records are stored as JSON lines, one file per recipe.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import setfold
from experiments.recipe import Metrics
from setfold.core.persist import hold, write_atomically
from setfold.errors import FileError

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Circumstances:
    """The code, versions and machine that produced a number.

    Args:
        commit: git commit of the code, with a "+" if there were local changes; "unknown" without
            git. Several commits ("abc, def") if another commit resumed the work.
        versions: versions of Python and the relevant packages.
        machine: processor, device, precision, threads, processes and preloaded libraries.
    """

    commit: str
    versions: dict[str, str]
    machine: dict[str, str | int]

    def then(self, commit: str) -> Circumstances:
        """Add a commit that resumes the work, if it is a different one.

        >>> begun = Circumstances("abc", {}, {})
        >>> begun.then("def").commit, begun.then("abc").commit
        ('abc, def', 'abc')
        """
        commits = dict.fromkeys([*self.commit.split(", "), commit])
        return dataclasses.replace(self, commit=", ".join(commits))


@dataclass(frozen=True)
class Record:
    """The result of a run.

    Args:
        recipe: name of the recipe.
        size: "smoke", "small" or "paper".
        method: name of the method in tables and figures.
        settings: settings that distinguish the run from others of the method.
        seed: seed of the run.
        metrics: measured values.
        history: epoch, loss and validation metric of the training; empty without training.
        training: settings of the training; None without training.
        parameters: number of model parameters; None without a model.
        command: command that reproduces this record.
        commit: commit that trained the model, or that measured if there is no training.
        versions: package versions of the training; see Circumstances.
        machine: machine of the training; see Circumstances.
        seconds: time for training and measuring.
        finished: end of the run, in UTC.
        cpu_seconds: CPU time of the training, validations included; None without training, and in
            records that are older than this field.
    """

    recipe: str
    size: str
    method: str
    settings: dict[str, str | int | float]
    seed: int
    metrics: Metrics
    history: dict[str, list[float]]
    training: dict[str, Any] | None
    parameters: int | None
    command: str
    commit: str
    versions: dict[str, str]
    machine: dict[str, str | int]
    seconds: float
    finished: str
    cpu_seconds: float | None = None

    @property
    def identity(self) -> tuple[str, str, str, int]:
        """Key of the run; a newer record replaces an older one with the same key."""
        return self.size, self.method, json.dumps(self.settings, sort_keys=True), self.seed


def write(record: Record, folder: Path) -> None:
    """Write a record to its recipe's file; it replaces an older record of the same run.

    Safe to call from several processes at the same time.
    """
    with hold(folder / f".{record.recipe}.lock", wait=True):
        records = {old.identity: old for old in read(folder, record.recipe)}
        records[record.identity] = record
        lines = [json.dumps(dataclasses.asdict(kept)) + "\n" for kept in records.values()]
        write_atomically(_path(folder, record.recipe), "".join(lines).encode())


def read(folder: Path, recipe: str) -> list[Record]:
    """Return the records of a recipe; an empty list if the file does not exist."""
    path = _path(folder, recipe)
    if not path.exists():
        return []
    return [
        _record(line, f"{path}, line {number}")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]


def _path(folder: Path, recipe: str) -> Path:
    return folder / f"{recipe}.jsonl"


def _record(line: str, place: str) -> Record:
    try:
        return Record(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise FileError(
            f"{place} is not a valid record ({error}). Remove the line and run the recipe again."
        ) from error


@cache  # this process runs the code from its start, even if there are new commits later
def commit() -> str:
    """Return the git commit, with a "+" if there are local changes; "unknown" without git."""
    try:
        head = _git("rev-parse", "HEAD")
        changes = _git("status", "--porcelain", "--", ".", ":!results", ":!RESULTS.md")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changes else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect the numbers."""
    packages = ("torch", "numpy")
    return {"python": platform.python_version(), "setfold": setfold.__version__} | {
        package: metadata.version(package) for package in packages
    }


def cpu() -> dict[str, str | int]:
    """Return the name of the processor and the number of cores."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": (names or [platform.processor()])[0], "cores": os.cpu_count() or 0}
