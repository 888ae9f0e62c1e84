"""What kernels depend on besides their inputs: precision, autocast, compilers and derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

Gradients = tuple[Tensor | None, ...]


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """float64, because running sums in lower precision stagnate; float32 on MPS, without float64.

    >>> accumulator_dtype(torch.device("cpu"))
    torch.float64
    """
    return torch.float32 if device.type == "mps" else torch.float64


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16 and bfloat16, whose sums and logits overflow or round away; else itself.

    >>> working_dtype(torch.float16), working_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    """The tensor in its working dtype."""
    return tensor.to(working_dtype(tensor.dtype))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context that disables autocast, so that running totals are not rounded."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def autocasts(device: torch.device) -> bool:
    """Whether autocast is enabled for a device; False for the meta device, which has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def needs_plain_formula() -> bool:
    """Whether a compiler, a tracer, a function transform or forward-mode AD is active.

    They do not support custom autograd functions, or not those that write into buffers, and the
    value of a tensor may be unknown. Nothing that is computed meanwhile may be kept.
    """
    return (
        torch.compiler.is_compiling()
        or transforms()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_tracing()
    )


def transforms() -> bool:
    """Whether a transform of torch.func or forward-mode AD is active."""
    return bool(torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)


def vectorizes() -> bool:
    """Whether torch.vmap is active, in which no shape may depend on a value."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


def is_batched(grad: Tensor) -> bool:
    """Whether a gradient stands for several, as in a vectorized Jacobian, and has no memory.

    A backward pass is not told otherwise: `transforms` may be False there.
    """
    try:
        grad.data_ptr()
    except RuntimeError:
        return True
    return False


def differentiable_once(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Decorate a backward pass to raise RuntimeError if second derivatives are requested.

    torch's once_differentiable raises only if the incoming gradient requires a gradient. Otherwise
    it drops the second derivative silently.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Tensor) -> Gradients:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "second derivatives (create_graph=True) are not available for large inputs, whose "
                "backward pass recomputes them without a graph. Use sets of at most 4,096 "
                'elements, or fold chunks of that size with gradient="autograd".'
            )
        return backward(ctx, *grads)

    return checked


def differentiate_again(
    formula: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    needs: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:
    """The gradients of a formula by torch, in a backward pass whose own code cannot find them.

    With create_graph=True they have a graph of their own, for second derivatives.

    Args:
        formula: maps the inputs to the output, differentiably.
        inputs: saved by the forward pass, with their graph; None is passed on.
        needs: which inputs need a gradient.
        grad: of the output.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, so that the gradients stop here; the second derivative flows on to the inputs
        views = [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
        output = formula(*views)
        wanted = [v for v, need in zip(views, needs, strict=True) if need and v is not None]
        found = iter(torch.autograd.grad(output, wanted, grad.to(output.dtype), create_graph=again))
    return [next(found) if need else None for need in needs]
