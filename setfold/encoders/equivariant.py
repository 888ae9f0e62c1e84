"""Deep Sets as published (Zaheer et al., NeurIPS 2017), with layers that subtract a pool."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from setfold.core.absorb import check_encoding
from setfold.core.arguments import check_choice, check_flags, check_modules, check_sizes
from setfold.core.passes import Layer, LayeredSetEncoder
from setfold.core.weights import NARROW, caller_for
from setfold.encoders.deep_sets import Pool
from setfold.errors import InputError
from setfold.kernels.modes import widened

SUBTRACTED = ("max", "mean")


class EquivariantLayer(Layer):
    """activation(Gamma x_i - Lambda pool(X)), for each element: (B, n, d) -> (B, n, dim_out).

    With a shared matrix, Gamma = Lambda, it is activation(Gamma (x_i - pool(X))).

    Args:
        dim_in: width of the elements.
        dim_out: width of the output.
        subtract: the pool, "max" or "mean".
        shared: whether Gamma and Lambda are the same matrix.
        activation: a module; None for nn.Tanh().

    >>> import torch
    >>> EquivariantLayer(3, 8)(torch.randn(2, 100, 3)).shape
    torch.Size([2, 100, 8])
    """

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        subtract: str = "max",
        shared: bool = True,
        activation: nn.Module | None = None,
    ) -> None:
        check_sizes(dim_in=dim_in, dim_out=dim_out)
        check_choice(SUBTRACTED, subtract=subtract)
        check_flags(shared=shared)
        check_modules(activation=activation)
        activation = nn.Tanh() if activation is None else activation
        super().__init__(Pool(dim_in, subtract), _Subtract(dim_in, dim_out, shared, activation))
        self.dim_in = dim_in
        self.dim_out = dim_out
        self.subtract = subtract
        self.shared = shared
        self.activation = activation


class _Subtract(nn.Module):
    """The element-wise half of the layer, given the pool (B, d)."""

    def __init__(self, dim_in: int, dim_out: int, shared: bool, activation: nn.Module) -> None:
        super().__init__()
        self.of_element = nn.Linear(dim_in, dim_out)
        self.of_set = None if shared else nn.Linear(dim_in, dim_out, bias=False)
        self.activation = activation

    def forward(self, elements: Tensor, pooled: Tensor) -> Tensor:
        dtype = self.of_element.weight.dtype
        call, wide, pooled = caller_for(dtype), widened(elements), pooled.unsqueeze(1)  # (B, 1, d)
        if self.of_set is None:
            found = call(self.of_element, wide - pooled)
        else:
            found = call(self.of_element, wide) - call(self.of_set, pooled)
        check_encoding(found)  # the activation may hide an infinity
        found = call(self.activation, found)
        return found.to(elements.dtype) if dtype in NARROW else found


class EquivariantDeepSets(LayeredSetEncoder):
    """Equivariant layers that subtract the set's maximum or mean, then a pool and a head.

    It folds exactly if the chunks can be read `passes` times. `DeepSets` has no such layers and
    folds in one pass.

    Args:
        dim_in: width d of the elements.
        dims: output width of each layer; `passes` is len(dims) + 1.
        subtract: what each layer subtracts, "max" or "mean".
        shared: whether elements and pool are multiplied by the same matrix.
        aggregate: the pool after the last layer: "sum", "mean", "max" or "min", or a list of them.
        activation: a module after each layer; None for nn.Tanh().
        head: a module on (B, dims[-1] * number of aggregates).

    >>> import torch
    >>> encoder = EquivariantDeepSets(dim_in=3, dims=[16, 16], head=nn.Linear(16, 10))
    >>> encoder(torch.randn(2, 100, 3)).shape
    torch.Size([2, 10])
    >>> encoder.passes
    3
    """

    obstacle = "message passing: each layer subtracts the pool of the whole set"

    def __init__(
        self,
        dim_in: int,
        dims: Sequence[int] = (256, 256, 256),
        subtract: str = "max",
        shared: bool = True,
        aggregate: str | Sequence[str] = "max",
        activation: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        if not isinstance(dims, Sequence) or not dims:
            raise InputError(f"dims must be a list of at least one layer width; got {dims!r}.")
        layers = [
            EquivariantLayer(lower, upper, subtract, shared, activation)
            for lower, upper in pairwise([dim_in, *dims])
        ]
        super().__init__(layers, Pool(dims[-1], aggregate), head=head)
        self.dim_in = dim_in
        self.dims = list(dims)
        self.subtract = subtract
        self.shared = shared
        self.aggregate = aggregate if isinstance(aggregate, str) else list(aggregate)
        self.activation = activation
