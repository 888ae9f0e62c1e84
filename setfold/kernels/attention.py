"""Attention among whole sets, with logits of any size."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from setfold.kernels.modes import accumulator_dtype, needs_plain_formula, widened, without_autocast


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
    heads = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (query, key, value))
    with _differentiable(), without_autocast(device) if wide else nullcontext():
        found = scaled_dot_product_attention(*heads, attn_mask=shown)  # (B, H, m, e / H)
    return found.transpose(1, 2).flatten(2).to(dtype)


def _fit(query: Tensor, key: Tensor) -> bool:
    """Whether no logit can overflow: q . k is at most the larger of |q|^2 and |k|^2."""
    first, second = (widened(tensor.detach()).flatten() for tensor in (query, key))
    return math.isfinite((torch.dot(first, first) + torch.dot(second, second)).item())


def _differentiable() -> AbstractContextManager[object]:
    """A context in which torch's attention can be differentiated forward; its kernels cannot."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return nullcontext()
    return sdpa_kernel(SDPBackend.MATH)
