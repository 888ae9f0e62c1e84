"""Completion of faces and digits from sets of pixels of any size, by models that read them.

    Vector      a set encoder folds the pixels into one vector
    Attended    coordinates attend to the slots of a set encoder
    Latents     coordinates attend to latents that attend to the pixels (CMANP, LBANP)
    Everything  coordinates attend to all pixels (Attentive Neural Processes); nothing is folded
    Painted     slots with places, then a U-Net (ConvCNP; Gordon et al., ICLR 2020)

All predict mean and scale of the colours of any pixel. The number of pixels that a model sees
differs from step to step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

import setfold
from experiments.data import celeba, mnist
from experiments.keeping import Encoder, Rereader
from experiments.latents import Bottleneck, ConstantMemory
from experiments.places import Painting
from experiments.pools import SlottedPool, StreamingPool
from experiments.recipe import Metrics, Task
from experiments.tasks import sets
from experiments.tasks.networks import linears
from experiments.tasks.reconstruction import (
    Decoder,
    Look,
    colours_of,
    grid,
    mean_and_scale,
    nll,
)

DIM = 64  # width of the features of a pixel, and of one vector
IMAGES = 20  # images per batch in evaluation
TESTED = 1000  # most pictures of an evaluation unless a task says otherwise


class Batch(NamedTuple):
    """A training batch."""

    context: Tensor  # (B, n, 2 + c), pixels for the encoder
    positions: Tensor  # (B, T), numbers of the pixels to predict
    colours: Tensor  # (B, T, c), in [-1, 1]


class Completer(nn.Module):
    """Predicts colours of pixels from a set of pixels."""

    encoder: Encoder

    def forward(self, context: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Predict mean and scale (B, T, c) of pixels (B, T) from pixels (B, n, 2 + c)."""
        return self.decode(self.encoder(context), positions)

    @abstractmethod
    def decode(self, encoding: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Predict mean and scale (B, T, c) from an encoding."""


class NeuralProcess(Completer):
    """A conditional neural process: a network of an encoding and a coordinate."""

    coordinates: Tensor

    def __init__(
        self,
        encoder: Encoder,
        norm: nn.Module,
        look: Look | None,
        side: int,
        colours: int,
        dim: int = DIM,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.norm = norm
        self.look = look
        self.decoder = Decoder(dim, colours)
        self.register_buffer("coordinates", grid(side, standardise=True), persistent=False)

    def decode(self, encoding: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        encoding, coordinates = self.norm(encoding), self.coordinates[positions]
        if self.look is None:
            return self.decoder(encoding.unsqueeze(1), coordinates)
        return self.decoder(self.look(encoding, coordinates), coordinates)


class PaintingProcess(Completer):
    """Slots with places and a U-Net that predicts all pixels at once."""

    def __init__(self, settings: Painting, side: int, colours: int) -> None:
        super().__init__()
        first, second = grid(side, standardise=True)[:2, 1].tolist()
        border = -first + (second - first) / 2  # half a pixel beyond the outermost ones
        self.encoder = settings.encoder(-border, border, colours)
        self.painter = settings.decoder(side, colours)

    def decode(self, encoding: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        painted = self.painter(encoding)  # (B, 2 c, P)
        chosen = positions.unsqueeze(1).expand(-1, painted.shape[1], -1)
        return mean_and_scale(painted.gather(2, chosen).transpose(1, 2))


class Reader(Protocol):
    """Settings of a model."""

    def build(self, side: int, colours: int) -> Completer: ...


@dataclass(frozen=True)
class Vector:
    """A set encoder that folds all pixels into one vector."""

    pool: StreamingPool

    def build(self, side: int, colours: int) -> Completer:
        encoder = self.pool.build(DIM, DIM, _features(colours))
        return NeuralProcess(encoder, nn.LayerNorm(DIM), None, side, colours)


@dataclass(frozen=True)
class Attended:
    """A set encoder whose slots are attended by each coordinate."""

    pool: SlottedPool

    def build(self, side: int, colours: int) -> Completer:
        width = self.pool.dim_of_slots(DIM)
        encoder = self.pool.build_slots(DIM, DIM, _features(colours))
        return NeuralProcess(encoder, nn.LayerNorm(width), Look(width, DIM), side, colours)


@dataclass(frozen=True)
class Everything:
    """Attention to all pixels: what it keeps of a set grows with the set."""

    def build(self, side: int, colours: int) -> Completer:
        norm, encoder = nn.LayerNorm(DIM), Rereader(_features(colours), nn.Identity())
        return NeuralProcess(encoder, norm, Look(DIM, DIM), side, colours)


@dataclass(frozen=True)
class Latents:
    """Latents that attend to the pixels and are attended by each coordinate."""

    latents: ConstantMemory | Bottleneck

    def build(self, side: int, colours: int) -> Completer:
        dim = self.latents.dim
        features = nn.Sequential(linears(2 + colours, dim, dim), nn.ReLU())
        encoder, norm = self.latents.build(features), nn.LayerNorm(dim)
        return NeuralProcess(encoder, norm, Look(dim, dim), side, colours, dim)


@dataclass(frozen=True)
class Painted:
    """Slots with places and a U-Net."""

    painting: Painting

    def build(self, side: int, colours: int) -> Completer:
        return PaintingProcess(self.painting, side, colours)


def _features(colours: int) -> nn.Module:
    return linears(2 + colours, DIM, DIM, DIM)


@dataclass(frozen=True)
class Completion(Task):
    """Completion of pictures.

    Args:
        reader: the model.
        pictures: "faces" for CelebA, "digits" for MNIST.
        side: side of the pictures: 32 or 64 for faces, 28 for digits.
        fewest: fewest pixels that the model sees in a training step.
        most: most pixels that it sees; the logarithm of the number is uniform.
        targets: number of pixels of each picture to predict in a training step.
        tested: most pictures of an evaluation, evenly spaced over the split; None for 1,000.
    """

    metric: ClassVar[str] = "nll"
    larger_is_better: ClassVar[bool] = False

    reader: Reader
    pictures: Literal["faces", "digits"] = "faces"
    side: Literal[28, 32, 64] = 32
    fewest: int = 20
    most: int = 500
    targets: int = 256
    tested: int | None = None

    def items(self) -> int:
        return len(self._images("train"))

    def build(self) -> Completer:
        return self.reader.build(self.side, self.width - 2)

    @property
    def width(self) -> int:
        """Width of an element: two coordinates, and colours."""
        return 2 + (1 if self.pictures == "digits" else 3)

    def batch(self, items: Tensor) -> Batch:
        images = self._images("train")[items]
        pixels, number = images.shape[1], sets.some_number(self.fewest, self.most)
        context = sets.drawn(len(items), pixels, number)
        targets = sets.drawn(len(items), pixels, self.targets)
        rows = torch.arange(len(items)).unsqueeze(1)
        return Batch(self._elements(images, context), targets, colours_of(images[rows, targets]))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        mean, scale = model(batch.context, batch.positions)
        return nll(mean, scale, batch.colours)

    def evaluate(self, model: nn.Module, split: str) -> Metrics:
        """Measure the mean NLL over three numbers of pixels, all within those of training."""
        numbers = [self.fewest, round((self.fewest * self.most) ** 0.5), self.most]
        values = self.completed(model, numbers, split)["nll"]
        assert isinstance(values, list)
        return {"nll": sum(values) / len(values)}

    @torch.no_grad()
    def completed(self, model: nn.Module, numbers: Sequence[int], split: str = "test") -> Metrics:
        """Measure NLL and squared error of all pixels of pictures from growing sets of pixels.

        Args:
            model: a Completer in eval mode.
            numbers: numbers of pixels; larger sets contain the smaller ones.
            split: "validation" or "test".
        """
        model, images = cast("Completer", model), self._images(split)
        images = images[:: -(-len(images) // (self.tested or TESTED))]
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(0)
        totals = torch.zeros(2, len(numbers), dtype=torch.float64)
        for some in images.split(IMAGES):
            order = sets.drawn(len(some), some.shape[1], some.shape[1], generator)
            pixels, colours = self._elements(some, order).to(device), colours_of(some).to(device)
            everywhere = torch.arange(some.shape[1], device=device).expand(len(some), -1)
            for place, number in enumerate(numbers):
                mean, scale = model(pixels[:, :number], everywhere)
                error = (mean - colours).square().mean()
                found = torch.stack([nll(mean, scale, colours), error]).cpu()
                totals[:, place] += found * len(some)
        likelihoods, errors = (totals / len(images)).tolist()
        return {"pixels": [float(n) for n in numbers], "nll": likelihoods, "error": errors}

    def _elements(self, images: Tensor, positions: Tensor) -> Tensor:
        """Return coordinates and colours (B, n, 2 + c) of the pixels at positions (B, n)."""
        rows = torch.arange(len(images)).unsqueeze(1)
        places = grid(self.side, standardise=True)[positions]
        return torch.cat([places, colours_of(images[rows, positions])], -1)

    def _images(self, split: str) -> Tensor:
        """Return the pictures of a split, (images, P, c) uint8."""
        if self.pictures == "digits":
            return mnist.load(made_up=self.made_up).images[split].flatten(1).unsqueeze(-1)
        if self.side == mnist.SIDE:
            raise setfold.InputError("faces have 32 or 64 pixels on a side; got 28.")
        return celeba.load(side=self.side, made_up=self.made_up).pixels[split].flatten(1, 2)


def completed(model: Completer, task: Completion, numbers: Sequence[int]) -> Metrics:
    """Measure NLL and squared error on the test split from growing sets of pixels."""
    return task.completed(model, numbers)
