"""Kernels in Triton: sum_i W_ij [x_i, 1], and its gradients. Experimental: never run on a GPU yet.

Each program reads some rows of one set, block by block, and keeps its sums in registers: no n x K
weights in memory. The sums of the programs are added in float64. `gpu.py` decides when these run;
importing this module needs triton. TRITON_INTERPRET=1 runs them on the CPU, for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from setfold.kernels.scores import EPSILON

BLOCK = 32  # rows at a time: the operands of the products share 100 KB
PROGRAM_ROWS = 4096  # rows of one program
NARROWEST = 16  # sides of a product, at least


@triton.jit
def _weigh(logits, slot_here, epsilon, SOFTMAX: tl.constexpr):
    """Weights (R, K) from logits, and what turns dL/dW - sum_l W_l dL/dW_l into dL/dlogits."""
    spoilt = tl.sum(tl.where(slot_here[None, :], logits * 0.0, 0.0), 1)  # see `spoil` in scores.py
    if SOFTMAX:
        logits = tl.where(slot_here[None, :], logits, float("-inf"))
        weights = tl.exp(logits - tl.max(logits, 1)[:, None])
        weights = weights / (tl.sum(weights, 1) + spoilt)[:, None]
        slope = weights
    else:
        sigmoid = tl.where(slot_here[None, :], tl.sigmoid(logits), 0.0)
        weights = tl.where(slot_here[None, :], sigmoid + epsilon, 0.0)
        scale = 1.0 / (tl.sum(weights, 1) + spoilt)[:, None]
        weights = weights * scale
        slope = sigmoid * (1.0 - sigmoid) * scale
    return weights, slope


@triton.jit
def _forward(
    x_ptr, mask_ptr, matrix_ptr, sums_ptr, length, rows, width, slots, epsilon,
    D: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    HAS_MASK: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """Write the sums (d + 1, K) of the rows of one program."""
    batch, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, slot = tl.arange(0, D), tl.arange(0, K)
    column_here, slot_here = columns < width, slot < slots
    table = columns[:, None] * slots + slot[None, :]
    table_here = column_here[:, None] & slot_here[None, :]
    matrix = tl.load(matrix_ptr + table, mask=table_here, other=0.0)
    offset = tl.load(matrix_ptr + width * slots + slot, mask=slot_here, other=0.0)
    total, mass = tl.zeros((D, K), tl.float32), tl.zeros((K,), tl.float32)
    end = tl.minimum(length, (part + 1) * rows)
    for start in range(part * rows, end, R):
        row = start + tl.arange(0, R)
        here = row < end
        place = batch * length + row
        tile_here = here[:, None] & column_here[None, :]
        x = tl.load(x_ptr + place[:, None] * width + columns[None, :], mask=tile_here, other=0.0)
        logits = tl.dot(x, matrix, input_precision="ieee") + offset[None, :]
        weights, _ = _weigh(logits, slot_here, epsilon, SOFTMAX)
        if HAS_MASK:
            here = here & (tl.load(mask_ptr + place, mask=here, other=0) != 0)
        weights = tl.where(here[:, None], weights, 0.0)
        total += tl.dot(tl.trans(x), weights, input_precision="ieee")
        mass += tl.sum(weights, 0)
    out = sums_ptr + (batch * tl.num_programs(1) + part) * (width + 1) * slots
    tl.store(out + table, total, mask=table_here)
    tl.store(out + width * slots + slot, mass, mask=slot_here)


@triton.jit
def _backward(
    x_ptr, mask_ptr, matrix_ptr, upstream_ptr, grads_ptr, x_grad_ptr,
    length, rows, width, slots, epsilon,
    D: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    HAS_MASK: tl.constexpr, SOFTMAX: tl.constexpr, NEED_ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Write dL/dA (d + 1, K) of the rows of one program, and dL/dx of these rows."""
    batch, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns, slot = tl.arange(0, D), tl.arange(0, K)
    column_here, slot_here = columns < width, slot < slots
    table = columns[:, None] * slots + slot[None, :]
    table_here = column_here[:, None] & slot_here[None, :]
    matrix = tl.load(matrix_ptr + table, mask=table_here, other=0.0)
    offset = tl.load(matrix_ptr + width * slots + slot, mask=slot_here, other=0.0)
    above = upstream_ptr + batch * (width + 1) * slots
    total_grad = tl.load(above + table, mask=table_here, other=0.0)  # (D, K)
    mass_grad = tl.load(above + width * slots + slot, mask=slot_here, other=0.0)
    total, mass = tl.zeros((D, K), tl.float32), tl.zeros((K,), tl.float32)
    end = tl.minimum(length, (part + 1) * rows)
    for start in range(part * rows, end, R):
        row = start + tl.arange(0, R)
        here = row < end
        place = batch * length + row
        tile = place[:, None] * width + columns[None, :]
        tile_here = here[:, None] & column_here[None, :]
        x = tl.load(x_ptr + tile, mask=tile_here, other=0.0)
        logits = tl.dot(x, matrix, input_precision="ieee") + offset[None, :]
        weights, slope = _weigh(logits, slot_here, epsilon, SOFTMAX)
        if HAS_MASK:
            here = here & (tl.load(mask_ptr + place, mask=here, other=0) != 0)
        grad = tl.dot(x, total_grad, input_precision="ieee") + mass_grad[None, :]  # dL/dW
        grad = (grad - tl.sum(weights * grad, 1)[:, None]) * slope  # dL/dlogits
        grad = tl.where(here[:, None], grad, 0.0)
        total += tl.dot(tl.trans(x), grad, input_precision="ieee")
        mass += tl.sum(grad, 0)
        if NEED_ELEMENTS:
            weights = tl.where(here[:, None], weights, 0.0)
            found = tl.dot(weights, tl.trans(total_grad), input_precision="ieee")
            found += tl.dot(grad, tl.trans(matrix), input_precision="ieee")
            tl.store(x_grad_ptr + tile, found, mask=tile_here)
    out = grads_ptr + (batch * tl.num_programs(1) + part) * (width + 1) * slots
    tl.store(out + table, total, mask=table_here)
    tl.store(out + width * slots + slot, mass, mask=slot_here)


