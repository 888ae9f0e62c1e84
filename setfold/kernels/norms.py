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

    >>> layer_norm(torch.tensor([1e30, -1e30]))
    tensor([ 1., -1.])
    """
    found = fast_layer_norm(values, weight, bias, epsilon)
    return scaled_layer_norm(values, weight, bias, epsilon) if found is None else found


def fast_layer_norm(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> Tensor | None:
    """The layer norm of torch; None if it overflows, or if that cannot be known.

    torch computes the variance from squares. In float32 they overflow from about 1e19 on, and its
    result is zeros or NaN.
    """
    if needs_plain_formula() or values.is_meta or values.numel() == 0:
        return None
    shape = values.shape[-1:]
    found, _, inverse = torch.native_layer_norm(values, shape, weight, bias, epsilon)
    if inverse.requires_grad:
        inverse = inverse.detach()
    return (
        found if inverse.amin().item() > 0 else None
    )  # of the deviation: NaN or 0 if it overflows


def scaled_layer_norm(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> Tensor:
    """The layer norm of rows that are scaled down first if their squares could overflow.

    The normalization cancels the factor. The epsilon is too small to matter before and after.
    """
    limit = torch.finfo(working_dtype(values.dtype)).max ** 0.4
    largest = values.detach().abs().amax(-1, keepdim=True)
    scaled = values / (largest / limit).clamp_min(1)
    return functional.layer_norm(scaled, values.shape[-1:], weight, bias, epsilon)
