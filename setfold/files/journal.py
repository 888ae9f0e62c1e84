"""The work folder next to the output: checkpoints, and everything a resumed run needs.

lock         locked while a run uses the folder
journal      progress of the run: a small JSON file that is replaced atomically
snapshot-N   the tables that were in memory when the journal was written
spill/       tables that did not fit in memory
runs/        sorted runs: parts of the result that are complete
output-N     complete outputs, until they are moved to their final names
skipped      skipped rows, files and sets, one line of JSON each

What a journal refers to is on the disk before the journal is, and nothing is removed before the
journal that no longer needs it is on the disk. So a run can be resumed after a power loss.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setfold.core.persist import checksum, sync, write_atomically
from setfold.errors import FileError, InputError
from setfold.files.engines.task import Skipped, Step
from setfold.files.tables.spill import truncate
from setfold.files.tables.store import Store

VERSION = 1  # of the journal
SAVE_EVERY = 20.0  # default checkpoint interval in seconds
SAVE_SHARE = 0.05  # upper limit on the share of time that is spent on checkpoints
START_OVER = "Start over with --restart."
COUNTS = (
    "shard", "rows", "elements", "skipped", "skipped_bytes", "spills", "bytes_spilled", "saves",
    "sets",
)  # fmt: skip
# names of files in the folder
SNAPSHOT, SPILLED, SORTED_RUN = r"snapshot-\d+", r"\d\d\.(states|rows)\.tables", r"\d\d\.run"
OUTPUT = r"output-\d"
OWN = re.compile(
    rf"lock|journal|\.journal\..*\.part|{SNAPSHOT}|spill|runs|skipped|{OUTPUT}(\.table)?"
)


@dataclass
class Journal:
    """Progress of a run, as saved in a checkpoint.

    The journal is the only place that counts spills: the store reports each one to `count_spill`.

    Args:
        request: What the user asked for. A resumed run must have the same request.
        signature: The model, columns and inputs of the plan. It must be the same, too.
        shard: The index of the current shard.
        rows: How many rows of that shard are done.
        elements: How many elements the states contain.
        skipped: How many rows, files and sets were skipped.
        skipped_bytes: The length of the file that lists them.
        read: How many bytes of the inputs are done.
        seconds: How long the run took so far.
        lengths: The lengths of the files in spill/.
        spills: How often tables were spilled to disk.
        bytes_spilled: How many bytes were spilled.
        saves: How many snapshots were saved.
        snapshot: The name of the last one; None if it is no longer needed.
        buckets: The buckets that are not merged yet; None while files are read.
        sorted_runs: The names of the files in runs/.
        outputs: Temporary and final names of the outputs, once they are complete.
        digests: What each of the outputs is the result of, by temporary name.
        overwrite: Whether the outputs may replace existing files.
        sets: How many sets the first output has.
        outside: How many of their elements are outside the model's grids; None without grids.
    """

    request: dict[str, Any]
    signature: dict[str, Any]
    shard: int = 0
    rows: int = 0
    elements: int = 0
    skipped: int = 0
    skipped_bytes: int = 0
    read: float = 0.0
    seconds: float = 0.0
    lengths: dict[str, int] = field(default_factory=dict)
    spills: int = 0
    bytes_spilled: int = 0
    saves: int = 0
    snapshot: str | None = None
    buckets: list[int] | None = None
    sorted_runs: list[str] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    overwrite: bool = False
    sets: int = 0
    outside: int | None = None

    def count_step(self, step: Step, read: float) -> None:
        """Record that a step is done."""
        self.shard, self.rows = step.shard, step.rows
        self.elements += step.elements
        self.skipped += len(step.skipped)
        self.read = read

    def count_spill(self, nbytes: int) -> None:
        """Record that tables were spilled to disk."""
        self.spills += 1
        self.bytes_spilled += nbytes


class WorkFolder:
    """The work folder of a run, locked by this process.

    Args:
        folder: The folder.
        request: What the user asked for.
        journal: The journal of the run to resume; None for a new run.
        save_every: The checkpoint interval in seconds.
    """

    def __init__(
        self, folder: Path, request: dict[str, Any], journal: Journal | None, save_every: float
    ) -> None:
        self.folder, self.request = folder, request
        self.save_every = save_every
        self.journal = journal
        self.snapshot = None if journal is None else journal.snapshot  # of the last checkpoint
        self.is_durable = False  # whether the folder itself would survive a power loss
        self.saved_at = time.monotonic()
        self.save_seconds = 0.0  # duration of the last save

    @property
    def skipped_file(self) -> Path:
        """The list of skipped rows, files and sets."""
        return self.folder / "skipped"

    @property
    def spill_folder(self) -> Path:
        """The folder for tables that do not fit in memory."""
        return self.folder / "spill"

    @property
    def runs_folder(self) -> Path:
        """The folder for sorted runs."""
        return self.folder / "runs"

    def open_journal(self, signature: dict[str, Any]) -> Journal:
        """Return the journal of the run to resume, or a new one.

        Raises:
            SetfoldError: The run to resume has another signature.
        """
        signature = to_json_value(signature)
        if self.journal is None:
            self.journal = Journal(self.request, signature)
        _check_signature(self.journal.signature, signature)
        if self.skipped_file.exists() or self.journal.skipped_bytes:
            truncate(self.skipped_file, self.journal.skipped_bytes)
        self.runs_folder.mkdir(exist_ok=True)
        return self.journal

    def log_skipped(self, skipped: Sequence[Skipped]) -> None:
        """Append to the list of skipped rows, files and sets."""
        assert self.journal is not None
        if skipped:
            with self.skipped_file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(entry._asdict()) + "\n" for entry in skipped)
                file.flush()
                self.journal.skipped_bytes = file.tell()

    def is_save_due(self) -> bool:
        """Whether it is time for the next checkpoint."""
        interval = max(self.save_every, self.save_seconds / SAVE_SHARE)
        return time.monotonic() - self.saved_at > interval

    def save(self, store: Store | None = None) -> None:
        """Save a checkpoint: the journal, and what the store has in memory."""
        assert self.journal is not None
        started = time.monotonic()
        if store is not None:
            self.journal.saves += 1
            self.journal.snapshot = f"snapshot-{self.journal.saves}"
            path = self.folder / self.journal.snapshot
            path.unlink(missing_ok=True)  # left by an interrupted run
            self.journal.lengths = store.save(path)
            store.sync()
            sync(path)
        if self.skipped_file.exists():
            sync(self.skipped_file)
        sync(self.folder)
        if not self.is_durable:
            sync(self.folder.parent)
            self.is_durable = True
        saved = _to_save(vars(self.journal))
        write_atomically(self.folder / "journal", json.dumps(saved).encode())
        if self.snapshot not in (None, self.journal.snapshot):
            (self.folder / str(self.snapshot)).unlink(missing_ok=True)
        self.snapshot = self.journal.snapshot
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - started

    def restore(self, store: Store) -> None:
        """Load the last checkpoint into a store."""
        journal = self.journal
        if journal is not None and journal.snapshot is not None:
            store.restore(self.folder / journal.snapshot, journal.lengths)
        elif self.spill_folder.exists():
            shutil.rmtree(self.spill_folder)


def check_folder(folder: Path) -> None:
    """Raise FileError if a work folder contains anything that setfold does not write.

    Everything in the folder may be truncated, replaced or removed. A link would lead to files of
    somebody else, and so would a folder that only has the name of a work folder.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise _foreign(folder, folder)
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            is_own = place != str(folder) or OWN.fullmatch(name)
            is_folder = name in ("spill", "runs") if place == str(folder) else name in folders
            kind = stat.S_IFDIR if is_folder else stat.S_IFREG
            with suppress(FileNotFoundError):  # another process has just removed it
                if not is_own or stat.S_IFMT(path.lstat().st_mode) != kind:
                    raise _foreign(folder, path)


