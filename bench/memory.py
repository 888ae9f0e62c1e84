"""Targets 2, 8 and (for gradients.py) 9: peak memory, each measured in a separate process.

The process creates the input, warms up on a small set (which loads libraries), returns freed
memory, resets the kernel's high-water mark, runs once and reads the mark. It is forked from a
process with all libraries loaded, which saves seconds. Its allocator returns large blocks when they
are freed, because kept blocks would count as used. Linux only: other systems cannot reset the mark.

    python -m bench.memory "setfold mean" WHOLE 100000     prints bytes
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import torch
from torch import nn

from bench.aggregations import AGGREGATIONS, LAYOUTS, one_grouping
from bench.encoders import ENCODERS, EQUIVARIANT, INDUCED, SOFTMAX
from bench.folds import GRADIENTS, one_fold, passes, stream
from bench.machine import return_memory
from bench.peers import ATTENTION, LITERAL, ON_FEATURES, OURS, PEERS, SEEDS
from bench.plan import BOUNDS, GRADIENT_CHUNK, NARROW, ROWS_PER_GROUP, Plan, power
from bench.results import MEGABYTE, MemoryCase, Results, Target, Way
from bench.speed import one_pass
from bench.timing import Contender

STREAM = "setfold, streamed"
BESIDE_PEERS = {  # rows of the first table and lines of its plot
    OURS: (OURS, Way.WHOLE),
    STREAM: (OURS, Way.STREAMED),
    LITERAL: (LITERAL, Way.WHOLE),
    ATTENTION: (ATTENTION, Way.WHOLE),
    SEEDS: (SEEDS, Way.WHOLE),
}
JUDGED_FOLDS = (INDUCED, EQUIVARIANT, SOFTMAX)
WARM_UP_LENGTH = 5_000  # large enough to use the same kernels as large sets
WARM_UP_GROUPS = 20
RESET = Path("/proc/self/clear_refs")


# ---- runs in the measured process ----------------------------------------------------------------


def peak_above_input(small: Contender, run: Contender) -> int:
    """Return the peak bytes of one training pass or fold, above the memory before it.

    Args:
        small: what warms up.
        run: what is measured.
    """
    small()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    RESET.write_text("5")
    before = status("VmRSS")
    run()
    return max(0, status("VmHWM") - before)


def _runs(case: MemoryCase) -> tuple[Contender, Contender]:
    """Return what warms up, and what is measured."""
    name, way, length = case
    if way in LAYOUTS:
        groups = length // ROWS_PER_GROUP
        few, many = (LAYOUTS[way](n) for n in (min(WARM_UP_GROUPS, groups), groups))
        return one_grouping(name, few, True), one_grouping(name, many, True)
    module = (PEERS | ENCODERS | ON_FEATURES)[name].build(NARROW)
    return _warm_up(module, way, length), _prepared(module, way, length)


def _warm_up(module: nn.Module, way: Way, length: int) -> Contender:
    if way in GRADIENTS:
        # the last chunk has the final size, because the size can select another kernel
        small = stream(WARM_UP_LENGTH + length % GRADIENT_CHUNK, WARM_UP_LENGTH)
        return one_fold(module, small, True, GRADIENTS[way])
    return _prepared(module, way, min(WARM_UP_LENGTH, length))


def _prepared(module: nn.Module, way: Way, length: int) -> Contender:
    if way in (Way.WHOLE, Way.TENSOR):
        elements = torch.empty(1, length, NARROW.dim_in).uniform_(-1, 1)
        run = one_pass if way is Way.WHOLE else one_fold
        return run(module, elements, True)
    if way in GRADIENTS:
        return one_fold(module, stream(length, GRADIENT_CHUNK), True, GRADIENTS[way])
    return one_fold(module, stream(length), way is Way.TRAINED)


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}.")


# ---- runs in the process with all libraries loaded -----------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Print peak bytes above the input, for each case.")
    ways = ", ".join(way.name for way in Way)
    parser.add_argument("case", nargs="+", help=f"name, way ({ways}) and number of elements")
    words = iter(parser.parse_args().case)
    warnings.simplefilter("ignore")
    return_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for name, way, length in zip(words, words, words, strict=True):
        print(_forked_peak(MemoryCase(name, Way[way], int(length))), flush=True)


def _forked_peak(case: MemoryCase) -> int:
    """Measure a case in a fork of this process."""
    runs = _runs(case)  # loads libraries once
    gc.freeze()  # otherwise garbage collection in the fork would copy these pages
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)

    def measure() -> None:
        writer.send(peak_above_input(*runs))

    process = context.Process(target=measure)
    process.start()
    writer.close()
    try:
        return int(reader.recv())
    except EOFError:
        raise RuntimeError(f"the process that measured {tuple(case)} died.") from None
    finally:
        process.join()


# ---- runs in the benchmark's process -------------------------------------------------------------


def can_measure() -> bool:
    return RESET.exists()


def measure_peers(results: Results, plan: Plan) -> None:
    """Measure the Slot Set Encoder, on whole sets and streamed, and its peers."""
    measure(results, _peer_cases(plan))


def measure_encoders(results: Results, plan: Plan) -> None:
    """Measure every encoder: whole sets, folds, and folds with backward pass."""
    measure(results, _encoder_cases(plan))


def measure_groups(results: Results, plan: Plan) -> None:
    """Measure every aggregation whose padding fits."""
    rows = plan.groups * ROWS_PER_GROUP
    found = product(LAYOUTS.items(), AGGREGATIONS.values())
    cases = [
        MemoryCase(a.name, way, rows) for (way, sizes), a in found if a.bears(sizes(plan.groups))
    ]
    measure(results, cases)


def measure(results: Results, cases: Iterable[MemoryCase]) -> None:
    """Measure cases in other processes, except those that were measured before."""
    new = [case for case in dict.fromkeys(cases) if case not in results.memory]
    words = [word for case in new for word in (case.name, case.way.name, str(case.length))]
    if words:
        peaks = [int(line) / MEGABYTE for line in printed_by("bench.memory", *words)]
        results.memory |= dict(zip(new, peaks, strict=True))


def _peer_cases(plan: Plan) -> list[MemoryCase]:
    within = [n for n in plan.memory_lengths if n <= plan.peer_memory_limit]
    return [
        MemoryCase(name, way, n)
        for name, way in BESIDE_PEERS.values()
        for n in (plan.memory_lengths if name == OURS else within)
    ]


def _encoder_cases(plan: Plan) -> list[MemoryCase]:
    whole = [
        MemoryCase(peer.name, Way.WHOLE, n)
        for peer in ENCODERS.values()
        for n in plan.encoder_memory_lengths
        if peer.bears(NARROW, n)
    ]
    folds = product(passes(), (Way.STREAMED, Way.TRAINED), plan.fold_lengths)
    return whole + [MemoryCase(*fold) for fold in folds]


def printed_by(module: str, *words: str, **settings: str) -> list[str]:
    """Run a module of this benchmark in a new process and return its output lines.

    Args:
        module: the module.
        words: its arguments.
        settings: environment variables of the process.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *words]
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **settings}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"python -m {module} failed:\n{done.stderr.strip()}")
    return done.stdout.splitlines()


