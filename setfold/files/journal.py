"""Work: the folder beside the output in which a run keeps what it needs to go on after a kill.

lock        held while a run is at it
journal     how far the run is: one small file, replaced at once or not at all
memory-N    what was in memory when the journal was written
spill/      what did not fit in memory
runs/       finished parts of the result, sorted
skipped     what was left out, one line of JSON for each
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
from setfold.core.persist import write_atomically
from setfold.errors import FileError, InputError
from setfold.files.engines.task import Skipped, Step
from setfold.files.tables.spill import shorten
from setfold.files.tables.store import Store

SAVE_EVERY = 20.0  # seconds of work that a killed run loses, unless another number is wished
ANEW = "Begin anew, with --restart."
SAVE_SHARE = 0.05  # of the time, that goes into saving at most


@dataclass
class Journal:
    """How far a run is.

    Args:
        request: what was asked for; a run that goes on must be asked for the same.
        job: what that came to, inputs and all; likewise.
        piece: the number of the piece that comes next, or is under way.
        rows: of that piece that are done.
        elements: that are in the states.
        skipped: how many things were left out.
        bytes: of the file that lists them.
        read: bytes of input.
        seconds: that the run took.
        lengths: of the files in spill/.
        spills: how often memory was emptied to disk.
        spilled: bytes that went there.
        memory: the file with what was in memory; None where nothing was.
        buckets: those that are still to be merged; None while files are read.
        runs: names of the files in runs/.
        publish: temporary and final names of the outputs, once they are complete.
        sets: how many there are in the outputs.
    """

    request: dict[str, Any]
    job: dict[str, Any]
    piece: int = 0
    rows: int = 0
    elements: int = 0
    skipped: int = 0
    bytes: int = 0
    read: float = 0.0
    seconds: float = 0.0
    lengths: dict[str, int] = field(default_factory=dict)
    spills: int = 0
    spilled: int = 0
    memory: str | None = None
    buckets: list[int] | None = None
    runs: list[str] = field(default_factory=list)
    publish: dict[str, str] = field(default_factory=dict)
    sets: int = 0

    def count(self, step: Step, read: float) -> None:
        """Take note of a step."""
        self.piece, self.rows = step.piece, step.rows
        self.elements += step.elements
        self.skipped += len(step.skipped)
        self.read = read


class Work:
    """A run's folder, which this process holds.

    Args:
        folder: of the run.
        request: what was asked for.
        journal: of a run that goes on; None for a new one.
        save_every: seconds between two saves, if they are quick.
    """

    def __init__(
        self, folder: Path, request: dict[str, Any], journal: Journal | None, save_every: float
    ) -> None:
        self.folder, self.request = folder, request
        self.save_every = save_every
        self.journal = journal
        self.saved_at = time.monotonic()
        self.cost = 0.0  # seconds, of the last save

    @property
    def skipped(self) -> Path:
        """The list of what was left out."""
        return self.folder / "skipped"

    @property
    def spill(self) -> Path:
        """The folder for what does not fit in memory."""
        return self.folder / "spill"

    def begin(self, job: dict[str, Any]) -> Journal:
        """The journal of this job, new or to go on with."""
        job = as_in_a_file(job)
        if self.journal is None:
            self.journal = Journal(self.request, job)
        _refuse_other_job(self.journal.job, job)
        if self.skipped.exists() or self.journal.bytes:
            shorten(self.skipped, self.journal.bytes)
        (self.folder / "runs").mkdir(exist_ok=True)
        return self.journal

    def note(self, skipped: Sequence[Skipped]) -> None:
        """List what was left out."""
        assert self.journal is not None
        if skipped:
            with self.skipped.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(bad._asdict()) + "\n" for bad in skipped)
                file.flush()
                self.journal.bytes = file.tell()

    def is_due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self.saved_at > max(self.save_every, self.cost / SAVE_SHARE)

    def save(self, store: Store | None = None) -> None:
        """Write down how far the run is, and what of it is in memory."""
        assert self.journal is not None
        started = time.monotonic()
        old = self.journal.memory
        if store is not None:
            name = f"memory-{self.journal.piece}-{self.journal.rows}"
            path = self.folder / name
            path.unlink(missing_ok=True)
            self.journal.lengths = store.save(path)
            self.journal.memory = name
            self.journal.spills, self.journal.spilled = store.spills, store.spilled
        text = json.dumps(dataclasses.asdict(self.journal))
        write_atomically(self.folder / "journal", text.encode())
        if old is not None and old != self.journal.memory:
            (self.folder / old).unlink(missing_ok=True)
        self.saved_at = time.monotonic()
        self.cost = self.saved_at - started

    def restore(self, store: Store) -> None:
        """Bring a store to where it was."""
        journal = self.journal
        if journal is not None and journal.memory is not None:
            store.restore(
                self.folder / journal.memory, journal.lengths, journal.spills, journal.spilled
            )
        elif self.spill.exists():
            shutil.rmtree(self.spill)

    def publish(self) -> None:
        """Give complete outputs their names; after a kill, those that have not got them yet."""
        assert self.journal is not None
        for temporary, final in self.journal.publish.items():
            path = self.folder / temporary
            if path.exists():
                _moved(path, Path(final))

    def report(self) -> str | None:
        """Put the list of what was left out beside the output; an earlier one is removed."""
        assert self.journal is not None
        first = next(iter(self.journal.publish.values()))
        path = Path(first + ".skipped.jsonl")
        if self.skipped.exists():
            self.skipped.replace(path)
        elif not self.journal.skipped:
            path.unlink(missing_ok=True)
            return None
        return str(path)


@contextmanager
def working(
    out: Path, request: dict[str, Any], *, resume: bool, restart: bool, save_every: float
) -> Iterator[Work]:
    """Hold the folder of the run that makes an output; it is removed when the run is complete.

    Args:
        out: the output.
        request: what was asked for, as JSON could say it.
        resume: whether to go on with a run that did not end.
        restart: whether to drop what such a run has left.
        save_every: seconds between two saves, if they are quick.

    Raises:
        FileError: another process is at it, or what is there cannot be read.
        InputError: there is a run that did not end, and it was not said what to do with it.
    """
    if resume and restart:
        raise InputError("give --resume or --restart, not both.")
    folder = out.with_name(out.name + ".work")
    with hold(folder / "lock", wait=False) as held:
        if not held:
            raise FileError(
                f"another process is writing {out} (it holds {folder / 'lock'}). Wait for it, or choose another --out."
            )
        journal = _left_by_another(folder)
        if journal is not None and not (resume or restart):
            raise InputError(
                f"an earlier run for {out} did not end; what it did is in {folder}. Go on with it (--resume), or drop "
                "it (--restart)."
            )
        if not resume:
            _emptied(folder)
            journal = None
        request = as_in_a_file(request)
        if journal is not None and journal.request != request:
            differ = [name for name in request if journal.request.get(name) != request[name]]
            raise InputError(
                f"the run that did not end was asked for something else: other {', '.join(differ)}. {ANEW}"
            )
        try:
            yield Work(folder, request, journal, save_every)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise FileError(
                    f"the disk of {folder} is full. Make room, and go on with --resume: nothing is lost."
                ) from error
            raise
        except BaseException:
            if not (folder / "journal").exists():  # nothing was done that could be gone on with
                _removed(folder)
            raise
        _removed(folder)


def _left_by_another(folder: Path) -> Journal | None:
    path = folder / "journal"
    if not path.exists():
        return None
    try:
        return Journal(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise FileError(
            f"{path} cannot be read: it is damaged, or another version of setfold wrote it. Begin anew, with --restart."
        ) from error


def as_in_a_file(value: dict[str, Any]) -> Any:
    """What JSON makes of a value: lists of tuples."""
    return json.loads(json.dumps(value))


def _moved(path: Path, final: Path) -> None:
    """Rename a file, to another disk too; whole or not at all."""
    try:
        path.replace(final)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        beside = final.with_name(f".{final.name}.part")
        shutil.copyfile(path, beside)
        beside.replace(final)
        path.unlink()


def _removed(folder: Path) -> None:
    _emptied(folder)
    (folder / "lock").unlink()
    with suppress(OSError):  # the next run may have begun already
        folder.rmdir()


def _emptied(folder: Path) -> None:
    """Remove all but the lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _refuse_other_job(then: dict[str, Any], now: dict[str, Any]) -> None:
    if then == now:
        return
    before, after = (dict(map(_named, job["inputs"])) for job in (then, now))
    for path, stamp in before.items():
        if path in after and after[path] != stamp:
            raise FileError(f"{path} has changed since the run began. {ANEW}")
    if before.keys() != after.keys():
        names = ", ".join(sorted(before.keys() ^ after.keys())[:3])
        raise InputError(f"the run began with other inputs; not the same are {names}. {ANEW}")
    differ = [name for name in then if then[name] != now.get(name)]
    raise InputError(f"the run that did not end is another one: {', '.join(differ)} differ. {ANEW}")


def _named(entry: list[Any]) -> tuple[str, list[Any]]:
    return entry[0], entry[1:]
