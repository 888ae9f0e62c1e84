"""The models: a digit from some of its pixels (Conditional Neural Processes, Garnelo et al., 2018).

    pixels (n, 3) -> set encoder -> one vector -> decoder -> brightness of each place

Two set encoders are trained alike: a Slot Set Encoder and a Set Transformer.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gaussian_nll_loss, mse_loss, softplus

from demo import digits
from setfold import ISAB, PMA, Composition, LayeredSetEncoder, SetEncoder, SlotSetEncoder

WIDTH = 64  # of a pixel's features
SMALLEST, LARGEST = 20, 300  # pixels that are seen of a digit in training
BATCH, RATE, STEPS = 32, 2e-3, 1500


class Waves(nn.Module):
    """A place (..., 2) as sines and cosines (..., 14), so that near places can be told apart."""

    dim_out = 14

    def forward(self, places: Tensor) -> Tensor:
        angles = torch.cat([places * (math.pi * 2**octave) for octave in range(3)], -1)
        return torch.cat([places, angles.sin(), angles.cos()], -1)


class PixelFeatures(nn.Module):
    """Where a pixel is, beside where it is times how bright it is: (N, 3) -> (N, WIDTH)."""

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
    """A set encoder, and a decoder that says how bright each place is, and how sure that is.

    Args:
        encoder: maps pixels (B, n, 3) to encodings (B, dim_encoding).
        dim_encoding: what the encoder puts out.
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
        """Mean and scale (B, 784) of every pixel, from encodings (B, dim_encoding)."""
        hidden = self.hidden(encoding)
        # The scale only watches: if it could, it would excuse what is hard instead of learning it.
        return self.to_mean(hidden), 0.1 + 0.9 * softplus(self.to_scale(hidden.detach()))


def slot_model() -> Completion:
    """With a Slot Set Encoder, whose slots are kept apart."""
    slots, dim = 48, 8
    pool = SlotSetEncoder(
        WIDTH, slots, WIDTH, dim, "weighted_mean", "learned",
        attention="softmax", similarity="cosine",
    )  # fmt: skip
    nn.init.constant_(pool.temperature, 24)  # sharp, so that slots soon have places of their own
    return Completion(Composition(pool, PixelFeatures(), _head(slots * dim)), slots * dim)


def transformer_model() -> Completion:
    """With a Set Transformer: one ISAB, then PMA."""
    seeds, heads = 6, 4
    features = nn.Sequential(PixelFeatures(), nn.LayerNorm(WIDTH))  # large enough to attend by
    layers, pool = [ISAB(WIDTH, num_inducing=8, num_heads=heads)], PMA(WIDTH, seeds, heads)
    encoder = LayeredSetEncoder(layers, pool, features, _head(seeds * WIDTH))
    return Completion(encoder, seeds * WIDTH)


def _head(dim: int) -> nn.Module:
    # All digits have much in common: what sets them apart must not be small beside it.
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(dim))


def loss_of(mean: Tensor, scale: Tensor, images: Tensor) -> Tensor:
    """Squared error of the mean, and the negative log-likelihood of the scale around it."""
    likelihood = gaussian_nll_loss(mean.detach(), images, scale.square(), full=True)
    return mse_loss(mean, images) + likelihood


def train(build: Callable[[], Completion], steps: int, done: Any) -> Completion:
    """A model, trained on digits of which it sees a few pixels each; counts steps in `done`."""
    torch.manual_seed(digits.SEED)
    images, model = digits.load().train, build()
    with torch.no_grad():
        model.to_mean.bias.copy_(images.mean(0))  # learning begins with the average digit
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
