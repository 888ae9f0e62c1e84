"""What is minimized for a target, and what a model predicts of it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from setfold.learning.dataset import SetDataset
from setfold.learning.encoding import encode_all
from setfold.learning.fit import Loss, Validate
from setfold.learning.metrics import Predictions, loss_of, measure, metric_name
from setfold.learning.processes import Processes
from setfold.preprocessing.targets import Classes, Target, target_of

VALIDATION_LOSS = "validation loss"


def loss_for(target: Target, training: SetDataset, balanced: bool) -> Loss:
    """Return the loss of each set: cross-entropy, or the squared error in standard deviations.

    Args:
        target: What to predict.
        training: The training sets.
        balanced: Whether to weigh classes inversely to their frequency. The mean weight of the
            training sets is 1.
    """
    if not isinstance(target, Classes):
        scale = target.scale
        return lambda found, wanted: mse_loss(
            found.squeeze(1) / scale, wanted.to(found.dtype) / scale, reduction="none"
        )
    weights: Tensor | None = None
    if balanced:
        counts = np.bincount(training.targets, minlength=len(target.labels))
        weights = torch.from_numpy(len(training) / (len(counts) * np.maximum(counts, 1)))

    def loss(found: Tensor, wanted: Tensor) -> Tensor:
        own = None if weights is None else weights.to(found.dtype)
        return cross_entropy(found, wanted, own, reduction="none")

    return loss


@torch.no_grad()
def predict(
    model: nn.Module, data: SetDataset, batch_rows: int, processes: Processes | None = None
) -> Predictions:
    """Return what a model predicts for all sets of a data set."""
    target = target_of(model)
    assert target is not None
    found = encode_all(model, data, batch_rows, processes).double()
    scores = found.softmax(1) if isinstance(target, Classes) else found.squeeze(1)
    return Predictions(scores.numpy(), data.targets)


def validate_on(
    target: Target, data: SetDataset, batch_rows: int, processes: Processes
) -> Validate:
    """Return a function that measures a model on some sets: the loss, and the first metric."""
    metric = metric_name(target)

    def validate(model: nn.Module) -> dict[str, float]:
        found = predict(model, data, batch_rows, processes)
        return {
            VALIDATION_LOSS: loss_of(target, found),
            f"validation {metric}": measure(target, found)[metric],
        }

    return validate
