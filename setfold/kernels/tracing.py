"""Where kernels must be the plain formula, and how a recomputing kernel is differentiated twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def needs_plain_formula() -> bool:
    """Whether a compiler, a function transform or forward-mode AD is active.

    They do not support custom autograd functions, or not those that write into buffers.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def differentiate_again(
    formula: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    """The gradients of a formula with a graph of their own, for second derivatives.

    Args:
        formula: maps the inputs to the output, differentiably.
        inputs: saved by the forward pass, with their graph.
        needs: which inputs need a gradient.
        grad: of the output.
    """
    with torch.enable_grad():
        # views, so that the gradients stop here; the second derivative flows on to the inputs
        views = [tensor.view_as(tensor) for tensor in inputs]
        output = formula(*views)
        wanted = [view for view, need in zip(views, needs, strict=True) if need]
        found = iter(torch.autograd.grad(output, wanted, grad.to(output.dtype), create_graph=True))
    return [next(found) if need else None for need in needs]
