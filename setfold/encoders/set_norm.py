"""Normalization by the mean and variance of the set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.arguments import check_choice, check_positive, check_sizes
from setfold.core.passes import Layer
from setfold.core.readout import Count, mean_of
from setfold.core.statistic import CentralMoments, Field, Fields, Statistics
from setfold.core.weights import NARROW
from setfold.encoders.parameter_free import ParameterFreeEncoder
from setfold.kernels.modes import working_dtype

STATISTICS_OF = ("feature", "set")
SHRINK = 2.0**-4  # a power of two, which rounds nothing


class Moments(ParameterFreeEncoder):
    """The mean and the variance of each feature over the set: (B, n, d) -> (B, 2, d).

        mean = sum_i x_i / n          variance = sum_i (x_i - mean)^2 / n

    The state keeps the count, the mean and the sum of squared distances from the mean, which join
    without cancellation.

    Args:
        dim_in: width d of the elements.

    >>> Moments(1)(torch.tensor([[[1.0], [3.0]]]))
    tensor([[[2.],
             [1.]]])
    """

    _rounds = True  # to the dtype of the elements; else the readout is float64, as in the state

    def fields(self, frame: tuple[Tensor, ...]) -> Fields:
        return {"moments": Field(CentralMoments(), (self.dim_in,))}

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        return {"moments": CentralMoments().absorb(elements, mask)}

    def finish(self, statistics: Statistics, count: Count, prepared: Any) -> Tensor:
        _, mean, squares = statistics["moments"]
        found = torch.stack([mean, mean_of(squares, count)], 1)
        return found.to(self.like.dtype) if self._rounds else found


class SetNorm(Layer):
    """Subtracts the mean of the set from each element and divides by the standard deviation.

        y_i = weight (x_i - mean) / sqrt(variance + epsilon) + bias

    Mean and variance are those of each feature over the set, or of all features of all elements
    together (Zhang et al., "Set Norm and Equivariant Skip Connections", ICML 2022). Elements
    (B, n, d) keep their shape.

    Args:
        dim: width of the elements.
        over: "feature" for one mean and variance per feature, "set" for one per set.
        epsilon: a small number, added to the variance.

    >>> layer = SetNorm(3)
    >>> layer(5 + torch.randn(2, 100, 3)).mean(1).abs().max() < 1e-5
    tensor(True)
    """

    def __init__(self, dim: int, over: str = "feature", epsilon: float = 1e-5) -> None:
        check_sizes(dim=dim)
        check_choice(STATISTICS_OF, over=over)
        check_positive(epsilon=epsilon)
        pool = Moments(dim)
        pool._rounds = False  # in float16 a variance overflows if the deviation is 256
        super().__init__(pool, _Normalize(dim, over, epsilon))
        self.dim = self.dim_out = dim
        self.over = over
        self.epsilon = epsilon

    def extra_repr(self) -> str:
        return f"over={self.over!r}"


class _Normalize(nn.Module):
    """Normalizes elements with the pooled moments."""

    def __init__(self, dim: int, over: str, epsilon: float) -> None:
        super().__init__()
        self.over = over
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, elements: Tensor, moments: Tensor) -> Tensor:
        mean, variance = moments.unsqueeze(2).unbind(1)  # (B, 1, d) each
        if self.over == "set":
            common = mean.mean(-1, keepdim=True)
            variance = (variance + (mean - common).square()).mean(-1, keepdim=True)
            mean = common
        working = working_dtype(elements.dtype)
        scale = torch.rsqrt(variance + self.epsilon) / SHRINK
        # of numbers as large as the dtype allows, the difference overflows
        normal = torch.add(-SHRINK * mean.to(working), elements, alpha=SHRINK) * scale.to(working)
        found = normal * self.weight + self.bias
        return found.to(elements.dtype) if self.weight.dtype in NARROW else found
