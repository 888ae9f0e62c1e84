"""Point cloud classification with more points than in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.recipe import Metrics
from experiments.tasks import sets
from experiments.tasks.classification import Batch, Classifier, PointClouds, tested_accuracy


@dataclass(frozen=True)
class GrowingClouds(PointClouds):
    """ModelNet40 classification in the coordinates of the data, which are in the unit ball.

    Unless clouds are standardised, nothing is computed from the points that were drawn, so a cloud
    can grow without limit.

    Args:
        fewest: fewest points of a training step; None for always `points`. The number is the same
            for all clouds of a step, and its logarithm is uniform.
        most: most points of a training step; None for always `points`.
        smoothing: label smoothing of the loss.
        standardise: whether clouds are standardised by the points that were drawn; None for no.
    """

    fewest: int | None = None
    most: int | None = None
    smoothing: float = 0.1
    standardise: bool | None = None

    def batch(self, items: Tensor) -> Batch:
        if self.fewest is None or self.most is None:
            return super().batch(items)
        points = sets.some_number(self.fewest, self.most)
        return replace(self, points=points, fewest=None, most=None).batch(items)

    def framed(self, points: Tensor, first: int) -> Tensor:
        return super().framed(points, first) if self.standardise else points

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch.points), batch.labels, label_smoothing=self.smoothing)


def growing(task: PointClouds, **changes: Any) -> GrowingClouds:
    """Return the same task as GrowingClouds, with some fields changed."""
    same = {field.name: getattr(task, field.name) for field in fields(PointClouds)}
    return GrowingClouds(**{**same, **changes})


def grown_accuracy(model: Classifier, task: GrowingClouds, points: Sequence[int]) -> Metrics:
    """Measure accuracy on the test split each time the clouds have grown to a number of points.

    Args:
        model: trained model in eval mode.
        task: task that it was trained for.
        points: increasing numbers of points.
    """
    parts = [b - a for a, b in zip([0, *points], points, strict=False)]
    found = task.accuracy_of(
        model,
        lambda clouds: sets.streamed(model.encoder, clouds.split(parts, 1)),
        points=points[-1],
    )
    return {"points": [float(number) for number in points], "accuracy": found}


def tested_accuracies(model: Classifier, task: GrowingClouds, points: Sequence[int]) -> Metrics:
    """Measure accuracy on the test split with several numbers of points, each encoded anew."""
    found = [tested_accuracy(model, task, number)["accuracy"] for number in points]
    return {"points": [float(number) for number in points], "accuracy": cast("list[float]", found)}