def _foreign(folder: Path, path: Path) -> FileError:
    return FileError(
        f"setfold did not write {path}: {folder} is a work folder, and has no links and no other "
        "files. Move it away, or choose another output."
    )


def read_journal(folder: Path) -> Journal | None:
    """Return the journal in a work folder; None if there is none.

    Raises:
        FileError: It is corrupt, or another version of setfold wrote it.
    """
    path = folder / "journal"
    if not path.exists():
        return None
    try:
        saved = json.loads(path.read_text())
        if saved != _to_save(saved["journal"]):
            raise ValueError("its version or its checksum differs")
        if saved["journal"].pop("replaces", None) is not None:
            raise ValueError("a state file was updated in place, as earlier versions could")
        journal = Journal(**saved["journal"])
        _validate(journal)
        return journal
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileError(
            f"cannot read {path}: it is corrupt, or another version of setfold wrote it. "
            f"{START_OVER}"
        ) from error


def _validate(journal: Journal) -> None:
    """Raise ValueError unless everything has its type, and no name leads out of the folder.

    A checksum shows damage. It does not show who wrote a journal.
    """
    if not isinstance(journal.buckets, list | None):
        raise ValueError("buckets must be a list")
    counts = [getattr(journal, name) for name in COUNTS]
    whole = [
        *counts,
        *journal.lengths.values(),
        *(journal.buckets or ()),
        journal.outside or 0,
    ]
    if not all(type(number) is int and number >= 0 for number in whole):
        raise ValueError("counts and lengths must be integers of at least 0")
    if not all(math.isfinite(number) and number >= 0 for number in (journal.read, journal.seconds)):
        raise ValueError("sizes and times must be finite")
    if not (isinstance(journal.request, dict) and isinstance(journal.overwrite, bool)):
        raise ValueError("a request is not what it should be")
    for path, *stamp in journal.signature["inputs"]:
        if not isinstance(path, str) or len(stamp) != 2:
            raise ValueError("inputs must be paths and stamps")
    names = {
        SNAPSHOT: [] if journal.snapshot is None else [journal.snapshot],
        SPILLED: list(journal.lengths),
        SORTED_RUN: journal.sorted_runs,
        OUTPUT: [*journal.outputs, *journal.digests],
    }
    for pattern, found in names.items():
        if not all(re.fullmatch(pattern, name) for name in found):
            raise ValueError(f"names must be like {pattern}")
    buckets, spilled = journal.buckets or [], {int(name[:2]) for name in journal.lengths}
    if not spilled.issuperset(buckets) or len({*buckets}) < len(buckets):
        raise ValueError("each bucket must have files, and be listed once")
    if len({*journal.sorted_runs}) < len(journal.sorted_runs):
        raise ValueError("each run must be listed once")
    finals = [journal.request[name] for name in ("out", "states") if journal.request.get(name)]
    if journal.outputs.keys() != journal.digests.keys():
        raise ValueError("outputs and digests must have the same names")
    if not set(journal.outputs.values()) <= set(finals):
        raise ValueError("outputs must be those of the request")


