"""Locks by file, so that processes share work instead of repeating it.

A lock is the operating system's: it is gone when its process is, however that ends.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hold(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of a file while the block runs.

    Args:
        path: the file; made if there is none, and left behind.
        wait: until another process lets go of it.

    Yields:
        Whether the lock is held: always, if this waits.
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
        finally:  # not left to closing: a process that was forked meanwhile has the file as well
            fcntl.flock(file, fcntl.LOCK_UN)
