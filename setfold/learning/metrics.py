"""Measures of predictions, for any model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from setfold.preprocessing.targets import Classes, Target

LEAST = 1e-7  # a probability below this counts as this


@dataclass(frozen=True)
class Predictions:
    """What a model predicts for some sets.

    Args:
        scores: `(n, C)` probabilities, or `(n,)` quantities.
        targets: The labels: class numbers or quantities.
    """

    scores: np.ndarray
    targets: np.ndarray


def metric_name(target: Target) -> str:
    """Return the name of the metric that is shown first."""
    return "accuracy" if isinstance(target, Classes) else "rmse"


def loss_of(target: Target, found: Predictions) -> float:
    """Return what the choice between models minimizes: log loss, or mean squared error."""
    if isinstance(target, Classes):
        scores = np.clip(found.scores, LEAST, 1)
        own = scores[np.arange(len(scores)), found.targets] / scores.sum(1)
        return float(-np.log(own).mean())
    return float(((found.targets - found.scores) ** 2).mean()) / target.scale**2


def measure(target: Target, found: Predictions) -> dict[str, float]:
    """Return all metrics of some predictions.

    Balanced accuracy and AUC are means over classes: of the share of its sets that are right, and
    of the area under the ROC curve of this class against all others.

    >>> target = Classes("kind", ["a", "b"])
    >>> found = Predictions(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 1]))
    >>> {name: round(value, 3) for name, value in measure(target, found).items()}
    {'accuracy': 1.0, 'balanced accuracy': 1.0, 'AUC': 1.0, 'log loss': 0.164}
    """
    if not isinstance(target, Classes):
        error = found.targets - found.scores
        squares, spread = float((error**2).mean()), float(found.targets.var())
        return {
            "rmse": squares**0.5,
            "mae": float(np.abs(error).mean()),
            "R2": 1 - squares / spread if spread else 0.0,
        }
    right, present = found.scores.argmax(1) == found.targets, np.unique(found.targets)
    measured = {
        "accuracy": float(right.mean()),
        "balanced accuracy": float(
            np.mean([right[found.targets == own].mean() for own in present])
        ),
    }
    if len(present) == len(target.labels):
        areas = [_area(found.scores[:, own], found.targets == own) for own in present]
        measured["AUC"] = float(np.mean(areas))
    return measured | {"log loss": loss_of(target, found)}


def _area(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the area under the ROC curve: how often a positive set has the larger score."""
    number = int(positive.sum())
    above = rankdata(scores)[positive].sum() - number * (number + 1) / 2
    return float(above / (number * (len(scores) - number)))


def standard_error(target: Target, found: Predictions) -> float:
    """Return the standard error of the metric that is shown first."""
    number = max(len(found.targets), 1)
    if isinstance(target, Classes):
        right = int((found.scores.argmax(1) == found.targets).sum())
        rate = (right + 2) / (number + 4)  # Agresti and Coull: not 0 if all are right
        return float((rate * (1 - rate) / (number + 4)) ** 0.5)
    squares = (found.scores - found.targets) ** 2
    rmse = float(squares.mean() ** 0.5)
    return float(squares.std() / number**0.5 / (2 * rmse)) if rmse else 0.0
