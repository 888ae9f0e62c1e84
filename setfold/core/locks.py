"""File locks, with which processes coordinate their work.

The operating system releases a lock when its process ends, even if the process is killed.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def hold(path: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a file while the block runs.

    The block may remove the file and its folder as its last step. A process that opened the file
    before it was removed notices that, and locks a new file.

    Args:
        path: The file. It is created if it does not exist, and so is its folder.
        wait: Whether to wait until no other process has locked the file.

    Yields:
        Whether the file is locked. Always True if `wait` is set.
    """
    while True:
        with suppress(FileExistsError):
            path.parent.mkdir(parents=True)
        try:
            file = path.open("ab")
        except FileNotFoundError:  # another process has just removed the folder
            continue
        with file:
            locked = _lock(file, wait)
            if not _is_at(file, path):  # a lock on a removed file excludes nobody
                continue
            try:
                yield locked
            finally:  # explicitly, because a forked child process may keep the file open
                if locked:
                    fcntl.flock(file, fcntl.LOCK_UN)
            return


def _lock(file: IO[bytes], wait: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is the one that a path refers to."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
