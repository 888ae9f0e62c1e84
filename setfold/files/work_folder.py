"""The beginning and the end of a run's work folder: one run for each output, and what is kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from setfold.core.locks import hold
from setfold.core.persist import is_full_disk, sync
from setfold.errors import FileError, InputError
from setfold.files.journal import (
    Journal,
    WorkFolder,
    check_folder,
    read_journal,
    to_json_value,
)


@contextmanager
def open_work_folder(
    outputs: Sequence[Path],
    request: dict[str, Any],
    *,
    resume: bool,
    restart: bool,
    save_every: float,
) -> Iterator[WorkFolder]:
    """Lock all outputs, and create the work folder of the first one.

    If the block ends without error, or before the first checkpoint, the folder is removed.

    Args:
        outputs: The outputs, as absolute paths.
        request: What the user asked for; must be serializable as JSON.
        resume: Whether to resume an interrupted run.
        restart: Whether to discard an interrupted run.
        save_every: The checkpoint interval in seconds.

    Raises:
        FileError: Another process writes one of the outputs, the checkpoint cannot be read, or the
            disk is full.
        InputError: There is an interrupted run, and neither `resume` nor `restart` is set.
    """
    if resume and restart:
        raise InputError("--resume and --restart exclude each other; pass one of them, not both.")
    folder, is_complete = _folder_of(outputs[0]), False
    try:
        with ExitStack() as locks:
            for path in sorted(outputs):  # the same order everywhere, so that one process succeeds
                locks.enter_context(_claim(path))
            journal = _open(outputs, to_json_value(request), resume, restart)
            yield WorkFolder(folder, to_json_value(request), journal, save_every)
            is_complete = True
            _discard_checkpoint(folder)
    except KeyboardInterrupt as error:
        error.add_note(_describe_end(folder, is_complete))
        raise
    except (OSError, FileError) as error:
        if not is_full_disk(error):
            raise
        raise FileError(
            f"the disk of {folder} is full. Free some space. {_describe_end(folder, is_complete)}"
        ) from error


def _open(
    outputs: Sequence[Path], request: dict[str, Any], resume: bool, restart: bool
) -> Journal | None:
    """Return the journal of the run to resume. If there is none, empty the folder."""
    folder = _folder_of(outputs[0])
    for path in outputs[1:]:
        if (_folder_of(path) / "journal").exists():
            raise InputError(
                f"an earlier run for {path} was interrupted; its checkpoint is in "
                f"{_folder_of(path)}. Complete that run first, or remove the folder."
            )
    if restart:
        _discard_checkpoint(folder)
    journal = read_journal(folder)
    if journal is None:
        _empty(folder)
        return None
    if not resume:
        raise InputError(
            f"an earlier run for {outputs[0]} was interrupted; its checkpoint is in {folder}. "
            "Resume it with --resume, or discard it with --restart."
        )
    differ = [name for name in request if journal.request.get(name) != request[name]]
    if differ:
        raise InputError(
            f"cannot resume: the interrupted run had different {', '.join(differ)}. Use the same "
            "arguments as before, or start over with --restart."
        )
    return journal


def _folder_of(out: Path) -> Path:
    return out.with_name(out.name + ".work")


@contextmanager
def _claim(out: Path) -> Iterator[None]:
    """Lock an output. At the end, remove its work folder, except if it has a checkpoint."""
    folder = _folder_of(out)
    check_folder(folder)
    with hold(folder / "lock", wait=False) as locked:
        if not locked:
            raise FileError(
                f"another process is writing {out} (it has locked {folder / 'lock'}). Wait until "
                "it ends, or choose another output."
            )
        try:
            yield
        finally:
            if not (folder / "journal").exists():
                _empty(folder)
                (folder / "lock").unlink()  # safe while it is locked: see `hold`
                with suppress(OSError):  # another process may already have created a new lock
                    folder.rmdir()


def _discard_checkpoint(folder: Path) -> None:
    """Remove the journal first and for good: the rest is not needed any more."""
    (folder / "journal").unlink(missing_ok=True)
    sync(folder)


def _empty(folder: Path) -> None:
    """Remove everything except the lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _describe_end(folder: Path, is_complete: bool) -> str:
    """Say what is kept of a run that ended early, and how to continue."""
    if is_complete:
        return "The outputs are complete: with --resume, the same command has nothing to do."
    if (folder / "journal").exists():
        return (
            f"Everything up to the last checkpoint is kept in {folder}. Continue with the same "
            "command and --resume, or discard it with --restart."
        )
    return (
        "There was no checkpoint yet, so nothing is kept, and no output has changed. Start again "
        "with the same command, with or without --resume."
    )
