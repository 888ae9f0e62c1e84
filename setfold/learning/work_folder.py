"""The folder of a training: one training for each model, and what is kept of an interrupted one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from setfold.core.persist import hold, write_atomically
from setfold.errors import FileError, InputError

LOCK, REQUEST = "lock", "request.json"
KEPT = (".safetensors", ".json")  # checkpoints of candidates, and their numbers of epochs
TEMPORARY = ".part"  # a checkpoint that was not complete


@contextmanager
def open_work_folder(
    model: Path, request: dict[str, Any], *, resume: bool, restart: bool
) -> Iterator[Path]:
    """Lock a model, and create the folder for its checkpoints.

    If the block ends without error, the folder is removed; otherwise checkpoints are kept.

    Args:
        model: The model that is trained.
        request: What determines the result; must be serializable as JSON.
        resume: Whether to resume an interrupted training.
        restart: Whether to discard an interrupted training.

    Raises:
        FileError: Another process trains the model, or the folder contains something else.
        InputError: There is an interrupted training, and neither `resume` nor `restart` is set; or
            it had other arguments.
    """
    if resume and restart:
        raise InputError("--resume and --restart exclude each other; pass one of them, not both.")
    folder = work_folder_of(model)
    _check(folder)
    with hold(folder / LOCK, wait=False) as locked:
        if not locked:
            raise FileError(
                f"another process is training {model} (it has locked {folder / LOCK}). Wait until "
                "it ends, or choose another model."
            )
        try:
            _begin(model, folder, json.loads(json.dumps(request)), resume, restart)
        except BaseException:
            if not (folder / REQUEST).exists():
                _remove(folder)
            raise
        try:
            yield folder
        except KeyboardInterrupt as error:
            error.add_note(
                f"Checkpoints are kept in {folder}. Continue with the same command and --resume, or "
                "discard them with --restart."
            )
            raise
        except Exception:
            if not any(path.suffix in KEPT and path.name != REQUEST for path in folder.iterdir()):
                _remove(folder)  # nothing was trained yet
            raise
        _remove(folder)


def is_interrupted(model: Path) -> bool:
    """Whether there is an interrupted training of a model."""
    return (work_folder_of(model) / REQUEST).exists()


def work_folder_of(model: Path) -> Path:
    """Return the folder for the checkpoints of a model.

    >>> work_folder_of(Path("a/m.safetensors")).name
    'm.safetensors.work'
    """
    return model.with_name(model.name + ".work")


def _begin(model: Path, folder: Path, request: Any, resume: bool, restart: bool) -> None:
    """Check that an interrupted training may be resumed, or discard it."""
    path = folder / REQUEST
    if path.exists() and not restart:
        if not resume:
            raise InputError(
                f"an earlier training of {model} was interrupted; its checkpoints are in {folder}. "
                "Resume it with --resume, or discard it with --restart."
            )
        try:
            before = json.loads(path.read_bytes())
        except ValueError as error:
            raise FileError(f"{path} is corrupt. Start over with --restart.") from error
        differ = [name for name in request if before.get(name) != request[name]]
        if differ:
            raise InputError(
                f"cannot resume: the interrupted training had different {', '.join(differ)}. Use "
                "the same arguments as before, or start over with --restart."
            )
        return
    _empty(folder)
    write_atomically(path, json.dumps(request).encode())


def _check(folder: Path) -> None:
    """Raise FileError if a folder is not that of a training, which would be emptied."""
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir():
        raise FileError(f"{folder} is not a folder. Rename it, or choose another model.")
    for path in folder.iterdir():
        known = path.name == LOCK or path.suffix in (*KEPT, TEMPORARY)
        if not known or path.is_symlink() or not path.is_file():
            raise FileError(
                f"{folder} contains {path.name!r}, which is not part of a training. Rename the "
                "folder, or choose another model."
            )


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != LOCK:
            path.unlink()


def _remove(folder: Path) -> None:
    """Remove the folder; the lock last, which is safe while it is held."""
    _empty(folder)
    (folder / LOCK).unlink()
    with suppress(OSError):  # another process may already have created a new lock
        folder.rmdir()
