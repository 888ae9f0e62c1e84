"""Target 9, from a file: one training step with exact gradients on a set on disk.

Measures the peak memory of the whole process, including torch's libraries and mapped pages.

    python -m bench.disk SET.npy     prints peak bytes and CPU seconds of the step
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch

import setfold
from bench.memory import printed_by, status, target
from bench.modules import slot_set
from bench.plan import BOUNDS, FLOAT_BYTES, NARROW, Plan, power
from bench.results import MEGABYTE, Results
from bench.speed import one_encoding

PIECE = 1_000_000  # elements per write
SPARE = 1.5  # required free space as a multiple of the file size


# ---- runs in the measured process ----------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Print peak bytes and seconds of one step.")
    parser.add_argument("file", type=Path, help="a set (1, n, d) as .npy")
    file = parser.parse_args().file
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    encoder = slot_set(NARROW, "mean")
    elements = np.load(file, mmap_mode="r")
    begin = time.thread_time()
    one_encoding(encoder, lambda: setfold.fold(encoder, elements), backward=True)()
    seconds = time.thread_time() - begin
    print(status("VmHWM"), seconds, sep="\n")


# ---- runs in the benchmark's process -------------------------------------------------------------


def measure(results: Results, plan: Plan, directory: Path) -> None:
    """Write a large set, run a training step on it in another process, and delete it.

    Args:
        results: receives the target, or the reason why it was omitted.
        plan: plan with the size of the set.
        directory: folder for the set; it must be on disk, while /tmp can be in memory.
    """
    size = plan.disk_length * NARROW.dim_in * FLOAT_BYTES
    free = shutil.disk_usage(directory).free
    if free < SPARE * size:
        results.omissions.append(
            f"The training step from disk was left out: a set of {power(plan.disk_length)} "
            f"elements needs {SPARE * size / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free in "
            f"{directory}."
        )
        return
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        file = Path(folder) / "set.npy"
        _write(file, plan.disk_length)
        peak, seconds = map(float, printed_by("bench.disk", str(file.resolve())))
    claim = f"peak memory of a process that trains from disk, n = {power(plan.disk_length)}"
    bound = BOUNDS.process_megabytes
    detail = f"a file of {size / MEGABYTE:,.0f} MB, {seconds:.3g} s"
    results.targets.append(target(9, claim, peak / MEGABYTE, bound, detail))


def _write(file: Path, length: int) -> None:
    draw = np.random.default_rng(0)
    shape = (1, length, NARROW.dim_in)
    elements = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=shape)
    for first in range(0, length, PIECE):
        piece = elements[:, first : first + PIECE]
        piece[:] = draw.random(piece.shape, dtype=np.float32)


if __name__ == "__main__":
    main()
