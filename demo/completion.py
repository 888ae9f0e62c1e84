"""Models that complete a digit (Conditional Neural Processes, Garnelo et al., 2018).

    pixels (n, 3) -> set encoder -> encoding -> decoder -> brightness of all pixels

The two set encoders are slots on a grid and a Set Transformer.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    avg_pool2d,
    gaussian_nll_loss,
    interpolate,
    mse_loss,
    softplus,
)

from demo import digits
from setfold import (
    ISAB,
    PMA,
    Grid,
    LayeredSetEncoder,
    PlacedSlotEncoder,
    SetEncoder,
    SlotGrid,
)

WIDTH = 64  # number of features of a pixel
GRID, CHANNELS = 14, 12  # side of the grid of slots, and channels of its decoder
SMALLEST, LARGEST = 15, 1000  # range of the number of pixels seen in training; at most all 784
BATCH, RATE, STEPS = 32, 3e-3, 3000


class Waves(nn.Module):
    """Positional encoding of coordinates (..., 2) by sines and cosines (..., 14)."""

    dim_out = 14

    def forward(self, places: Tensor) -> Tensor:
        angles = torch.cat([places * (math.pi * 2**octave) for octave in range(3)], -1)
        return torch.cat([places, angles.sin(), angles.cos()], -1)


class PixelFeatures(nn.Module):
    """Features of the position, and of the position times the brightness: (N, 3) -> (N, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.of_place = nn.Sequential(
            Waves(), nn.Linear(Waves.dim_out, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        place, brightness = pixels[..., :2], (pixels[..., 2:] + 1) / 2
        alone, lit = self.of_place(place).split([WIDTH // 2, WIDTH // 2], -1)
        return torch.cat([alone, lit * brightness], -1)


class Completion(nn.Module):
    """A set encoder and a decoder that predicts mean and scale of the brightness of each pixel.

    Args:
        encoder: set encoder (B, n, 3) -> (B, ...).
        hidden: module that maps encodings to the features of the decoder.
        to_mean: module that maps the features to brightnesses (B, 784).
        to_scale: module like `to_mean`.
    """

    def __init__(
        self, encoder: SetEncoder, hidden: nn.Module, to_mean: nn.Module, to_scale: nn.Module
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.hidden = hidden
        self.to_mean = to_mean
        self.to_scale = to_scale

    def decode(self, encoding: Tensor) -> tuple[Tensor, Tensor]:
        """Predict mean and scale (B, 784) of all pixels from encodings."""
        hidden = self.hidden(encoding)
        # Detached, because otherwise a large scale would hide errors instead of reducing them.
        return self.to_mean(hidden), 0.1 + 0.9 * softplus(self.to_scale(hidden.detach()))


class GridDecoder(nn.Module):
    """Features (B, CHANNELS, 28, 28) from the slots (B, 196, 2) of a grid: a small U-Net.

    The slots of an empty region say nothing, so the innermost layer looks at all of them at once.
    """

    def __init__(self) -> None:
        super().__init__()
        half = GRID // 2
        self.arrange = SlotGrid((GRID, GRID))
        self.fine = _convolution(2, CHANNELS)
        self.coarse = _convolution(CHANNELS, 2 * CHANNELS)
        self.whole = nn.Sequential(
            nn.Flatten(),
            nn.Linear(half * half * 2 * CHANNELS, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, half * half * CHANNELS),
            nn.Unflatten(1, (CHANNELS, half, half)),
        )
        self.back_to_coarse = _convolution(3 * CHANNELS, 2 * CHANNELS)
        self.back_to_fine = _convolution(3 * CHANNELS, CHANNELS)
        self.last = _convolution(CHANNELS, CHANNELS)

    def forward(self, slots: Tensor) -> Tensor:
        density, brightness = slots.split(1, -1)
        known = self.arrange(torch.cat([density / (1 + density), brightness], -1))
        fine = self.fine(known)
        coarse = self.coarse(avg_pool2d(fine, 2))
        found = self.back_to_coarse(torch.cat([self.whole(coarse), coarse], 1))
        found = self.back_to_fine(torch.cat([interpolate(found, scale_factor=2), fine], 1))
        return self.last(interpolate(found, scale_factor=2, mode="bilinear"))


def _convolution(channels: int, channels_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, channels_out, 3, padding=1),
        nn.GroupNorm(4, channels_out),
        nn.ReLU(),
    )


def grid_model() -> Completion:
    """Build the model with slots on a grid: the state has 392 numbers, half as many as pixels."""
    margin = 0.5 / digits.SIDE  # half a pixel
    grid = Grid(low=(-margin, -margin), high=(1 - margin, 1 - margin), shape=(GRID, GRID))
    encoder = PlacedSlotEncoder(
        dim_in=3, places=grid, attention="kernel", aggregate=["density", "weighted_mean"]
    )
    to_mean, to_scale = (nn.Sequential(nn.Conv2d(CHANNELS, 1, 1), nn.Flatten()) for _ in range(2))
    return Completion(encoder, GridDecoder(), to_mean, to_scale)


def transformer_model() -> Completion:
    """Build the model with a Set Transformer: one ISAB, then PMA."""
    seeds, heads = 6, 4
    features = nn.Sequential(PixelFeatures(), nn.LayerNorm(WIDTH))  # scale for attention
    layers, pool = [ISAB(WIDTH, num_inducing=8, num_heads=heads)], PMA(WIDTH, seeds, heads)
    # Digits have much in common; BatchNorm removes the mean and magnifies the differences.
    dim = seeds * WIDTH
    head = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(dim))
    hidden = nn.Sequential(nn.Linear(dim, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    to_mean, to_scale = (nn.Linear(256, digits.PIXELS) for _ in range(2))
    with torch.no_grad():
        to_mean.bias.copy_(digits.load().train.mean(0))  # start from the mean digit
    encoder = LayeredSetEncoder(layers, pool, features, head)
    return Completion(encoder, hidden, to_mean, to_scale)


def loss_of(mean: Tensor, scale: Tensor, images: Tensor) -> Tensor:
    """Return the squared error of the mean plus the negative log-likelihood of the scale."""
    likelihood = gaussian_nll_loss(mean.detach(), images, scale.square(), full=True)
    return mse_loss(mean, images) + likelihood


def train(build: Callable[[], Completion], steps: int, done: Any) -> Completion:
    """Train a model on random pixels of digits; counts steps in `done.value`."""
    torch.manual_seed(digits.SEED)
    images, model = digits.load().train, build()
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 + math.cos(math.pi * step / steps)) / 2
        batch = images[torch.randint(len(images), (BATCH,))]
        count = int(SMALLEST * (LARGEST / SMALLEST) ** torch.rand(()).item())
        count = min(count, digits.PIXELS)
        seen = digits.elements(batch, digits.some_pixels(batch, count))
        loss = loss_of(*model.decode(model.encoder(seen)), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done.value = step + 1
    return model.eval()
