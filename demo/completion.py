"""Models that complete a digit (Conditional Neural Processes, Garnelo et al., 2018).

    pixels (n, 3) -> set encoder -> one vector -> decoder -> brightness of all pixels

The two set encoders, a Slot Set Encoder and a Set Transformer, are trained in the same way.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gaussian_nll_loss, mse_loss, softplus

from demo import digits
from setfold import ISAB, PMA, Composition, LayeredSetEncoder, SetEncoder, SlotSetEncoder

WIDTH = 64  # number of features of a pixel
SMALLEST, LARGEST = 20, 300  # range of the number of pixels seen in training
BATCH, RATE, STEPS = 32, 2e-3, 1500


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
        encoder: set encoder (B, n, 3) -> (B, dim_encoding).
        dim_encoding: output width of the encoder.
    """

    def __init__(self, encoder: SetEncoder, dim_encoding: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.hidden = nn.Sequential(
            nn.Linear(dim_encoding, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
        )
        self.to_mean = nn.Linear(256, digits.PIXELS)
        self.to_scale = nn.Linear(256, digits.PIXELS)

    def decode(self, encoding: Tensor) -> tuple[Tensor, Tensor]:
        """Predict mean and scale (B, 784) of all pixels from encodings (B, dim_encoding)."""
        hidden = self.hidden(encoding)
        # Detached, because otherwise a large scale would hide errors instead of reducing them.
        return self.to_mean(hidden), 0.1 + 0.9 * softplus(self.to_scale(hidden.detach()))


def slot_model() -> Completion:
    """Build the model with a Slot Set Encoder and concatenated slots."""
    slots, dim = 48, 8
    pool = SlotSetEncoder(
        WIDTH, slots, WIDTH, dim, "weighted_mean", "learned",
        attention="softmax", similarity="cosine",
    )  # fmt: skip
    nn.init.constant_(pool.temperature, 24)  # sharp, so that slots soon specialise on regions
    return Completion(Composition(pool, PixelFeatures(), _head(slots * dim)), slots * dim)


def transformer_model() -> Completion:
    """Build the model with a Set Transformer: one ISAB, then PMA."""
    seeds, heads = 6, 4
    features = nn.Sequential(PixelFeatures(), nn.LayerNorm(WIDTH))  # scale for attention
    layers, pool = [ISAB(WIDTH, num_inducing=8, num_heads=heads)], PMA(WIDTH, seeds, heads)
    encoder = LayeredSetEncoder(layers, pool, features, _head(seeds * WIDTH))
    return Completion(encoder, seeds * WIDTH)


def _head(dim: int) -> nn.Module:
    # Digits have much in common; BatchNorm removes the mean and magnifies the differences.
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(dim))


def loss_of(mean: Tensor, scale: Tensor, images: Tensor) -> Tensor:
    """Return the squared error of the mean plus the negative log-likelihood of the scale."""
    likelihood = gaussian_nll_loss(mean.detach(), images, scale.square(), full=True)
    return mse_loss(mean, images) + likelihood


def train(build: Callable[[], Completion], steps: int, done: Any) -> Completion:
    """Train a model on random pixels of digits; counts steps in `done.value`."""
    torch.manual_seed(digits.SEED)
    images, model = digits.load().train, build()
    with torch.no_grad():
        model.to_mean.bias.copy_(images.mean(0))  # start from the mean digit
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (1 + math.cos(math.pi * step / steps)) / 2
        batch = images[torch.randint(len(images), (BATCH,))]
        count = int(SMALLEST * (LARGEST / SMALLEST) ** torch.rand(()).item())
        seen = digits.elements(batch, digits.some_pixels(batch, count))
        loss = loss_of(*model.decode(model.encoder(seen)), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done.value = step + 1
    return model.eval()