def _to_save(journal: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a journal file."""
    return {"version": VERSION, "checksum": checksum(json.dumps(journal)), "journal": journal}


def to_json_value(value: dict[str, Any]) -> Any:
    """Return what a value becomes when it is saved as JSON and loaded; tuples become lists."""
    return json.loads(json.dumps(value))


def _check_signature(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise if a run with the current signature cannot resume the saved one."""
    if saved == current:
        return
    before, after = (_stamps_by_path(signature) for signature in (saved, current))
    for path, stamp in before.items():
        if path in after and after[path] != stamp:
            raise FileError(f"cannot resume: {path} has changed since the run began. {START_OVER}")
    if before.keys() != after.keys():
        names = ", ".join(sorted(before.keys() ^ after.keys())[:3])
        raise InputError(
            f"cannot resume: the interrupted run had other inputs (first differences: {names}). "
            f"{START_OVER}"
        )
    differ = [name for name in current if current[name] != saved.get(name)]
    raise InputError(
        f"cannot resume: the interrupted run had a different {', '.join(differ)}. Use the same "
        "arguments as before, or start over with --restart."
    )


def _stamps_by_path(signature: dict[str, Any]) -> dict[str, list[Any]]:
    return {path: stamp for path, *stamp in signature["inputs"]}
