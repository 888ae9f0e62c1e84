"""How much memory there is to use, and how much is used."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path
from typing import NamedTuple

from setfold.errors import InputError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
MOST_ROWS = 1 << 18  # of a batch
BASE = 380_000_000  # bytes that Python, torch and Arrow take
COLUMN = 1_300_000  # bytes that each column of a file takes while it is read: a page, and what is read ahead
LEAST = 100_000_000  # bytes to work with


def parse_size(text: str | int) -> int:
    """A number of bytes, as people write it.

    >>> parse_size("2GB"), parse_size("512 MiB"), parse_size(1000)
    (2000000000, 536870912, 1000)
    """
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if not found:
        raise InputError(f"cannot read the size {text!r}; write it like 2GB, 512MiB or 800MB.")
    return int(float(found[1]) * (UNITS | BINARY)[found[2] or ""])


def shown_size(size: float) -> str:
    """A number of bytes for people.

    >>> shown_size(2_150_000_000), shown_size(812)
    ('2.15 GB', '812 B')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def used() -> int:
    """Bytes that this process has in memory now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not on Linux: the most that it ever had
        return peak()
    return pages * resource.getpagesize()


def peak() -> int:
    """The most bytes that this process has had in memory."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not on Linux, where this would be the parent's peak, if that is larger
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


class Division(NamedTuple):
    """What of the memory is for what."""

    rows: int  # of a batch
    budget: int  # bytes for states


def divide(memory: int, model: int, columns: int, row: int) -> Division:
    """Divide the memory between the rows on their way and the states.

    It must not depend on what the process happens to take, or a run could not be repeated exactly.

    Args:
        memory: that the process may take in all.
        model: bytes of the model.
        columns: that are read.
        row: bytes that one row takes on its way.

    Raises:
        InputError: there is too little.
    """
    left = memory - BASE - 3 * model - columns * COLUMN
    least = max(LEAST, 3 * row)
    if left < least:
        raise InputError(
            f"{shown_size(memory)} of memory are too little: Python, torch, Arrow, the model and pages of the files take "
            f"{shown_size(memory - left)}. Give at least --memory {(memory - left + least) // 10**6 + 1}MB."
        )
    rows = min(left // 3 // row, MOST_ROWS)
    return Division(1 << rows.bit_length() - 1, left // 5 * 2)
