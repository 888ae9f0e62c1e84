"""Heads on the readout of an encoder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.arguments import check_numbers, check_sizes
from setfold.encoders.places import SlotGrid
from setfold.errors import InputError

# By the number of axes: convolution, pooling by a factor, pooling to a shape.
CONVOLUTIONS: dict[int, tuple[Any, Any, Any]] = {
    1: (nn.Conv1d, nn.MaxPool1d, nn.AdaptiveMaxPool1d),
    2: (nn.Conv2d, nn.MaxPool2d, nn.AdaptiveMaxPool2d),
    3: (nn.Conv3d, nn.MaxPool3d, nn.AdaptiveMaxPool3d),
}
COARSE = 4  # cells along each axis that remain before the last layers


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
    def fit(self, values: Tensor, channels: int = 0, cells: int = 0) -> None:
        """Take the mean and the standard deviation of values (N, dim).

        Args:
            values: The values.
            channels: If positive, the last numbers are cells with so many channels each, and the
                constants of a channel are the same for all cells.
            cells: The number of cells.
        """
        values = values.double()
        split = values.shape[1] - channels * cells
        center, scale = _moments(values[:, :split])
        if channels:
            shared = _moments(values[:, split:].reshape(-1, channels))
            center, scale = (
                torch.cat([own, one.repeat(cells)])
                for own, one in zip((center, scale), shared, strict=True)
            )
        self.center.copy_(center)
        self.scale.copy_(scale)

    def forward(self, values: Tensor) -> Tensor:
        return (values - self.center) / self.scale


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of values (N, dim); 1 instead of a deviation of 0."""
    deviation = values.std(0, correction=0)
    varies = deviation > 1e-6 * values.abs().amax(0)
    return values.mean(0), torch.where(varies, deviation, 1.0)


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


class GridHead(nn.Module):
    """A linear model of the first numbers, plus convolutions over slots on a grid.

        linear(x[:dim_linear]) + network(grid of x[dim_linear:])

    Convolutions start at zero, as in `ResidualHead`. The input is (B, dim_linear + K channels), the
    output (B, dim_out).

    Args:
        dim_linear: How many of the first numbers the linear model takes.
        channels: The numbers of each slot.
        shape: The shape of the grid, with K cells and 1 to 3 axes.
        dim_out: The width of the output.
        hidden: The channels of the last convolution, and the width of the layer behind it.
        dropout: The dropout of the network.

    >>> head = GridHead(dim_linear=2, channels=3, shape=(8, 8), dim_out=5)
    >>> head(torch.randn(4, 2 + 3 * 64)).shape
    torch.Size([4, 5])
    """

    def __init__(
        self,
        dim_linear: int,
        channels: int,
        shape: Sequence[int],
        dim_out: int,
        hidden: int = 64,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        check_sizes(dim_linear=dim_linear, channels=channels, dim_out=dim_out, hidden=hidden)
        check_numbers(dropout=dropout)
        self.arrange = SlotGrid(shape)
        axes = len(self.arrange.shape)
        if axes not in CONVOLUTIONS or hidden % 8 or not 0 <= dropout < 1:
            raise InputError(
                "shape must have 1 to 3 axes, hidden must be a multiple of 8, and dropout in "
                f"[0, 1); got {shape!r}, {hidden} and {dropout}."
            )
        self.dim_linear = dim_linear
        self.channels = channels
        self.shape = self.arrange.shape
        self.dim_out = dim_out
        self.hidden = hidden
        self.dropout = dropout
        self.linear = nn.Linear(dim_linear, dim_out)
        convolution, pool, last_pool = CONVOLUTIONS[axes]
        half, last = hidden // 2, nn.Linear(hidden, dim_out)
        coarse = [min(COARSE, -(-size // 2)) for size in self.shape]
        layers: list[nn.Module] = []
        for before, after in ((channels, half), (half, hidden), (hidden, hidden)):
            layers += [convolution(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
            if after == hidden:
                layers.append(last_pool(coarse) if before == hidden else pool(2, ceil_mode=True))
        flat = nn.Linear(hidden * math.prod(coarse), hidden)
        self.network = nn.Sequential(
            *layers, nn.Flatten(), flat, nn.ReLU(), nn.Dropout(dropout), last
        )
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    @property
    def cells(self) -> int:
        """The number of cells of the grid."""
        return math.prod(self.shape)

    def forward(self, values: Tensor) -> Tensor:
        first, slots = values.split([self.dim_linear, self.cells * self.channels], 1)
        grid = self.arrange(slots.unflatten(1, (self.cells, self.channels)))
        return self.linear(first) + self.network(grid)