def judge_peers(results: Results, plan: Plan) -> None:
    """Target 2: memory is small and does not grow with the number of elements."""
    for way, doing in {Way.WHOLE: "forward+backward", Way.STREAMED: "streamed"}.items():
        found = [results.megabytes(OURS, way, n) for n in plan.memory_lengths]
        claim = f"{doing}, n = {power(plan.memory_lengths[-1])}"
        results.targets.append(target(2, claim, found[-1], BOUNDS.memory_megabytes))
        results.targets.append(growth(2, doing, plan.memory_lengths, found))


def judge_folds(results: Results, plan: Plan) -> None:
    """Target 8: memory does not grow with the number of chunks."""
    for name in JUDGED_FOLDS:
        lengths = plan.fold_lengths[-2:]
        found = [results.megabytes(name, Way.TRAINED, n) for n in lengths]
        results.targets.append(growth(8, name, lengths, found))


def growth(number: int, doing: str, lengths: tuple[int, ...], found: list[float]) -> Target:
    claim = f"growth from n = {power(lengths[0])} to {power(lengths[-1])}, {doing}"
    return target(number, claim, max(found) - found[0], BOUNDS.memory_growth_megabytes)


def target(number: int, claim: str, measured: float, bound: float, detail: str = "") -> Target:
    return Target(
        number, claim, measured, bound, unit="MB", at_least=False, shape=NARROW, detail=detail
    )


if __name__ == "__main__":
    main()
