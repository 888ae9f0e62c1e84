"""Target 2: peak memory above the input, each measurement in a process of its own.

The process makes the input in place, warms up on a small set, so that libraries loaded late
are not blamed on the run, hands freed memory back, resets the kernel's high-water mark, runs once
and reads the mark. Linux only: other systems do not let the mark be reset.

    python -m bench.memory "setfold mean" 100000     prints bytes
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import setfold
from bench.peers import ATTENTION, OURS, PEERS, SEEDS, slot_set
from bench.plan import BOUNDS, NARROW, Plan, power
from bench.results import MEGABYTE, MemoryPoint, Results, Target
from bench.speed import one_pass

STREAM = "setfold, streamed"
PEER_NAMES = ("literal mean", ATTENTION, SEEDS)
WARM_UP_LENGTH = 5_000  # long enough for the kernels that long sets take
STREAM_CHUNK = 10_000
RESET = Path("/proc/self/clear_refs")


# ---- in the process that measures ----------------------------------------------------------------


def peak_above_input(name: str, length: int) -> int:
    """Bytes that one training pass, or one stream, takes beyond what was there before."""
    if name == STREAM:
        warm_up, run = _stream(WARM_UP_LENGTH), _stream(length)
    else:
        module = PEERS[name].build(NARROW)
        small, elements = (
            torch.empty(1, n, NARROW.dim_in).uniform_(-1, 1) for n in (WARM_UP_LENGTH, length)
        )
        warm_up, run = one_pass(module, small, True), one_pass(module, elements, True)
    warm_up()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    RESET.write_text("5")
    before = _status("VmRSS")
    run()
    return max(0, _status("VmHWM") - before)


def _stream(length: int) -> Callable[[], object]:
    """A fold over chunks that never stand in memory together."""
    encoder = slot_set(NARROW, "mean")

    def run() -> None:
        with torch.no_grad():
            chunks = (
                torch.empty(1, min(STREAM_CHUNK, length - first), NARROW.dim_in).uniform_(-1, 1)
                for first in range(0, length, STREAM_CHUNK)
            )
            setfold.fold(encoder, chunks)

    return run


def _status(field: str) -> int:
    """One of the kernel's figures about this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}.")


# ---- in the process that asks --------------------------------------------------------------------


def can_measure() -> bool:
    return RESET.exists()


def points(plan: Plan) -> list[tuple[str, int]]:
    """Who is measured at which n."""
    ours = [(name, n) for name in (OURS, STREAM) for n in plan.memory_lengths]
    within = [n for n in plan.memory_lengths if n <= plan.peer_memory_limit]
    return ours + [(name, n) for name in PEER_NAMES for n in within]


def measure(results: Results, plan: Plan, name: str, length: int) -> None:
    """Have processes of their own measure one point."""
    samples = tuple(_measured_elsewhere(name, length) for _ in range(plan.memory_repeats))
    results.memory.append(MemoryPoint(name, length, samples))


def _measured_elsewhere(name: str, length: int) -> float:
    command = [sys.executable, "-W", "ignore", "-m", "bench.memory", name, str(length)]
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return int(done.stdout) / MEGABYTE


def judge(results: Results, plan: Plan) -> None:
    """Target 2: little, and no more for more elements."""
    found = {(point.name, point.length): point.megabytes for point in results.memory}
    last = max(plan.memory_lengths)
    first = min(plan.memory_lengths)
    what = {OURS: "forward+backward", STREAM: "streamed"}
    for name, doing in what.items():
        claim = f"{doing}, n = {power(last)}"
        results.targets.append(_target(claim, found[name, last], BOUNDS.memory_megabytes))
        growth = max(found[name, n] for n in plan.memory_lengths) - found[name, first]
        claim = f"growth from n = {power(first)}, {doing}"
        results.targets.append(_target(claim, growth, BOUNDS.memory_growth_megabytes))


def _target(claim: str, measured: float, bound: float) -> Target:
    return Target(2, claim, measured, bound, unit="MB", at_least=False, shape=NARROW)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Peak memory of one run above its input, in bytes."
    )
    parser.add_argument("name", help=f"the name of a peer, or {STREAM!r}")
    parser.add_argument("length", type=int, help="number of elements")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(peak_above_input(arguments.name, arguments.length))


if __name__ == "__main__":
    main()
