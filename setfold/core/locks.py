"""File locks, with which processes coordinate their work.

The operating system releases a lock when its process ends, even if the process is killed.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold(path: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a file while the block runs.

    Args:
        path: The file. It is created if it does not exist, and not removed.
        wait: Whether to wait until no other process has locked the file.

    Yields:
        Whether the file is locked. Always True if `wait` is set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:  # explicitly, because a forked child process may keep the file open
            fcntl.flock(file, fcntl.LOCK_UN)
