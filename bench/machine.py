"""Information about the machine, versions and command; settings of the memory allocator."""

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

from setfold.native import library

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # from malloc.h
MAPPED_BYTES = 1 << 17  # glibc's initial value
PACKAGES = ("setfold", "torch", "torch_geometric", "slot-attention", "numpy")


def recycle_memory() -> bool:
    """Make the allocator keep freed memory, so that no module waits for new pages after warm-up.

    By default, glibc maps blocks above 32 MB on every allocation, and keeps or returns smaller
    blocks depending on earlier allocations. Modules that allocate much then take up to three times
    as long, with large variance. Keeping all memory favours these modules and is reproducible.

    Returns:
        Whether the allocator supports the setting.
    """
    return _set_allocator(M_MMAP_MAX, 0) and _set_allocator(M_TRIM_THRESHOLD, -1)


def return_memory() -> bool:
    """Make the allocator return large blocks when they are freed, so that only used memory counts.

    By default, glibc keeps freed blocks up to 32 MB, and their fragmentation varies: the peak of
    some encoders then doubles, with a variance of ten megabytes.

    Returns:
        Whether the allocator supports the setting.
    """
    return _set_allocator(M_MMAP_THRESHOLD, MAPPED_BYTES)


def _set_allocator(parameter: int, value: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(parameter, value))


def about(arguments: Sequence[str]) -> dict[str, object]:
    """Collect the facts needed to interpret the results."""
    return {
        "cpu": cpu_model(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "kernels": library.describe(),
        "torch threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": " ".join(["python -m bench", *arguments]),
    }


def cpu_model() -> str:
    """Return the name of the CPU from lscpu."""
    for line in _output("lscpu").splitlines():
        if line.startswith("Model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or "unknown"


def commit() -> str | None:
    """Return the git commit, marked if there are local changes; None without git."""
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
    """Return the output of a command; empty if it does not exist or fails."""
    if shutil.which(command[0]) is None:
        return ""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def described(facts: dict[str, object]) -> str:
    """Describe CPU, versions and kernels in one line."""
    return (
        f"{facts['cpu']}, {facts['cpu capability']}, {facts['torch threads']} thread, "
        f"torch {torch.__version__}, Python {facts['python']}. setfold's kernels: "
        f"{facts['kernels']}"
    )
