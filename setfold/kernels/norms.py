"""Layer normalization of numbers of any size."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from setfold.kernels.modes import needs_plain_formula, working_dtype

EPSILON = 1e-5


def layer_norm(
    values: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon: float = EPSILON,
) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) over the last dimension, times weight plus bias.

    torch computes the variance from squares. In float32 they overflow from about 1e19 on, and its
    result is zeros or NaN. Such rows are scaled down first. The normalization cancels the factor,
    and the epsilon is far too small to matter before and after.

    >>> layer_norm(torch.tensor([1e30, -1e30]))
    tensor([ 1., -1.])
    """
    if weight is not None:  # autocast may have narrowed the values
        values = values.to(torch.promote_types(values.dtype, weight.dtype))
    shape = values.shape[-1:]
    if not (needs_plain_formula() or values.is_meta or values.numel() == 0):
        normal, _, inverse = torch.native_layer_norm(values, shape, weight, bias, epsilon)
        if inverse.detach().amin().item() > 0:  # of the deviation: 0 or NaN if it overflowed
            return normal
    limit = torch.finfo(working_dtype(values.dtype)).max ** 0.4  # so that squares are finite
    largest = values.detach().abs().amax(-1, keepdim=True)
    scaled = values / (largest / limit).clamp_min(1)
    return functional.layer_norm(scaled, shape, weight, bias, epsilon)
