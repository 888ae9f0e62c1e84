"""Image completion: predict the colour distribution of every pixel from a set of pixels.

The model is a conditional neural process (Garnelo et al., ICML 2018), as in the paper. Pixels are
elements (row / H, column / W, r, g, b). A set encoder folds them, and a decoder predicts mean and
scale of the three colours at any coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, softplus

import setfold
from experiments.data import celeba
from experiments.pools import Pool, SlottedPool
from experiments.recipe import Metrics, Task
from experiments.tasks import sets
from experiments.tasks.networks import linears
from setfold.laws.wrong_way import ChunkAverage

HIDDEN = 128  # hidden units of the decoder
SMALLEST_SCALE = 0.1  # bounds the NLL below by log(0.1 sqrt(2 pi)) = -1.384
IMAGES = 20  # images per batch in evaluation
Encodings = Callable[[Tensor], Iterable[Tensor]]  # from pixels (B, P, 5) in random order


class Batch(NamedTuple):
    """A training batch."""

    context: Tensor  # (B, n, 5), pixels for the encoder
    coordinates: Tensor  # (B, T, 2), or (1, T, 2) if all images have the same
    colours: Tensor  # (B, T, 3), in [-1, 1]


class Block(NamedTuple):
    """A batch of images for evaluation."""

    positions: Tensor  # (B, P), random order of the pixels
    pixels: Tensor  # (B, P, 5), in that order
    colours: Tensor  # (B, P, 3), row by row


class Folding(NamedTuple):
    """Arguments of setfold.fold for encoding a set in chunks during training."""

    gradient: str
    chunk: int
    samples: int


class Decoder(nn.Module):
    """Predict mean and scale of colours from an encoding and coordinates.

    The first layer is applied to the encoding once per image instead of once per pixel.

    Args:
        dim: width of the encoding.
        colours: number of colours of a pixel.
    """

    def __init__(self, dim: int, colours: int = 3) -> None:
        super().__init__()
        self.dim = dim
        self.first = nn.Linear(dim + 2, HIDDEN)
        layers: list[nn.Module] = [nn.ReLU(inplace=True)]
        for _ in range(2):
            layers += [nn.Linear(HIDDEN, HIDDEN), nn.ReLU(inplace=True)]
        self.rest = nn.Sequential(*layers, nn.Linear(HIDDEN, 2 * colours))

    def forward(self, encoding: Tensor, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and scale (B, T, colours).

        Args:
            encoding: (B, 1, dim), or (B, T, dim) if each coordinate has its own.
            coordinates: (B, T, 2) or (1, T, 2).
        """
        of_encoding, of_coordinate = self.first.weight.split([self.dim, 2], 1)
        hidden = linear(encoding, of_encoding, self.first.bias) + linear(coordinates, of_coordinate)
        return mean_and_scale(self.rest(hidden))


def mean_and_scale(found: Tensor) -> tuple[Tensor, Tensor]:
    """Split what a network predicts (..., 2 c) into means and scales (..., c)."""
    mean, scale = found.chunk(2, -1)
    return mean, SMALLEST_SCALE + (1 - SMALLEST_SCALE) * softplus(scale)


