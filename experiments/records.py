"""What a run leaves behind: its numbers, and all that is needed to get them again.

Records are JSON lines, one file for each recipe.
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
from setfold.core.locks import hold
from setfold.core.persist import write_atomically
from setfold.errors import FileError

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Circumstances:
    """In what a number came about.

    Args:
        commit: of the code; with a "+" if it had been changed since, "unknown" without git. Several
            if other code went on with the work: "abc, def".
        versions: of Python and of what matters among the packages.
        machine: processor, device, precision, threads and processes.
    """

    commit: str
    versions: dict[str, str]
    machine: dict[str, str | int]

    def then(self, commit: str) -> Circumstances:
        """Those of work that goes on with the code of a commit, if it is another.

        >>> begun = Circumstances("abc", {}, {})
        >>> begun.then("def").commit, begun.then("abc").commit
        ('abc, def', 'abc')
        """
        commits = dict.fromkeys([*self.commit.split(", "), commit])
        return dataclasses.replace(self, commit=", ".join(commits))


@dataclass(frozen=True)
class Record:
    """What a run leaves behind.

    Args:
        recipe: its name.
        size: "smoke", "small" or "paper".
        method: as tables and figures name it.
        settings: what distinguishes the run from others of the method.
        seed: of the run.
        metrics: what was measured.
        history: epoch, loss and validation metric of the training; empty without one.
        training: settings of the training, None without one.
        parameters: of the model, None without one.
        command: makes this record again.
        commit: of the code that trained, or that measured where nothing is trained.
        versions: at the same time; see Circumstances.
        machine: at the same time.
        seconds: that training and measuring took.
        finished: when, in UTC.
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

    @property
    def identity(self) -> tuple[str, str, str, int]:
        """What it is a record of; of two with the same identity the newer one counts."""
        return self.size, self.method, json.dumps(self.settings, sort_keys=True), self.seed


def write(record: Record, folder: Path) -> None:
    """Put a record into its recipe's file, in place of an older one of the same run.

    Other processes may do the same at the same time.
    """
    with hold(folder / f".{record.recipe}.lock", wait=True):
        records = {old.identity: old for old in read(folder, record.recipe)}
        records[record.identity] = record
        lines = [json.dumps(dataclasses.asdict(kept)) + "\n" for kept in records.values()]
        write_atomically(_path(folder, record.recipe), "".join(lines).encode())


def read(folder: Path, recipe: str) -> list[Record]:
    """The records of a recipe, none if there is no file."""
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
            f"{place} is no record ({error}). Remove the line and run the recipe again."
        ) from error


@cache  # the code that runs is that of the beginning, whatever is committed meanwhile
def commit() -> str:
    """The commit of the code; with a "+" if it was changed since, "unknown" without git."""
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
    """Of Python and of the packages that numbers may depend on."""
    packages = ("torch", "numpy", "lightning-fabric")
    return {"python": platform.python_version(), "setfold": setfold.__version__} | {
        package: metadata.version(package) for package in packages
    }


def cpu() -> dict[str, str | int]:
    """The processor, and how many cores it shows."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": (names or [platform.processor()])[0], "cores": os.cpu_count() or 0}
