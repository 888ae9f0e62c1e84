"""Arithmetic and reading of the Slot Set Encoder, compared with the limits of one core."""

from __future__ import annotations

from statistics import median

import torch

from bench.modules import slot_set
from bench.plan import FLOAT_BYTES, Plan, Shape
from bench.results import Results, Roofline
from bench.speed import one_pass
from bench.timing import interleaved

PRODUCTS = {False: 2, True: 5}  # of n x d and d x K numbers in one pass; True is with backward
READS = {False: 1, True: 2}  # of the set in one pass
PRODUCT, READING = "matrix product", "sum"

ROOFLINE_NOTES = (
    "Counted are the multiplications and additions of the folded algorithm, 2 n d K for a product "
    "of the elements with K slots. Forward has two: scores, and weighted sums. Backward has three "
    "more: scores again, gradients of the weights of attention, and gradients of the slots. "
    "Attention itself (exponentials and divisions), padding to whole vectors and the sums in "
    "float64 are not counted, although they take time: with few features, most of it.",
    "Bytes are those of the set, once forward and twice forward+backward. All sets have the same "
    "number of bytes, more than the caches hold.",
    "The limits are measured by torch in the same rounds, with one thread: arithmetic by a product "
    "of large float32 matrices, reading by the sum of an array as large as the set. These are "
    "speeds that a program reaches; the nominal limits of the CPU are higher.",
)


def measure(results: Results, plan: Plan, shape: Shape) -> None:
    """Time both passes, a matrix product and a sum, in turn; there is no target for this."""
    length = plan.roofline_bytes // (FLOAT_BYTES * shape.dim_in)
    elements = torch.randn(1, length, shape.dim_in)
    left, right = torch.randn(2, plan.product_width, plan.product_width)
    product = torch.empty_like(left)
    encoders = {backward: slot_set(shape, "mean") for backward in PRODUCTS}
    runs = {
        str(backward): one_pass(encoder, elements, backward)
        for backward, encoder in encoders.items()
    }
    runs[PRODUCT] = lambda: torch.mm(left, right, out=product)
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
                peak_operations=2 * plan.product_width**3 / median(samples[PRODUCT]),
                peak_bytes=size * FLOAT_BYTES / median(samples[READING]),
            )
        )
