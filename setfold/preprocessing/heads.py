"""Heads on the readout of an encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from setfold.core.arguments import check_numbers, check_sizes
from setfold.errors import InputError


class Standardize(nn.Module):
    """(x - center) / scale, with constants from the training sets: (B, dim) -> (B, dim).

    Args:
        dim: The width.

    >>> layer = Standardize(1)
    >>> layer.fit(torch.tensor([[1.0], [3.0]]))
    >>> layer(torch.tensor([[4.0]]))
    tensor([[2.]])
    """

    center: Tensor
    scale: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        check_sizes(dim=dim)
        self.dim = dim
        self.register_buffer("center", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))

    def extra_repr(self) -> str:
        return f"{self.dim}"

    @torch.no_grad()
    def fit(self, values: Tensor) -> None:
        """Take the mean and the standard deviation of values (N, dim)."""
        values = values.double()
        deviation = values.std(0, correction=0)
        self.center.copy_(values.mean(0))
        self.scale.copy_(torch.where(deviation > 1e-6 * values.abs().amax(0), deviation, 1.0))

    def forward(self, values: Tensor) -> Tensor:
        return (values - self.center) / self.scale


class ResidualHead(nn.Module):
    """A linear model of the first numbers, plus a network of all: (B, dim) -> (B, dim_out).

        linear(x[:dim_linear]) + network(x)

    The network starts at zero. So a linear model that was fitted elsewhere can be the beginning,
    and training improves on it.

    Args:
        dim: The width of the input.
        dim_linear: How many of the first numbers the linear model takes.
        dim_out: The width of the output.
        hidden: The width of the network.
        dropout: The dropout of the network.

    >>> head = ResidualHead(6, 2, 3)
    >>> values = torch.randn(4, 6)
    >>> torch.equal(head(values), head.linear(values[:, :2]))
    True
    """

    def __init__(
        self, dim: int, dim_linear: int, dim_out: int, hidden: int = 64, dropout: float = 0.2
    ) -> None:
        super().__init__()
        check_sizes(dim=dim, dim_linear=dim_linear, dim_out=dim_out, hidden=hidden)
        check_numbers(dropout=dropout)
        if dim_linear > dim or not 0 <= dropout < 1:
            raise InputError(
                f"dim_linear must be at most dim={dim}, and dropout in [0, 1); got {dim_linear} and "
                f"{dropout}."
            )
        self.dim = dim
        self.dim_linear = dim_linear
        self.dim_out = dim_out
        self.hidden = hidden
        self.dropout = dropout
        self.linear = nn.Linear(dim_linear, dim_out)
        last = nn.Linear(hidden, dim_out)
        self.network = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.ReLU(), nn.Dropout(dropout), last
        )
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, values: Tensor) -> Tensor:
        return self.linear(values[:, : self.dim_linear]) + self.network(values)
