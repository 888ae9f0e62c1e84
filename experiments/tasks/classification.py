"""Point cloud classification: predict the class of a shape from points on its surface."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import setfold
from experiments.data import modelnet40
from experiments.pools import Pool
from experiments.recipe import Metrics, Task
from experiments.tasks import sets
from experiments.tasks.networks import Activation

TURN = 0.1 * math.pi  # largest rotation about the vertical axis
SCALES = (0.8, 1.25)  # range of the scale of each axis
CLOUDS = 32  # clouds per batch in evaluation
Encodings = Callable[[Tensor], Iterable[Tensor]]  # from points (B, P, 3) in random order


class Batch(NamedTuple):
    """A training batch."""

    points: Tensor  # (B, n, 3)
    labels: Tensor  # (B,)


class Classifier(nn.Module):
    """A set encoder and a head that outputs class logits."""

    def __init__(self, encoder: setfold.SetEncoder, head: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head

    def forward(self, points: Tensor) -> Tensor:
        """Map points (B, n, 3) to logits (B, classes)."""
        return self.head(self.encoder(points))


@dataclass(frozen=True)
class PointClouds(Task):
    """ModelNet40 classification.

    Args:
        pool: set encoder of the points' features.
        points: points drawn from a cloud, at random in each step.
        dim: width of the encoding and of the hidden layer.
        widths: widths of linear layers on each point before the pool, each with an activation;
            empty for a pool that has its own layers.
        hidden: whether there is a hidden layer between the encoding and the logits.
        activation: activation of all these layers.
        layer_norm: whether the layers on each point have a LayerNorm.
        batch_norm: whether the encoding and the hidden layer have a BatchNorm. It comes after the
            fold, so that the encoder still streams.
        dropout: dropout before each layer after the pool.
        augment: whether clouds are rotated and scaled in training.
    """

    metric: ClassVar[str] = "accuracy"
    larger_is_better: ClassVar[bool] = True

    pool: Pool
    points: int = 100
    dim: int = 256
    widths: tuple[int, ...] = (256, 256, 256)
    hidden: bool = True
    activation: Activation = Activation.TANH
    layer_norm: bool = False
    batch_norm: bool = False
    dropout: float = 0.5
    augment: bool = True

    def items(self) -> int:
        return len(self._data().labels["train"])

    def build(self) -> Classifier:
        features = nn.Sequential(*self._features()) if self.widths else None
        encoder = self.pool.build(self.widths[-1] if self.widths else 3, self.dim, features)
        return Classifier(encoder, nn.Sequential(*self._head()))

    def _features(self) -> Iterator[nn.Module]:
        for before, after in pairwise([3, *self.widths]):
            yield nn.Linear(before, after)
            if self.layer_norm:
                yield nn.LayerNorm(after)
            yield self.activation.module()

    def _head(self) -> Iterator[nn.Module]:
        norm = nn.BatchNorm1d if self.batch_norm else nn.Identity
        yield norm(self.dim)
        if self.hidden:
            yield nn.Dropout(self.dropout)
            yield nn.Linear(self.dim, self.dim)
            yield norm(self.dim)
            yield self.activation.module()
        yield nn.Dropout(self.dropout)
        yield nn.Linear(self.dim, len(self._data().classes))

    def batch(self, items: Tensor) -> Batch:
        data = self._data()
        clouds = data.points["train"]
        positions = sets.drawn(len(items), clouds.shape[1], self.points)
        points = clouds[items.unsqueeze(1), positions]
        if self.augment:
            points = augmented(points)
        return Batch(self.framed(points, self.points), data.labels["train"][items])

    def framed(self, points: Tensor, first: int) -> Tensor:
        """Return clouds (B, n, 3) in the model's coordinates, given by the first points."""
        return standardised(points, first)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch.points), batch.labels)

    def evaluate(self, model: nn.Module, split: str) -> Metrics:
        encoder = cast("Classifier", model).encoder
        (found,) = self.accuracy_of(model, lambda points: [encoder(points)], self.points, split)
        return {"accuracy": found}

    @torch.no_grad()
    def accuracy_of(
        self,
        model: nn.Module,
        encodings: Encodings,
        points: int,
        split: str = "test",
        first: int | None = None,
    ) -> list[float]:
        """Measure the accuracy on a split for each of several encodings of its clouds.

        Args:
            model: a Classifier.
            encodings: function of points (B, n, 3) that returns encodings; the points are the same
                in every call.
            points: number of points drawn from each cloud.
            split: "validation" or "test".
            first: number of first points by which clouds are standardised; None for all.
        """
        head, device = cast("Classifier", model).head, next(model.parameters()).device
        totals: list[int] = []
        for clouds, labels in self.blocks(split, points):
            clouds, labels = self.framed(clouds, first or points).to(device), labels.to(device)
            right = [
                int((head(encoding).argmax(1) == labels).sum()) for encoding in encodings(clouds)
            ]
            totals = [a + b for a, b in zip(totals or [0] * len(right), right, strict=True)]
        return [total / len(self._data().labels[split]) for total in totals]

    def blocks(self, split: str, points: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of points (B, n, 3) and labels (B,), the same in every call."""
        clouds, labels = self._data().points[split], self._data().labels[split]
        generator = torch.Generator().manual_seed(0)
        for items in torch.arange(len(labels)).split(CLOUDS):
            # A permutation is drawn and truncated, so that larger sets contain the smaller ones.
            positions = sets.drawn(len(items), clouds.shape[1], points, generator)
            yield clouds[items.unsqueeze(1), positions], labels[items]

    def _data(self) -> modelnet40.Clouds:
        return modelnet40.load(made_up=self.made_up)


def augmented(points: Tensor) -> Tensor:
    """Rotate clouds (B, n, 3) about the vertical axis z and scale each axis, at random."""
    angle = torch.empty(len(points)).uniform_(-TURN, TURN)
    cosine, sine = angle.cos(), angle.sin()
    zero, one = torch.zeros_like(angle), torch.ones_like(angle)
    turn = torch.stack([cosine, -sine, zero, sine, cosine, zero, zero, zero, one], 1)
    stretch = torch.empty(len(points), 1, 3).uniform_(*SCALES)
    return points @ turn.view(-1, 3, 3) * stretch


def standardised(points: Tensor, first: int) -> Tensor:
    """Standardise clouds (B, n, 3) to mean 0 and standard deviation 1 over all axes.

    Args:
        points: points in the order in which they arrive.
        first: number of points that determine mean and deviation. Later points must not, because
            earlier points of a stream have already been encoded.
    """
    known = points[:, :first]
    mean, deviation = known.mean((1, 2), keepdim=True), known.std((1, 2), keepdim=True)
    return (points - mean) / deviation


# ---- measurements of the recipes ---------------------------------------------------------------


def tested_accuracy(model: Classifier, task: PointClouds, points: int) -> Metrics:
    """Measure accuracy on the test split with any number of points."""
    (found,) = task.accuracy_of(model, lambda clouds: [model.encoder(clouds)], points)
    return {"accuracy": found}


def streamed_accuracy(model: Classifier, task: PointClouds, chunk: int, steps: int) -> Metrics:
    """Measure accuracy on the test split after 1, 2, ... `steps` chunks of points.

    Also measures the difference between streamed and whole-set encodings of some clouds.

    Args:
        model: trained model in eval mode.
        task: task that it was trained for.
        chunk: points per chunk; the first chunk determines how clouds are standardised.
        steps: number of chunks.
    """
    found = task.accuracy_of(
        model,
        lambda points: sets.streamed(model.encoder, sets.chunked(points, chunk, steps)),
        points=chunk * steps,
        first=chunk,
    )
    seen = [float(chunk * step) for step in range(1, steps + 1)]
    error = consistency_error(model, task, chunk, steps)
    return {"points": seen, "accuracy": found, "consistency error": error}


@torch.no_grad()
def consistency_error(model: Classifier, task: PointClouds, chunk: int, steps: int) -> float:
    """Return the relative difference of streamed and whole-set encodings of some test clouds."""
    points, _ = next(task.blocks("test", chunk * steps))
    points = task.framed(points, chunk).to(next(model.parameters()).device)
    chunks = sets.chunked(points, chunk, steps)
    return sets.consistency_error(model.encoder, chunks)
