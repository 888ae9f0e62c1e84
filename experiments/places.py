"""Settings of slots with places: frozen dataclasses that build encoders and their networks.

    Volume     slots on a grid in a cube, then 3-D convolutions: one vector, like every other pool
    Painting   slots on a grid in the plane, then a U-Net: features of every pixel of a picture
    Plane      slots on a grid over two of many features, then a linear layer: one vector

The first two convolve over the grid, so their networks see where a slot is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate

import setfold

REACH = 2.4  # with the width 0.6, an element touches 3 cells along each axis


@dataclass(frozen=True)
class Volume:
    """Slots on a grid in the cube from -1 to 1, with offsets and squares of the positions.

    Args:
        side: number of cells along each axis.
        channels: channels of the three convolutions; `build` needs dim_out = 2 * channels[-1].

    >>> pool = Volume(side=4, channels=(8, 8, 16))
    >>> pool.build(dim_in=3, dim_out=32).eval()(torch.rand(2, 100, 3)).shape
    torch.Size([2, 32])
    """

    side: int = 6
    channels: tuple[int, int, int] = (48, 64, 90)

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder:
        if dim_in != 3 or dim_out != 2 * self.channels[-1]:
            raise setfold.InputError(
                f"a Volume maps points (3) to 2 x {self.channels[-1]} numbers, the maximum and the "
                f"mean of the last channels; got dim_in={dim_in}, dim_out={dim_out}."
            )
        grid = setfold.Grid((-1, -1, -1), (1, 1, 1), (self.side,) * 3)
        encoder = setfold.PlacedSlotEncoder(
            dim_in,
            grid,
            values=["offsets", "squares"],
            aggregate=["mass", "mean", "max", "min"],
            reach=REACH,
        )
        first, second, last = self.channels
        head = nn.Sequential(
            setfold.SlotGrid(grid.shape),
            SignedRoot(),
            nn.BatchNorm3d(encoder.dim_readout),
            _convolution3d(encoder.dim_readout, first),
            _convolution3d(first, second),
            nn.MaxPool3d(2),
            _convolution3d(second, last),
            MaximumAndMean(),
        )
        return setfold.Composition(encoder, features, head)


class SignedRoot(nn.Module):
    """sign(x) sqrt(|x|), the usual normalisation of Fisher vectors; the input has no gradients."""

    def forward(self, values: Tensor) -> Tensor:
        return values.sign() * values.abs().sqrt()


class MaximumAndMean(nn.Module):
    """Maximum and mean over all cells: (B, c, ...) -> (B, 2 c)."""

    def forward(self, cells: Tensor) -> Tensor:
        flat = cells.flatten(2)
        return torch.cat([flat.amax(2), flat.mean(2)], 1)


def _convolution3d(channels: int, channels_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(channels, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm3d(channels_out),
        nn.ReLU(),
    )


@dataclass(frozen=True)
class Painting:
    """Slots on a grid over a picture, then a U-Net.

    Args:
        side: number of cells along each axis; a slot holds a density and the mean colour.
        channels: channels of the finest convolutions; a multiple of 4.
    """

    side: int
    channels: int = 12

    def encoder(self, low: float, high: float, colours: int) -> setfold.PlacedSlotEncoder:
        """Build the encoder of elements (row, column, colours) in a square: (B, K, 1 + colours)."""
        return setfold.PlacedSlotEncoder(
            2 + colours,
            setfold.Grid((low, low), (high, high), (self.side, self.side)),
            attention="kernel",
            aggregate=["density", "weighted_mean"],
        )

    def decoder(self, picture: int, colours: int) -> Painter:
        """Build the network that paints a picture of this side: (B, K, .) -> (B, 2 colours, P)."""
        return Painter(self.side, picture, 1 + colours, 2 * colours, self.channels)


@dataclass(frozen=True)
class Plane:
    """Slots on a grid over the first two features of an element, for elements without coordinates.

    Args:
        bound: the grid is from -bound to bound along both axes.
        side: number of cells along each axis.

    >>> Plane(bound=2.0).build(dim_in=8, dim_out=16)(torch.randn(2, 100, 8)).shape
    torch.Size([2, 16])
    """

    bound: float
    side: int = 4

    def build(
        self, dim_in: int, dim_out: int, features: nn.Module | None = None
    ) -> setfold.StreamingSetEncoder:
        grid = setfold.Grid((-self.bound,) * 2, (self.bound,) * 2, (self.side,) * 2)
        encoder = setfold.PlacedSlotEncoder(
            dim_in, grid, values=["features", "offsets"], aggregate="mean"
        )
        width = encoder.num_slots * encoder.dim_readout
        head = nn.Sequential(nn.Flatten(), nn.Linear(width, dim_out))
        return setfold.Composition(encoder, features, head)


class Painter(nn.Module):
    """A U-Net from slots (B, K, c) to channels of all pixels (B, c_out, P), row by row.

    It works at half the resolution of the picture. GroupNorm instead of BatchNorm: with more pixels
    seen, the channels have other statistics.
    """

    def __init__(self, grid: int, picture: int, dim_in: int, dim_out: int, channels: int) -> None:
        super().__init__()
        self.inner, self.picture = picture // 2, picture
        self.arrange = setfold.SlotGrid((grid, grid))
        self.fine = _convolution2d(dim_in, channels)
        self.coarse = _convolution2d(channels, 2 * channels)
        self.coarsest = nn.Sequential(
            _convolution2d(2 * channels, 4 * channels), _convolution2d(4 * channels, 4 * channels)
        )
        self.back_to_coarse = _convolution2d(6 * channels, 2 * channels)
        self.back_to_fine = _convolution2d(3 * channels, channels)
        self.last = nn.Sequential(
            _convolution2d(channels, channels), nn.Conv2d(channels, dim_out, 1)
        )

    def forward(self, slots: Tensor) -> Tensor:
        density, colours = slots[..., :1], slots[..., 1:]
        known = self.arrange(torch.cat([density / (1 + density), colours], -1))
        fine = self.fine(_resized(known, self.inner))
        coarse = self.coarse(avg_pool2d(fine, 2))
        coarsest = self.coarsest(avg_pool2d(coarse, 2))
        found = torch.cat([_resized(coarsest, coarse.shape[-1]), coarse], 1)
        found = self.back_to_coarse(found)
        found = self.back_to_fine(torch.cat([_resized(found, fine.shape[-1]), fine], 1))
        return self.last(_resized(found, self.picture)).flatten(2)


def _resized(cells: Tensor, side: int) -> Tensor:
    if cells.shape[-1] == side:
        return cells
    return interpolate(cells, (side, side), mode="bilinear")


def _convolution2d(channels: int, channels_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, channels_out, 3, padding=1),
        nn.GroupNorm(4, channels_out),
        nn.ReLU(),
    )
