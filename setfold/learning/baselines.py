"""What one would do without a set encoder: plain statistics of each set, and scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV
from torch import nn

from setfold.learning.candidates import Model
from setfold.learning.dataset import SetDataset
from setfold.learning.encoding import encode_all
from setfold.learning.metrics import Predictions, loss_of
from setfold.learning.processes import Processes
from setfold.preprocessing.heads import ResidualHead, Standardize
from setfold.preprocessing.targets import Classes, Target

PENALTIES = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Baseline:
    """A fitted baseline.

    Args:
        name: Its name.
        found: What it predicts for the test sets.
    """

    name: str
    found: Predictions


@torch.no_grad()
def statistics_of(
    model: Model, data: SetDataset, batch_rows: int, processes: Processes | None = None
) -> torch.Tensor:
    """Return the readout of a model's encoder, without the head, for all sets (n, width)."""
    head, model.head = model.head, None
    try:
        return encode_all(model, data, batch_rows, processes)
    finally:
        model.head = head


def fit_linear(
    target: Target,
    training: tuple[np.ndarray, np.ndarray],
    validation: tuple[np.ndarray, np.ndarray],
    balanced: bool = False,
) -> Any:
    """Fit logistic or ridge regression; the penalty is chosen on the validation sets.

    Args:
        target: What to predict.
        training: Standardized statistics (n, w) and labels.
        validation: The same of the validation sets.
        balanced: Whether to weigh classes inversely to their frequency.
    """
    if not isinstance(target, Classes):
        return RidgeCV(alphas=[1 / p for p in PENALTIES]).fit(*training)
    best, least = None, np.inf
    for penalty in PENALTIES:
        weights = "balanced" if balanced else None
        model = LogisticRegression(C=penalty, max_iter=2000, class_weight=weights).fit(*training)
        found = Predictions(spread(model, validation[0], target), validation[1])
        loss = loss_of(target, found)
        if loss < least:
            best, least = model, loss
    return best


def copy_linear(model: Model, fitted: Any, target: Target) -> None:
    """Make a fitted linear model the beginning of a model's head."""
    linear = _linear_of(model)
    weight, bias = np.atleast_2d(fitted.coef_), np.atleast_1d(fitted.intercept_)
    if isinstance(target, Classes):
        whole = np.zeros((len(target.labels), weight.shape[1]))
        shift = np.full(len(target.labels), -20.0)  # classes that were not in training
        places = fitted.classes_
        if len(places) == 2:  # one row for two classes
            weight, bias = np.stack([-weight[0], weight[0]]) / 2, np.array([-bias[0], bias[0]]) / 2
        whole[places], shift[places] = weight, bias
        weight, bias = whole, shift
    else:
        weight, bias = weight / target.scale, (bias - target.center) / target.scale
    with torch.no_grad():
        linear.weight.copy_(torch.from_numpy(weight))
        linear.bias.copy_(torch.from_numpy(bias))


def fit_scales(model: Model, readouts: torch.Tensor) -> Standardize:
    """Set the constants of the first layer of a model's head."""
    assert isinstance(model.head, nn.Sequential)
    first = model.head[0]
    assert isinstance(first, Standardize)
    first.fit(readouts)
    return first


def _linear_of(model: Model) -> nn.Linear:
    assert isinstance(model.head, nn.Sequential)
    found = model.head[1]
    linear = found.linear if isinstance(found, ResidualHead) else found
    assert isinstance(linear, nn.Linear)
    return linear


def spread(model: Any, statistics: np.ndarray, target: Classes) -> np.ndarray:
    """Return probabilities of all classes, also of those that were not in training."""
    found = np.zeros((len(statistics), len(target.labels)))
    found[:, model.classes_] = model.predict_proba(statistics)
    return found


def fit_baselines(
    target: Target,
    training: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    linear: Any,
    seed: int,
) -> list[Baseline]:
    """Fit all baselines on statistics, and predict the test sets.

    Args:
        target: What to predict.
        training: Standardized statistics (n, w) and labels.
        test: The same of the test sets.
        linear: The result of `fit_linear`.
        seed: Of gradient boosting.
    """
    is_class = isinstance(target, Classes)
    boosting = HistGradientBoostingClassifier if is_class else HistGradientBoostingRegressor
    models = {
        "logistic regression on statistics"
        if is_class
        else "ridge regression on statistics": linear,
        "gradient boosting on statistics": boosting(random_state=seed).fit(*training),
        "the most frequent class" if is_class else "the mean": (
            DummyClassifier(strategy="prior") if is_class else DummyRegressor()
        ).fit(*training),
    }
    found = []
    for name, model in models.items():
        if isinstance(target, Classes):
            scores = spread(model, test[0], target)
        else:
            scores = model.predict(test[0])
        found.append(Baseline(name, Predictions(scores, test[1])))
    return found
