"""The Slot Set Encoder on one small set, from its parameters to the encoding, with gradients.

A call on a small set takes longer than its arithmetic, and a graph of many nodes several times as
long. So one node stands for all of them, with a compiled kernel for each direction.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from setfold.kernels.modes import differentiate_again, is_batched
from setfold.kernels.scores import weigh
from setfold.native import slots as native
from setfold.native.slots import Settings, SlotTensors

SMALL_PRODUCT = 1 << 19  # multiplications of a projection that take less time than a call


def is_faster(elements: Tensor, query: Tensor, value: Tensor, num_slots: int) -> bool:
    """Whether `encode_one_set` is faster than folding the queries into the keys.

    Args:
        elements: (1, n, d).
        query: (d_key, h), a weight.
        value: (d_out, d), a weight.
        num_slots: the number K of slots.
    """
    small = elements.numel() * value.shape[0] <= SMALL_PRODUCT
    return small or native.can_encode_slots(elements, query, value, num_slots)


def encode_one_set(given: SlotTensors, settings: Settings) -> Tensor | None:
    """The encoding (1, K, d_out) of one small set; None if it is not finite."""
    encoding: Tensor | None = _apply(settings, *given)
    if encoding is None:
        encoding = plain_encoding(given, settings)
        if not math.isfinite(encoding.detach().sum().item()):
            return None
    return encoding


def plain_encoding(given: SlotTensors, settings: Settings) -> Tensor:
    """The algorithm as printed: it has fewer nodes than one that folds the query into the keys."""
    slots, elements = given.base, given.elements[0]
    if given.deviation is not None and given.noise is not None:
        slots = torch.addcmul(slots, given.deviation, given.noise)
    slots = layer_norm(slots, slots.shape[-1:], given.norm, given.norm_bias, settings.epsilon)
    query = linear(slots, given.query, given.query_bias) * given.query.shape[0] ** -0.5
    weights = weigh(linear(elements, given.key, given.key_bias) @ query.t(), settings.attention)
    total = (weights.t() @ linear(elements, given.value, given.value_bias)).unsqueeze(0)
    return total if settings.divisor == 1 else total / settings.divisor


class _OneSet(torch.autograd.Function):
    """`plain_encoding` by compiled kernels; None if they cannot."""

    @staticmethod
    def forward(ctx: Any, settings: Settings, *given: Tensor | None) -> Tensor | None:
        found = native.encode_slots(given, settings)
        if found is None:
            return None
        ctx.save_for_backward(*given)
        encoding, ctx.kept = found
        ctx.settings = settings
        return encoding

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        given, (_, *needs) = ctx.saved_tensors, ctx.needs_input_grad
        if not (torch.is_grad_enabled() or is_batched(grad)):
            found = native.encode_slots_back(given, ctx.kept, grad, needs)
            if found is not None:
                return None, *found
        # create_graph=True, a batch of gradients, or something has replaced what was saved

        def formula(*inputs: Any) -> Tensor:
            return plain_encoding(SlotTensors(*inputs), ctx.settings)

        return None, *differentiate_again(formula, given, needs, grad)


# Function.apply without its check for dead functorch wrappers: no transform is active here
_apply = super(torch.autograd.Function, _OneSet).apply