class Look(nn.Module):
    """Cross-attention from coordinates to slots (Attentive Neural Processes, ICLR 2019).

    Args:
        dim_slot: width of the slots.
        dim: output width.
        num_heads: number of heads; must divide dim.
    """

    def __init__(self, dim_slot: int, dim: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_query = nn.Sequential(nn.Linear(2, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.to_key_and_value = nn.Linear(dim_slot, 2 * dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, slots: Tensor, coordinates: Tensor) -> Tensor:
        """Map slots (B, K, dim_slot) and coordinates (B or 1, T, 2) to (B, T, dim)."""
        query = self.to_query(coordinates).expand(len(slots), -1, -1)
        key, value = self.to_key_and_value(slots).chunk(2, -1)
        query, key, value = (
            projected.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, ., d_h)
            for projected in (query, key, value)
        )
        seen = scaled_dot_product_attention(query, key, value)
        return self.to_out(seen.transpose(1, 2).flatten(2))


class NeuralProcess(nn.Module):
    """A conditional neural process.

    Args:
        encoder: set encoder (B, n, 5) -> (B, dim), or -> (B, K, d) if coordinates attend to slots.
        dim: width of the decoder's input encoding.
        norm: normalisation of the encoding.
        look: attention from coordinates to slots; None if the encoding is one vector.
        folding: how to fold sets in training; None to encode all elements at once.
    """

    def __init__(
        self,
        encoder: setfold.SetEncoder,
        dim: int,
        norm: nn.Module,
        look: Look | None = None,
        folding: Folding | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.norm = norm
        self.look = look
        self.decoder = Decoder(dim)
        self.folding = folding

    def forward(self, context: Tensor, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Predict mean and scale (B, T, 3) at coordinates (B or 1, T, 2) from pixels (B, n, 5)."""
        return self.decode(self.encode(context), coordinates)

    def encode(self, context: Tensor) -> Tensor:
        """Encode pixels (B, n, 5)."""
        if self.folding is None or not self.training:
            return self.encoder(context)
        gradient, chunk, samples = self.folding
        chunks = list(context.split(chunk, 1))
        return setfold.fold(self.encoder, chunks, gradient=gradient, samples=samples)

    def decode(self, encoding: Tensor, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise an encoding and predict mean and scale (B, T, 3)."""
        encoding = self.norm(encoding)
        if self.look is None:
            return self.decoder(encoding.unsqueeze(1), coordinates)
        return self.decoder(self.look(encoding, coordinates), coordinates)


@dataclass(frozen=True)
class Reconstruction(Task):
    """Completion of CelebA images.

    Args:
        pool: set encoder of the pixels' features.
        side: side of the images, 32 or 64.
        context: number of pixels for the encoder.
        targets: number of pixels per image to predict in a training step; None for all.
        dim: width of the encoding.
        standardise: whether coordinates have mean 0 and standard deviation 1 instead of [0, 1).
        normalise: whether to apply a LayerNorm to the encoding.
        attentive: whether the decoder attends to the pool's slots.
        gradient: gradient of setfold.fold in training; None to encode the context at once.
        chunk: pixels per chunk of the fold.
        samples: number of chunks to draw for the gradients "unbiased" and "subset".
        hidden: units of the two hidden layers on each pixel; None for `dim`.
    """

    metric: ClassVar[str] = "nll"
    larger_is_better: ClassVar[bool] = False

    pool: Pool
    side: Literal[32, 64] = 32
    context: int = 200
    targets: int | None = None
    dim: int = 64
    standardise: bool = False
    normalise: bool = False
    attentive: bool = False
    gradient: str | None = None
    chunk: int | None = None
    samples: int = 1
    hidden: int | None = None

    def __post_init__(self) -> None:
        if (self.gradient is None) != (self.chunk is None):
            raise setfold.InputError(
                "to fold the context in chunks, pass both gradient and chunk, otherwise neither; "
                f"got gradient={self.gradient!r}, chunk={self.chunk!r}."
            )

    def items(self) -> int:
        return len(self._images("train"))

    def build(self) -> NeuralProcess:
        hidden = self.dim if self.hidden is None else self.hidden
        features = linears(5, hidden, hidden, self.dim)
        encoder, width, look = self._encoder(features)
        norm = nn.LayerNorm(width) if self.normalise else nn.Identity()
        folding = None
        if self.gradient is not None and self.chunk is not None:
            folding = Folding(self.gradient, self.chunk, self.samples)
        return NeuralProcess(encoder, self.dim, norm, look, folding)

    def _encoder(self, features: nn.Module) -> tuple[setfold.SetEncoder, int, Look | None]:
        """Build the encoder; returns it with its output width and the attention to its slots."""
        if not self.attentive:
            return self.pool.build(self.dim, self.dim, features), self.dim, None
        if not isinstance(self.pool, SlottedPool):
            raise setfold.InputError(
                f"attentive=True needs a pool with slots; {type(self.pool).__name__} has none. Use "
                "Slots, Hierarchy, Attention or PMA."
            )
        width = self.pool.dim_of_slots(self.dim)
        encoder = self.pool.build_slots(self.dim, self.dim, features)
        return encoder, width, Look(width, self.dim)

    def batch(self, items: Tensor) -> Batch:
        images = self._images("train")
        size = images.shape[1]
        context = self._pixels(images, items, sets.drawn(len(items), size, self.context))
        if self.targets is None:
            return Batch(context, self.grid().unsqueeze(0), colours_of(images[items]))
        targets = self._pixels(images, items, sets.drawn(len(items), size, self.targets))
        return Batch(context, targets[..., :2], targets[..., 2:])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        mean, scale = model(batch.context, batch.coordinates)
        return nll(mean, scale, batch.colours)

    def evaluate(self, model: nn.Module, split: str) -> Metrics:
        encode = cast("NeuralProcess", model).encode
        (found,) = self.nll_of(model, lambda pixels: [encode(pixels[:, : self.context])], split)
        return {"nll": found}

    @torch.no_grad()
    def nll_of(self, model: nn.Module, encodings: Encodings, split: str = "test") -> list[float]:
        """Measure the NLL of all pixels of a split for each of several encodings of its images.

        Args:
            model: a NeuralProcess.
            encodings: function of pixels (B, P, 5) that returns encodings; the random order of the
                pixels is the same in every call.
            split: "validation" or "test".
        """
        decode = cast("NeuralProcess", model).decode
        device = next(model.parameters()).device
        coordinates = self.grid().unsqueeze(0).to(device)
        totals: list[float] = []
        for block in self.blocks(split):
            colours = block.colours.to(device)
            found = [
                float(nll(*decode(encoding, coordinates), colours)) * len(colours)
                for encoding in encodings(block.pixels.to(device))
            ]
            totals = [a + b for a, b in zip(totals or [0.0] * len(found), found, strict=True)]
        return [total / len(self._images(split)) for total in totals]

    def blocks(self, split: str) -> Iterator[Block]:
        """Yield batches of images, their pixels in a random order that is always the same."""
        images = self._images(split)
        generator = torch.Generator().manual_seed(0)
        for items in torch.arange(len(images)).split(IMAGES):
            order = sets.drawn(len(items), images.shape[1], images.shape[1], generator)
            yield Block(order, self._pixels(images, items, order), colours_of(images[items]))

    def grid(self) -> Tensor:
        """Return the coordinates (P, 2) of all pixels."""
        return grid(self.side, self.standardise)

    def _pixels(self, images: Tensor, items: Tensor, positions: Tensor) -> Tensor:
        """Return coordinates and colours (B, n, 5) of the items' pixels at positions (B, n)."""
        colours = colours_of(images[items.unsqueeze(1), positions])
        return torch.cat([self.grid()[positions], colours], -1)

    def _images(self, split: str) -> Tensor:
        """Return the images of a split, (images, P, 3) uint8."""
        return celeba.load(side=self.side, made_up=self.made_up).pixels[split].flatten(1, 2)


def nll(mean: Tensor, scale: Tensor, colours: Tensor) -> Tensor:
    """Return the Gaussian negative log-likelihood of colours, in nats per dimension."""
    squares = ((colours - mean) / scale).square()
    return (0.5 * squares + scale.log()).mean() + 0.5 * math.log(2 * math.pi)


@cache
def grid(side: int, standardise: bool = False) -> Tensor:
    """Return the coordinates (side * side, 2) of all pixels, in [0, 1) or standardised.

    >>> grid(2).tolist()
    [[0.0, 0.0], [0.0, 0.5], [0.5, 0.0], [0.5, 0.5]]
    """
    steps = torch.arange(side) / side
    if standardise:
        steps = (steps - steps.mean()) / steps.std(correction=0)
    return torch.cartesian_prod(steps, steps)


def colours_of(pixels: Tensor) -> Tensor:
    """Convert bytes to numbers in [-1, 1]."""
    return pixels.float().mul_(2 / 255).sub_(1)


# ---- measurements of the recipes ---------------------------------------------------------------


def streamed_nll(model: NeuralProcess, task: Reconstruction, chunk: int, steps: int) -> Metrics:
    """Measure NLL on the test split after 1, 2, ... `steps` chunks of new pixels.

    Also measures the difference between streamed and whole-set encodings of some images.

    Args:
        model: trained model in eval mode.
        task: task that it was trained for.
        chunk: pixels per chunk.
        steps: number of chunks.
    """
    found = task.nll_of(
        model, lambda pixels: sets.streamed(model.encoder, sets.chunked(pixels, chunk, steps))
    )
    seen = [float(chunk * step) for step in range(1, steps + 1)]
    error = consistency_error(model, task, chunk, steps)
    return {"pixels": seen, "nll": found, "consistency error": error}


def chunk_and_average_nll(
    model: NeuralProcess, task: Reconstruction, chunks: Sequence[int]
) -> Metrics:
    """Measure NLL on the test split with the whole context, and with averaged and folded chunks.

    Args:
        model: trained model in eval mode.
        task: task that it was trained for.
        chunks: chunk sizes in pixels.
    """

    def encodings(pixels: Tensor) -> Iterator[Tensor]:
        context = pixels[:, : task.context]
        yield model.encoder(context)
        for chunk in chunks:
            yield ChunkAverage(model.encoder, chunk)(context)
            yield setfold.fold(model.encoder, context.split(chunk, 1))

    whole, *pairs = task.nll_of(model, encodings)
    sizes = [float(chunk) for chunk in chunks]
    return {"nll": whole, "chunk": sizes, "averaged": pairs[::2], "folded": pairs[1::2]}


@torch.no_grad()
def consistency_error(model: NeuralProcess, task: Reconstruction, chunk: int, steps: int) -> float:
    """Return the relative difference of streamed and whole-set encodings of some test images."""
    pixels = next(task.blocks("test")).pixels
    chunks = sets.chunked(pixels.to(next(model.parameters()).device), chunk, steps)
    return sets.consistency_error(model.encoder, chunks)
