"""Normalisation by the statistics of the set itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.arguments import refuse_other_than, refuse_sizes
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.passes import Layer
from setfold.core.readout import VARIANCE, Count, read
from setfold.core.statistic import REDUCTIONS, Statistics

STATISTICS_OF = ("feature", "set")


class Moments(StreamingSetEncoder):
    """The mean and the variance of each feature over the set: (B, n, d) -> (B, 2, d).

        mean = sum_i x_i / n          variance = sum_i (x_i - mean)^2 / n

    Count, mean and squared distances are kept, and joined without cancellation.

    Args:
        dim_in: width d of the elements.

    >>> Moments(1)(torch.tensor([[[1.0], [3.0]]]))
    tensor([[[2.],
             [1.]]])
    """

    dim_in: int
    like: Tensor
    aggregates = (VARIANCE,)
    defers = True
    sums_show_all = True

    def __init__(self, dim_in: int) -> None:
        super().__init__()
        refuse_sizes(dim_in=dim_in)
        self.dim_in = dim_in
        # Remembers device and dtype, which a module without parameters would not.
        self.register_buffer("like", torch.empty(0), persistent=False)

    def extra_repr(self) -> str:
        return f"dim_in={self.dim_in}"

    def identity(self, batch_size: int, frame: tuple[Tensor, ...]) -> Statistics:
        shapes = [(batch_size, self.dim_in)] * 3
        return {"moments": REDUCTIONS["moments"].identity(*shapes, device=self.like.device)}

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        return {"moments": REDUCTIONS["moments"].absorb(elements, mask)}

    def finish(self, statistics: Statistics, count: Count, frame: tuple[Tensor, ...]) -> Tensor:
        _, mean, squares = statistics["moments"]
        variance = read(self.aggregates, {"moments": squares}, count, None)
        return torch.stack([mean, variance], 1).to(self.like.dtype)


class SetNorm(Layer):
    """Subtracts the set's mean from every element and divides by its deviation.

        y_i = weight (x_i - mean) / sqrt(variance + epsilon) + bias

    with mean and variance of each feature over the set, or of all features of all elements
    together (Zhang et al., "Set Norm and Equivariant Skip Connections", ICML 2022).

    Args:
        dim: width of the elements.
        over: "feature" for a mean and a variance of each feature, "set" for one of all.
        epsilon: added to the variance.

    >>> layer = SetNorm(3)
    >>> layer(5 + torch.randn(2, 100, 3)).mean(1).abs().max() < 1e-5
    tensor(True)
    """

    def __init__(self, dim: int, over: str = "feature", epsilon: float = 1e-5) -> None:
        refuse_sizes(dim=dim)
        refuse_other_than(STATISTICS_OF, over=over)
        super().__init__(Moments(dim), _Normalise(dim, over, epsilon))
        self.dim = self.dim_out = dim
        self.over = over
        self.epsilon = epsilon

    def extra_repr(self) -> str:
        return f"over={self.over!r}"


class _Normalise(nn.Module):
    """The half of the layer that looks at what was pooled."""

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
        normal = (elements - mean) * torch.rsqrt(variance + self.epsilon)
        return normal * self.weight + self.bias