def padded(size: int) -> int:
    """The side of a product that holds `size` numbers: a power of two, at least 16."""
    return max(NARROWEST, 1 << (size - 1).bit_length())


def sums(elements: Tensor, mask: Tensor | None, matrix: Tensor, attention: str) -> Tensor:
    """sum_i W_ij [x_i, 1] (B, K, d + 1) in float64; see `setfold.native.dispatch.sums`."""
    batch, length, width = elements.shape
    slots, parts = matrix.shape[1], triton.cdiv(length, PROGRAM_ROWS)
    elements, matrix = elements.contiguous(), matrix.contiguous()
    shown = elements if mask is None else mask.contiguous().view(torch.uint8)
    found = elements.new_empty(batch, parts, width + 1, slots)
    _forward[(batch, parts)](
        *(elements, shown, matrix, found, length, PROGRAM_ROWS, width, slots, EPSILON),
        *(padded(width), padded(slots), BLOCK, mask is not None, attention == "softmax"),
        num_stages=1,
    )
    return found.sum(1, dtype=torch.float64).transpose(1, 2)


def gradients(
    elements: Tensor,
    mask: Tensor | None,
    matrix: Tensor,
    attention: str,
    upstream: Tensor,
    need_elements: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """dL/dx and dL/dA (d + 1, K) from dL/dsums; see `setfold.native.dispatch.gradients`."""
    batch, length, width = elements.shape
    slots, parts = matrix.shape[1], triton.cdiv(length, PROGRAM_ROWS)
    elements, matrix = elements.contiguous(), matrix.contiguous()
    shown = elements if mask is None else mask.contiguous().view(torch.uint8)
    above = upstream.to(elements.dtype).transpose(1, 2).contiguous()  # (B, d + 1, K)
    found = elements.new_empty(batch, parts, width + 1, slots)
    elements_grad = torch.empty_like(elements) if need_elements else None
    written = elements if elements_grad is None else elements_grad
    _backward[(batch, parts)](
        *(elements, shown, matrix, above, found, written),
        *(length, PROGRAM_ROWS, width, slots, EPSILON),
        *(padded(width), padded(slots), BLOCK, mask is not None, attention == "softmax"),
        need_elements,
        num_stages=1,
    )
    return elements_grad, found.sum((0, 1), dtype=torch.float64)
