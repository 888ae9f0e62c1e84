"""Folders of several files that are complete or absent, however a process ends."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setfold.core.persist import is_full_disk, sync
from setfold.errors import FileError, InputError

MANIFEST = "export.json"
KIND = "setfold export"


def check_replaceable(folder: Path, *, overwrite: bool) -> None:
    """Raise unless a folder can be written: it is absent, empty, or an export to be replaced.

    Raises:
        FileError: The folder around it does not exist.
        InputError: There is something else, an export that must not be replaced, or this process.
    """
    if not folder.parent.is_dir():
        raise FileError(
            f"cannot write {folder}: the folder {folder.parent} does not exist. Create it first."
        )
    if folder.exists() and folder.samefile("."):  # whoever is in it would stay in the old one
        raise InputError(f"{folder} is the current folder. Choose another one, such as ./exported.")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not is_export(folder):
        raise InputError(
            f"{folder} exists and is not, or not only, an export of setfold, so it is never "
            "replaced. Choose another folder."
        )
    if not overwrite:
        advice = "Choose another folder, or replace it with"
        raise InputError(
            f"{folder} exists. {advice} overwrite=True.",
            command=f"{folder} exists. {advice} --overwrite.",
        )


def is_export(folder: Path) -> bool:
    """Whether a folder contains an export, and nothing else."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        listed = {*manifest["files"], MANIFEST}
        return manifest["kind"] == KIND and {path.name for path in folder.iterdir()} <= listed
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside `folder`, which takes its place when the block ends without error.

    When this returns, the files survive a power loss. A process that is killed leaves the old
    folder or the new one, and perhaps a hidden one beside it; only between two renames, while an
    old folder is replaced, there is none, and the old one is the hidden one.

    Raises:
        FileError: The disk is full.
    """
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part"))
    try:
        yield temporary
        _publish(temporary, folder)
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise FileError(
            f"cannot write {folder}: the disk is full. Free some space, then try again."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Describe a folder whose other files are complete."""
    files = sorted(path.name for path in folder.iterdir())
    text = json.dumps({"kind": KIND, **facts, "files": files}, indent=1, allow_nan=False)
    (folder / MANIFEST).write_text(text + "\n")


def _publish(temporary: Path, folder: Path) -> None:
    """Give a folder its name, in place of one that exists."""
    umask = os.umask(0)
    os.umask(umask)
    temporary.chmod(0o777 & ~umask)  # like other new folders; mkdtemp uses 0o700
    for path in temporary.iterdir():
        path.chmod(0o666 & ~umask)
        sync(path)
    sync(temporary)
    old = temporary.with_suffix(".old")
    replaces = folder.exists()
    if replaces:
        folder.rename(old)
    try:
        temporary.rename(folder)
    except BaseException:
        if replaces:
            old.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
