"""The work folder next to the output: checkpoints, and everything a resumed run needs.

lock         locked while a run uses the folder
journal      progress of the run: a small JSON file that is replaced atomically
snapshot-N   the tables that were in memory when the journal was written
spill/       tables that did not fit in memory
runs/        sorted runs: parts of the result that are complete
skipped      skipped rows and files, one line of JSON each
"""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from setfold.core.locks import hold
from setfold.core.persist import checksum, write_atomically
from setfold.errors import FileError, InputError
from setfold.files.engines.task import Skipped, Step
from setfold.files.tables.spill import truncate
from setfold.files.tables.store import Store

VERSION = 1  # of the journal
SAVE_EVERY = 20.0  # default checkpoint interval in seconds
SAVE_SHARE = 0.05  # upper limit on the share of time that is spent on checkpoints
START_OVER = "Start over with --restart."


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
        skipped: How many rows and files were skipped.
        skipped_bytes: The length of the file that lists them.
        read: How many bytes of the inputs are done.
        seconds: How long the run took so far.
        lengths: The lengths of the files in spill/.
        spills: How often tables were spilled to disk.
        bytes_spilled: How many bytes were spilled.
        snapshot: The name of the snapshot; None if nothing was in memory.
        buckets: The buckets that are not merged yet; None while files are read.
        sorted_runs: The names of the files in runs/.
        outputs: Temporary and final names of the outputs, once they are complete.
        sets: How many sets the outputs have.
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
    snapshot: str | None = None
    buckets: list[int] | None = None
    sorted_runs: list[str] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    sets: int = 0

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
        self.saved_at = time.monotonic()
        self.save_seconds = 0.0  # duration of the last save

    @property
    def skipped_file(self) -> Path:
        """The list of skipped rows and files."""
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
        """Append to the list of skipped rows and files."""
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
        previous = self.journal.snapshot
        if store is not None:
            name = f"snapshot-{self.journal.shard}-{self.journal.rows}"
            path = self.folder / name
            path.unlink(missing_ok=True)
            self.journal.lengths = store.save(path)
            self.journal.snapshot = name
        saved = _to_save(dataclasses.asdict(self.journal))
        write_atomically(self.folder / "journal", json.dumps(saved).encode())
        if previous is not None and previous != self.journal.snapshot:
            (self.folder / previous).unlink(missing_ok=True)
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - started

    def restore(self, store: Store) -> None:
        """Load the last checkpoint into a store."""
        journal = self.journal
        if journal is not None and journal.snapshot is not None:
            store.restore(self.folder / journal.snapshot, journal.lengths)
        elif self.spill_folder.exists():
            shutil.rmtree(self.spill_folder)

    def publish(self) -> None:
        """Move complete outputs to their final names, except those that are already there."""
        assert self.journal is not None
        for temporary, final in self.journal.outputs.items():
            path = self.folder / temporary
            if path.exists():
                _move(path, Path(final))

    def publish_report(self) -> str | None:
        """Move the list of skipped rows next to the output, and return its path.

        If nothing was skipped, remove the list of an earlier run and return None.
        """
        assert self.journal is not None
        first = next(iter(self.journal.outputs.values()))
        path = Path(first + ".skipped.jsonl")
        if self.skipped_file.exists():
            self.skipped_file.replace(path)
        elif not self.journal.skipped:
            path.unlink(missing_ok=True)
            return None
        return str(path)


@contextmanager
def open_work_folder(
    out: Path, request: dict[str, Any], *, resume: bool, restart: bool, save_every: float
) -> Iterator[WorkFolder]:
    """Create and lock the work folder of an output. Remove it when the block ends without error.

    Args:
        out: The output.
        request: What the user asked for; must be serializable as JSON.
        resume: Whether to resume an interrupted run.
        restart: Whether to discard an interrupted run.
        save_every: The checkpoint interval in seconds.

    Raises:
        FileError: Another process uses the folder, or the checkpoint cannot be read.
        InputError: There is an interrupted run, and neither `resume` nor `restart` is set.
    """
    if resume and restart:
        raise InputError("--resume and --restart exclude each other; pass one of them, not both.")
    folder = out.with_name(out.name + ".work")
    with hold(folder / "lock", wait=False) as locked:
        if not locked:
            raise FileError(
                f"another process is writing {out} (it has locked {folder / 'lock'}). Wait until "
                "it ends, or choose another --out."
            )
        journal = None if restart else read_journal(folder)
        if journal is not None and not resume:
            raise InputError(
                f"an earlier run for {out} was interrupted; its checkpoint is in {folder}. "
                "Resume it with --resume, or discard it with --restart."
            )
        if not resume:
            _empty_folder(folder)
        request = to_json_value(request)
        if journal is not None and journal.request != request:
            differ = [name for name in request if journal.request.get(name) != request[name]]
            raise InputError(
                f"cannot resume: the interrupted run had different {', '.join(differ)}. Use the "
                "same arguments as before, or start over with --restart."
            )
        try:
            yield WorkFolder(folder, request, journal, save_every)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise FileError(
                    f"the disk of {folder} is full. Free some space, then continue with --resume. "
                    "Checkpoints are not lost."
                ) from error
            raise
        except BaseException:
            if not (folder / "journal").exists():  # there is no checkpoint to resume from
                _remove_folder(folder)
            raise
        _remove_folder(folder)


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
        return Journal(**saved["journal"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FileError(
            f"cannot read {path}: it is corrupt, or another version of setfold wrote it. "
            f"{START_OVER}"
        ) from error


def _to_save(journal: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a journal file."""
    return {"version": VERSION, "checksum": checksum(json.dumps(journal)), "journal": journal}


def to_json_value(value: dict[str, Any]) -> Any:
    """Return what a value becomes when it is saved as JSON and loaded; tuples become lists."""
    return json.loads(json.dumps(value))


def _move(path: Path, final: Path) -> None:
    """Move a file atomically, also to another disk."""
    try:
        path.replace(final)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        temporary = final.with_name(f".{final.name}.part")
        shutil.copyfile(path, temporary)
        temporary.replace(final)
        path.unlink()


def _remove_folder(folder: Path) -> None:
    _empty_folder(folder)
    (folder / "lock").unlink()
    with suppress(OSError):  # the next run may already use the folder
        folder.rmdir()


def _empty_folder(folder: Path) -> None:
    """Remove everything except the lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


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
    differ = [name for name in saved if saved[name] != current.get(name)]
    raise InputError(
        f"cannot resume: the interrupted run had a different {', '.join(differ)}. Use the same "
        "arguments as before, or start over with --restart."
    )


def _stamps_by_path(signature: dict[str, Any]) -> dict[str, list[Any]]:
    return {path: stamp for path, *stamp in signature["inputs"]}
