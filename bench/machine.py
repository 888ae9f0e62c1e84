"""The machine, the versions and the command behind the numbers."""

from __future__ import annotations

import ctypes
import datetime
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # from malloc.h
MAPPED_BYTES = 1 << 17  # what glibc begins with
PACKAGES = ("setfold", "torch", "torch_geometric", "slot-attention", "numpy")


def recycle_memory() -> bool:
    """Have the allocator keep what is freed, so that nobody pays for new pages after warm-up.

    By default glibc maps blocks above 32 MB anew each time and keeps or returns smaller ones
    depending on what the process has allocated before, so that whoever allocates much takes up to
    three times as long, partly by luck. Keeping everything is kindest to them, and repeatable.

    Returns:
        Whether there is such an allocator and it listened.
    """
    return _told_allocator(M_MMAP_MAX, 0) and _told_allocator(M_TRIM_THRESHOLD, -1)


def return_memory() -> bool:
    """Have the allocator give large blocks back when they are freed, so that only what is used counts.

    By default glibc learns to keep blocks up to 32 MB, and in how many pieces it keeps them is
    partly luck: some encoders then seem to need twice as much, ten megabytes more or less.

    Returns:
        Whether there is such an allocator and it listened.
    """
    return _told_allocator(M_MMAP_THRESHOLD, MAPPED_BYTES)


def _told_allocator(parameter: int, value: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(parameter, value))


def about(arguments: Sequence[str]) -> dict[str, object]:
    """What must be known to make sense of the results."""
    return {
        "cpu": cpu_model(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "torch threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join(["python -m bench", *arguments]),
    }


def cpu_model() -> str:
    """The CPU's name as lscpu gives it."""
    for line in _output("lscpu").splitlines():
        if line.startswith("Model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "unknown"


def commit() -> str | None:
    """The commit of the sources, marked if they have been changed since; None outside of git."""
    found = _output("git", "rev-parse", "--short=12", "HEAD").strip()
    changes = ("status", "--porcelain", "--untracked-files=no", "--", "setfold", "bench")
    changed = _output("git", "--no-optional-locks", *changes).strip()
    return (found + (" with changes" if changed else "")) or None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    """What a command prints, or nothing if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return ""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def described(facts: dict[str, object]) -> str:
    """One line that names the CPU and what it can do."""
    return (
        f"{facts['cpu']}, {facts['cpu capability']}, {facts['torch threads']} thread, "
        f"torch {torch.__version__}, Python {facts['python']}"
    )
