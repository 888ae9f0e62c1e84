"""Any sum over tiles in constant memory: the backward pass recomputes each tile with a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from setfold.kernels.modes import (
    accumulator_dtype,
    differentiable_once,
    differentiate_again,
    is_batched,
)
from setfold.kernels.tiles import tiles

# A tile function: (elements (b, r, d), mask (b, r) | None, *tensors) -> its sum, (b, ...).
TileFunction = Callable[..., Tensor]


def summed_over_tiles(
    function: TileFunction,
    rows: int,
    elements: Tensor,
    mask: Tensor | None,
    tensors: tuple[Tensor | None, ...],
    gradients_only: bool = False,
) -> Tensor:
    """Sum `function` over the tiles of `elements` in float64, with gradients in constant memory.

    Args:
        function: returns the sum of one tile. It must be a sum over elements, so that the result
            does not depend on the tiles.
        rows: number of elements in a tile.
        elements: (B, n, d) with n > 0.
        mask: (B, n), True where present, or None.
        tensors: further arguments of the function, with gradients; None is passed on.
        gradients_only: whether only gradients are needed, so that the sums may be wrong.

    Returns:
        The sums, (B, ...), in float64.
    """
    return _Replay.apply(function, rows, gradients_only, elements, mask, *tensors)


class _Replay(torch.autograd.Function):
    """Saves only its inputs. The backward pass recomputes each tile with a graph."""

    @staticmethod
    def forward(
        ctx: Any,
        function: TileFunction,
        rows: int,
        gradients_only: bool,
        elements: Tensor,
        mask: Tensor | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        ctx.function, ctx.rows = function, rows
        ctx.save_for_backward(elements, mask, *tensors)
        batch, length = elements.shape[:2]
        sums: Tensor | None = None
        for sets, part in tiles(batch, length, rows):
            shown = None if mask is None else mask[sets, part]
            added = function(elements[sets, part], shown, *tensors)
            if sums is None:
                precise = accumulator_dtype(elements.device)
                sums = added.new_zeros(batch, *added.shape[1:], dtype=precise)
            if gradients_only:  # the shape is known
                break
            sums[sets] += added
        assert sums is not None
        return sums

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        elements, mask, *tensors = ctx.saved_tensors
        need_elements, _, *need_tensors = ctx.needs_input_grad[3:]
        needs = [need_elements, *need_tensors]
        if is_batched(grad):

            def whole(some: Tensor, *rest: Tensor | None) -> Tensor:
                return ctx.function(some, mask, *rest)

            found = differentiate_again(whole, (elements, *tensors), needs, grad)
            return None, None, None, found[0], None, *found[1:]
        element_grad, tensor_grads = replayed_gradients(
            ctx.function, ctx.rows, elements, mask, tensors, needs, grad
        )
        return None, None, None, element_grad, None, *tensor_grads


def replayed_gradients(
    function: TileFunction,
    rows: int,
    elements: Tensor,
    mask: Tensor | None,
    tensors: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad: Tensor,
    per_set: tuple[Tensor, ...] = (),
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of a sum over tiles. Each tile is recomputed with its own graph.

    Args:
        function: returns the sum of one tile, called as (tile, mask, *per_set, *tensors).
        rows: number of elements in a tile.
        elements: (B, n, d) with n > 0.
        mask: (B, n), True where present, or None.
        tensors: further arguments of the function, with gradients; None is passed on.
        needs: for the elements and each tensor, whether its gradient is needed.
        grad: the gradient of the sums, (B, ...).
        per_set: constants (B, ...). Each tile gets the rows of its sets.

    Returns:
        The gradient of the elements, and those of the tensors; None if not needed.
    """
    element_grad = torch.empty_like(elements) if needs[0] else None
    tensor_grads = [
        torch.zeros_like(t, dtype=accumulator_dtype(t.device)) if t is not None and need else None
        for t, need in zip(tensors, needs[1:], strict=True)
    ]
    batch, length = elements.shape[:2]
    for sets, part in tiles(batch, length, rows):
        shown = None if mask is None else mask[sets, part]
        leaves = [
            None if t is None else t.detach().requires_grad_(need)
            for t, need in zip([elements[sets, part], *tensors], needs, strict=True)
        ]
        with torch.enable_grad():
            added = function(leaves[0], shown, *(p[sets] for p in per_set), *leaves[1:])
        wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        found = iter(torch.autograd.grad(added, wanted, grad[sets].to(added.dtype)))
        if element_grad is not None:
            element_grad[sets, part] = next(found)
        for total in tensor_grads:
            if total is not None:
                total += next(found)
    cast = [
        None if t is None or g is None else g.to(t.dtype)
        for t, g in zip(tensors, tensor_grads, strict=True)
    ]
    return element_grad, cast
