"""Sums on a GPU by the kernels of `triton_sums.py`. Experimental.

They run for float32 on a CUDA device if triton is installed (the extra `gpu`) and if the sums of a
program fit in registers. Every function returns None otherwise, and the caller uses plain torch.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

MOST_SUMS = 1 << 12  # of one program, padded
MOST_ROWS = 1 << 27  # of one set


def sums(elements: Tensor, mask: Tensor | None, matrix: Tensor, attention: str) -> Tensor | None:
    """sum_i W_ij [x_i, 1] (B, K, d + 1) in float64; see `setfold.native.dispatch.sums`."""
    kernels = _kernels(elements, matrix)
    return None if kernels is None else kernels.sums(elements, mask, matrix, attention)


def gradients(
    elements: Tensor,
    mask: Tensor | None,
    matrix: Tensor,
    attention: str,
    upstream: Tensor,
    need_elements: bool = False,
) -> tuple[Tensor | None, Tensor] | None:
    """dL/dx and dL/dA (d + 1, K) from dL/dsums; see `setfold.native.dispatch.gradients`."""
    kernels = _kernels(elements, matrix)
    if kernels is None:
        return None
    return kernels.gradients(elements, mask, matrix, attention, upstream, need_elements)


def _kernels(elements: Tensor, matrix: Tensor) -> Any:
    if not elements.is_cuda or elements.dtype != torch.float32 or matrix.dtype != torch.float32:
        return None
    kernels = _import_kernels()
    if kernels is None or elements.shape[1] > MOST_ROWS:
        return None
    fits = kernels.padded(elements.shape[2]) * kernels.padded(matrix.shape[1]) <= MOST_SUMS
    return kernels if fits else None


@cache
def _import_kernels() -> Any:
    if importlib.util.find_spec("triton") is None:
        return None
    from setfold.kernels import triton_sums

    return triton_sums
