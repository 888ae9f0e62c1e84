"""torch's layers with the same weights, for inputs on which torch's own fail; hooks of layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.module import _has_any_global_hook

from setfold.core.absorb import check_encoding
from setfold.kernels.modes import transforms
from setfold.kernels.norms import fast_layer_norm, layer_norm, scaled_layer_norm

SMALL = 1e-8  # slots that hold means are as small as 1 / K


def runs_only(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether calling a module runs the forward of a class of torch, and nothing else."""
    return (
        type(module) is kind
        and "forward" not in vars(module)
        and module._compiled_call_impl is None
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not _has_any_global_hook()
    )


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm over the last dimension, for finite numbers of any size.

    Raises:
        NonFiniteError: the input is not finite, because an earlier layer overflowed.

    >>> LayerNorm(2)(torch.tensor([1e30, -1e30])).detach()
    tensor([ 1., -1.])
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != self.weight.dtype:  # autocast may have narrowed it
            input = input.to(torch.promote_types(input.dtype, self.weight.dtype))
        found = fast_layer_norm(input, self.weight, self.bias, self.eps)
        if found is None:
            check_encoding(input)
            found = scaled_layer_norm(input, self.weight, self.bias, self.eps)
        return found


class NormalizedReLU(nn.Module):
    """ReLU, then layer normalization over the last dimension, without parameters.

    >>> NormalizedReLU()(torch.tensor([-1.0, 0.1, 0.3]))
    tensor([-1.0690, -0.2673,  1.3363])
    """

    def __init__(self) -> None:
        super().__init__()

    def forward(self, input: Tensor) -> Tensor:
        return layer_norm(input.relu(), epsilon=SMALL)


class GRUCell(nn.GRUCell):
    """torch's GRUCell, for transforms of torch.func, too; torch's own has no rule for vmap.

    >>> cell, inputs = GRUCell(3, 4), torch.randn(2, 5, 3)
    >>> torch.vmap(cell)(inputs, torch.zeros(2, 5, 4)).shape
    torch.Size([2, 5, 4])
    """

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        if hx is None or not transforms():
            return super().forward(input, hx)
        reset, update, new = linear(input, self.weight_ih, self.bias_ih).chunk(3, -1)
        reset_by, update_by, new_by = linear(hx, self.weight_hh, self.bias_hh).chunk(3, -1)
        candidate = (new + (reset + reset_by).sigmoid() * new_by).tanh()
        return candidate + (update + update_by).sigmoid() * (hx - candidate)
