"""Arithmetic and reading of the Slot Set Encoder, compared with the limits of one core."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from bench.modules import slot_set
from bench.plan import FLOAT_BYTES, Plan, Shape
from bench.results import Results, Roofline
from bench.speed import one_pass
from bench.timing import Contender, interleaved
from setfold.native.build import BuildError, find_compiler

PRODUCTS = {False: 2, True: 5}  # of n x d and d x K numbers in one pass; True is with backward
READS = {False: 1, True: 2}  # of the set in one pass
PEAK, READING = "peak", "sum"
SOURCE = Path(__file__).with_name("peak.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC")
ROUNDS = 1 << 20

ROOFLINE_NOTES = (
    "Counted are the multiplications and additions of the folded algorithm, 2 n d K for a product "
    "of the elements with K slots. Forward has two: scores, and weighted sums. Backward has three "
    "more: scores again, gradients of the weights of attention, and gradients of the slots. "
    "Attention itself (exponentials and divisions), padding to whole vectors and the sums in "
    "float64 are not counted, although they take time: with few features, most of it.",
    "Bytes are those of the set, once forward and twice forward+backward. All sets have the same "
    "number of bytes, more than the caches hold.",
    "The limits are measured in the same rounds, with one thread: arithmetic by a loop of fused "
    "multiplications and additions in registers (bench/peak.c; without a compiler, by torch's "
    "product of large matrices), reading by torch's sum of an array as large as the set.",
)


class Peak(NamedTuple):
    """A program that does nothing but arithmetic."""

    run: Contender
    operations: int


@cache
def arithmetic(width: int) -> Peak:
    """Return the loop of peak.c, or a product of square matrices if it cannot be compiled."""
    try:
        library = _compile()
    except (BuildError, subprocess.CalledProcessError):
        left, right = torch.randn(2, width, width)
        product = torch.empty_like(left)
        return Peak(lambda: torch.mm(left, right, out=product), 2 * width**3)
    numbers = ctypes.c_long(ROUNDS), ctypes.c_float(0.999), ctypes.c_float(0.001)
    operations = ctypes.c_int.in_dll(library, "operations").value
    return Peak(lambda: library.multiply_and_add(*numbers), ROUNDS * operations)


def _compile() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "peak.so"
        command = [*find_compiler(), *FLAGS, str(SOURCE), "-o", str(path)]
        subprocess.run(command, check=True, capture_output=True)
        return ctypes.CDLL(str(path))


def measure(results: Results, plan: Plan, shape: Shape) -> None:
    """Time both passes, arithmetic and a sum, in turn; there is no target for this."""
    length = plan.roofline_bytes // (FLOAT_BYTES * shape.dim_in)
    elements = torch.randn(1, length, shape.dim_in)
    peak = arithmetic(plan.product_width)
    encoders = {backward: slot_set(shape, "mean") for backward in PRODUCTS}
    runs = {
        str(backward): one_pass(encoder, elements, backward)
        for backward, encoder in encoders.items()
    }
    runs[PEAK] = peak.run
    runs[READING] = elements.sum
    samples = interleaved(runs, plan).samples
    size = elements.numel()
    for backward in PRODUCTS:
        results.rooflines.append(
            Roofline(
                shape,
                length,
                backward,
                operations=2 * PRODUCTS[backward] * size * shape.num_slots,
                bytes_read=READS[backward] * size * FLOAT_BYTES,
                seconds=median(samples[str(backward)]),
                peak_operations=peak.operations / median(samples[PEAK]),
                peak_bytes=size * FLOAT_BYTES / median(samples[READING]),
            )
        )
