"""Measures of predictions, for any model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.metrics import (
    accuracy_score,
    log_loss,
    mean_absolute_error,
    mean_squared_error,
    r2_score,
    recall_score,
    roc_auc_score,
)

from setfold.preprocessing.targets import Classes, Target


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
        scores = np.clip(found.scores, 1e-7, 1)
        scores = scores / scores.sum(1, keepdims=True)
        return float(log_loss(found.targets, scores, labels=range(len(target.labels))))
    return float(mean_squared_error(found.targets, found.scores)) / target.scale**2


def measure(target: Target, found: Predictions) -> dict[str, float]:
    """Return all metrics of some predictions.

    >>> target = Classes("kind", ["a", "b"])
    >>> found = Predictions(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 1]))
    >>> {name: round(value, 3) for name, value in measure(target, found).items()}
    {'accuracy': 1.0, 'balanced accuracy': 1.0, 'AUC': 1.0, 'log loss': 0.164}
    """
    if not isinstance(target, Classes):
        return {
            "rmse": float(mean_squared_error(found.targets, found.scores) ** 0.5),
            "mae": float(mean_absolute_error(found.targets, found.scores)),
            "R2": float(r2_score(found.targets, found.scores)) if len(found.targets) > 1 else 0.0,
        }
    guesses = found.scores.argmax(1)
    present = np.unique(found.targets)
    recall = recall_score(
        found.targets, guesses, labels=present, average="macro", zero_division=0.0
    )
    measured = {
        "accuracy": float(accuracy_score(found.targets, guesses)),
        "balanced accuracy": float(recall),
    }
    if len(present) == len(target.labels):
        scores = found.scores[:, 1] if len(target.labels) == 2 else found.scores
        measured["AUC"] = float(roc_auc_score(found.targets, scores, multi_class="ovr"))
    return measured | {"log loss": loss_of(target, found)}


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
