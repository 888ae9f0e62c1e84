"""Half precision: float16 and bfloat16 weights are kept as they are, and computed with in float32.

float16 ends at 65504 and begins at 6e-8, so logits and sums leave its range, and 1e-8 is zero. The
formulas of setfold therefore run in float32 and are rounded once, at the end. Modules of the user,
such as features and heads, run in their own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.func import functional_call

NARROW = (torch.float16, torch.bfloat16)
Call = Callable[..., Tensor]  # (module, *inputs) -> its output


def caller_for(dtype: torch.dtype) -> Call:
    """A function that calls a module: as it is or, for a narrow dtype, in float32.

    >>> layer = nn.Linear(2, 2).half()
    >>> caller_for(torch.float16)(layer, torch.ones(1, 2)).dtype
    torch.float32
    """
    return _call_in_single if dtype in NARROW else _call


def _call(module: nn.Module, *inputs: Tensor) -> Tensor:
    return module(*inputs)


def _call_in_single(module: nn.Module, *inputs: Tensor) -> Tensor:
    """Call a module with inputs and weights in float32; gradients flow on to the weights."""
    wide = {
        f"{path}.{name}".lstrip("."): tensor.float()
        for path, part in module.named_modules()  # each once, or functional_call would not undo it
        for name, tensor in chain(part._parameters.items(), part._buffers.items())
        if tensor is not None and tensor.dtype in NARROW
    }
    rows = tuple(tensor.float() for tensor in inputs)
    return functional_call(module, wide, rows, tie_weights=False)
