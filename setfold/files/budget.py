"""Memory: parse and format sizes, measure usage, and split the limit between rows and states."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path
from typing import NamedTuple

from setfold.errors import InputError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
MAX_BATCH_ROWS = 1 << 17
WAITING = 4  # steps of a thread that are begun or wait for those of other threads
BASE_BYTES = 380_000_000  # Python, torch and Arrow
COLUMN_BYTES = 1_300_000  # for each column that is read: a page, and the read-ahead buffer
MIN_BYTES = 100_000_000  # for rows and states


def parse_size(text: str | int) -> int:
    """Parse a number of bytes.

    >>> parse_size("2GB"), parse_size("512 MiB"), parse_size(1000)
    (2000000000, 536870912, 1000)
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text.lower())
    if not match:
        raise InputError(f"cannot parse the size {text!r}; expected 2GB, 512MiB or similar.")
    return int(float(match[1]) * (UNITS | BINARY)[match[2] or ""])


def format_size(size: float) -> str:
    """Format a number of bytes.

    >>> format_size(2_150_000_000), format_size(812)
    ('2.15 GB', '812 B')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def current_memory() -> int:
    """Return the resident memory of this process in bytes."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not on Linux: the peak is the best estimate
        return peak_memory()
    return pages * resource.getpagesize()


def peak_memory() -> int:
    """Return the peak resident memory of this process in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not on Linux, where ru_maxrss may be inherited from the parent process
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


class Budget(NamedTuple):
    """How the memory is split."""

    batch_rows: int  # elements that are read and encoded at a time
    store_bytes: int  # for the tables of states
    batches: int = 2  # that fit in memory at the same time, each in a thread


def split_memory(
    memory: int, model_bytes: int, columns: int, row_bytes: int, stored_bytes: int = 0
) -> Budget:
    """Split the memory limit between batches of rows and states.

    The result depends on the arguments only, not on current usage or the number of threads, so that
    a run is reproducible.

    Args:
        memory: The memory limit of the process in bytes.
        model_bytes: The size of the model.
        columns: The number of columns that are read.
        row_bytes: The memory that one row needs while it is read and encoded.
        stored_bytes: The memory that it takes in the result of a step, at most.

    Raises:
        InputError: The limit is too small.
    """
    available = memory - BASE_BYTES - 3 * model_bytes - columns * COLUMN_BYTES
    row_bytes += (WAITING - 1) * stored_bytes
    needed = max(MIN_BYTES, 3 * row_bytes)
    if available < needed:
        raise InputError(
            f"{format_size(memory)} of memory is too little: Python, torch, Arrow, the model and "
            f"the file buffers take {format_size(memory - available)}. Pass at least "
            f"--memory {(memory - available + needed) // 10**6 + 1}MB."
        )
    rows = min(max(available // 6 // row_bytes, 1), MAX_BATCH_ROWS)
    batch_rows = 1 << rows.bit_length() - 1
    buffers = columns * COLUMN_BYTES  # of a file; those of the first one are not available
    batches = (available // 3 + buffers) // (batch_rows * row_bytes + buffers)
    return Budget(batch_rows, available // 5 * 2, max(1, batches))
