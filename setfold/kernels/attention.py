"""Attention among whole sets, with logits of any size."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from setfold.kernels.modes import (
    accumulator_dtype,
    needs_plain_formula,
    transforms,
    without_autocast,
    working_dtype,
)


def attend(
    query: Tensor, key: Tensor, value: Tensor, num_heads: int, mask: Tensor | None
) -> Tensor:
    """softmax(Q_h K_h^T / sqrt(e / H)) V_h of each head, side by side, by torch's kernels.

    They overflow if a logit does. Where all logits of a query are -inf they return zeros, as if all
    elements were masked. So if logits might overflow, they are computed in float64.

    Args:
        query: (B, m, e).
        key: (B, n, e).
        value: (B, n, e).
        num_heads: the number H of heads, which divides e.
        mask: (B, n), True where an element is present; None if all are.

    Returns:
        (B, m, e).
    """
    dtype, device, shown = query.dtype, query.device, None if mask is None else mask[:, None, None]
    wide = not (needs_plain_formula() or query.is_meta or _fit(query, key))
    if wide:
        query, key, value = (t.to(accumulator_dtype(device)) for t in (query, key, value))
    query, key, value = (
        tensor.unflatten(-1, (num_heads, -1)).transpose(1, 2) for tensor in (query, key, value)
    )
    with _transformable(), without_autocast(device) if wide else nullcontext():
        found = scaled_dot_product_attention(query, key, value, attn_mask=shown)
    return found.transpose(1, 2).flatten(2).to(dtype)


def _fit(query: Tensor, key: Tensor) -> bool:
    """Whether no logit can overflow: it is at most the product of the lengths."""
    dtype = working_dtype(query.dtype)
    lengths = [torch.linalg.vector_norm(t.detach(), dtype=dtype) for t in (query, key)]
    return math.isfinite((lengths[0] * lengths[1]).item())


def _transformable() -> AbstractContextManager[object]:
    """A context with attention that has rules for forward-mode AD and vmap; torch's kernels have none."""
    if torch.compiler.is_compiling() or not transforms():
        return nullcontext()
    return sdpa_kernel(SDPBackend.MATH)
