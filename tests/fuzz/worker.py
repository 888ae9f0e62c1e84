"""A process that tries mutations one after the other, within limits of memory and CPU time.

The limits are those of the operating system, so that native code cannot exceed them either. CPU
time is counted, not time: a busy machine changes nothing.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from tests.fuzz.kind import Kind, NotAllowedError

# Address space is cheap: libraries ask for what a header says, and touch what the file has. What
# counts is resident memory.
ADDRESS_SPACE = 64 << 30  # bytes beyond what the process has when it begins
RESIDENT = 300 << 20  # bytes of memory that reading one small file may take
CPU_SECONDS = 20  # that reading one small file may take
KEPT = Path("out/fuzz").absolute()  # files that failed
LINUX = sys.platform.startswith("linux")


def work(kind: type[Kind], first: int, stop: int, messages: int, folder: Path) -> None:
    """Try some mutations, and report each before and after.

    Args:
        kind: of the files.
        first: the number of the first mutation.
        stop: the number after the last.
        messages: a file descriptor; one line of JSON for each report.
        folder: for samples and damaged files.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tempfile.tempdir = str(folder)

    def report(**entry: object) -> None:
        os.write(messages, (json.dumps(entry) + "\n").encode())

    with (folder / "trace").open("w") as trace:
        faulthandler.enable(trace)
        for death in (signal.SIGXCPU, signal.SIGTERM):
            faulthandler.register(death, trace, chain=True)
        own = kind(folder)
        _limit_address_space()
        for number in range(first, stop):
            report(number=number)
            found = _attempt(own, number)
            if "failure" in found:
                keep(own.target, kind, number)
            report(number=number, **found)


def keep(target: Path, kind: type[Kind], number: int) -> None:
    """Keep a file that failed."""
    if target.exists():
        shutil.rmtree(KEPT / f"{kind.name}-{number}", ignore_errors=True)
        shutil.copytree(target, KEPT / f"{kind.name}-{number}")


def _attempt(kind: Kind, number: int) -> dict[str, str]:
    _limit_cpu_time()
    before = _reset_peak()
    try:
        outcome = kind.attempt(number)
    except NotAllowedError as failure:
        return {"failure": str(failure)[:2000]}
    if LINUX and _status("VmHWM") - before > RESIDENT:
        return {"failure": f"took {(_status('VmHWM') - before) >> 20} MB of memory"}
    return {"outcome": outcome}


def _limit_address_space() -> None:
    if LINUX:
        limit = _status("VmSize") + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_cpu_time() -> None:
    """From now on, the process has some seconds until SIGXCPU ends it."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used) + CPU_SECONDS, hard))


def _reset_peak() -> int:
    """Let the kernel measure the peak from now on, and return the memory of now in bytes."""
    if not LINUX:
        return 0
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
