"""Target 9, from a file: one training step with exact gradients on a set that lies on a disk.

What counts is all that the process holds, torch's libraries and the file's pages among it.

    python -m bench.disk SET.npy     prints its peak in bytes, and the CPU seconds of the step
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
from bench.plan import BOUNDS, NARROW, Plan, power
from bench.results import MEGABYTE, Results
from bench.speed import one_encoding

PIECE = 1_000_000  # elements that are written at once
SPARE = 1.5  # the disk must have room for so many times the file
FLOAT_BYTES = 4


# ---- in the process that trains ------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak bytes and seconds of one step from a file.")
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


# ---- in the process that asks --------------------------------------------------------------------


def measure(results: Results, plan: Plan, directory: Path) -> None:
    """Write a large set, have another process train on it, and delete it.

    Args:
        results: where the target goes, or why there is none.
        plan: how large the set is.
        directory: where there should be room for it; unlike /tmp, surely no part of the memory.
    """
    size = plan.disk_length * NARROW.dim_in * FLOAT_BYTES
    free = shutil.disk_usage(directory).free
    if free < SPARE * size:
        results.omissions.append(
            f"A step from disk was left out: a set of {power(plan.disk_length)} elements needs "
            f"{SPARE * size / 1e9:.1f} GB, and {directory} has {free / 1e9:.1f} GB left."
        )
        return
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        file = Path(folder) / "set.npy"
        _write(file, plan.disk_length)
        peak, seconds = map(float, printed_by("bench.disk", str(file.resolve())))
    claim = f"all of a process that trains from disk, n = {power(plan.disk_length)}"
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
