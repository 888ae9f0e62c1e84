"""What one would do without a set encoder: plain statistics of each set, and scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge
from torch import Tensor, nn

from setfold.learning.candidates import Model
from setfold.learning.dataset import SetDataset
from setfold.learning.encoding import encode_all
from setfold.learning.metrics import Predictions, loss_of
from setfold.learning.processes import Processes
from setfold.preprocessing.heads import GridHead, ResidualHead, Standardize
from setfold.preprocessing.targets import Classes, Target

PENALTIES = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Baseline:
    """A fitted baseline.

    Args:
        name: Its name.
        found: What it predicts for the test sets.
    """

    name: str
    found: Predictions


@dataclass(frozen=True)
class LinearFits:
    """Linear models of plain statistics, with the penalty that is best on sets held out.

    Args:
        by_fold: For each fold, the model without the sets that it holds out.
        whole: The model of all sets.
        held: What the models of the folds predict for the sets that they hold out, in the order of
            the data set.
    """

    by_fold: list[Any]
    whole: Any
    held: Predictions


@torch.no_grad()
def statistics_of(
    model: Model, data: SetDataset, batch_rows: int, processes: Processes | None = None
) -> Tensor:
    """Return the readout of a model's encoder, without the head, for all sets (n, width)."""
    head, model.head = model.head, None
    try:
        return encode_all(model, data, batch_rows, processes)
    finally:
        model.head = head


def fit_linear(
    target: Target,
    statistics: Tensor,
    targets: np.ndarray,
    folds: np.ndarray,
    balanced: bool = False,
) -> LinearFits:
    """Fit logistic or ridge regression; the penalty is chosen on the sets that are held out.

    Args:
        target: What to predict.
        statistics: Plain statistics (n, w).
        targets: The labels (n,).
        folds: The fold that holds out each set, (n,); -1 if none does.
        balanced: Whether to weigh classes inversely to their frequency.
    """
    tables = [standardized(statistics[folds != fold], statistics) for fold in range(1 + max(folds))]
    best, fits, least = PENALTIES[0], list[Any](), np.inf
    found = Predictions(np.empty(0), np.empty(0))
    for penalty in PENALTIES:
        own = [
            _linear(target, penalty, balanced).fit(table[folds != fold], targets[folds != fold])
            for fold, table in enumerate(tables)
        ]
        guesses = held_out(target, own, tables, targets, folds)
        loss = loss_of(target, guesses)
        if loss < least:
            best, fits, least, found = penalty, own, loss, guesses
    whole = _linear(target, best, balanced).fit(standardized(statistics, statistics), targets)
    return LinearFits(fits, whole, found)


def held_out(
    target: Target,
    models: Sequence[Any],
    tables: Sequence[np.ndarray],
    targets: np.ndarray,
    folds: np.ndarray,
) -> Predictions:
    """Return what the model of each fold predicts for the sets that it holds out."""
    width = (len(target.labels),) if isinstance(target, Classes) else ()
    scores = np.zeros((len(targets), *width))
    for fold, (model, table) in enumerate(zip(models, tables, strict=True)):
        scores[folds == fold] = scores_of(model, table[folds == fold], target)
    return Predictions(scores[folds >= 0], targets[folds >= 0])


def _linear(target: Target, penalty: float, balanced: bool) -> Any:
    if not isinstance(target, Classes):
        return Ridge(alpha=1 / penalty)
    weights = "balanced" if balanced else None
    return LogisticRegression(C=penalty, max_iter=2000, class_weight=weights)


def standardized(seen: Tensor, values: Tensor) -> np.ndarray:
    """Return values (n, w) relative to mean and deviation of those that were seen."""
    scale = Standardize(values.shape[1])
    scale.fit(seen)
    return scale(values).double().numpy()


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


def fit_scales(model: Model, readouts: Tensor) -> None:
    """Set the constants of the first layer of a model's head."""
    assert isinstance(model.head, nn.Sequential)
    first, last = model.head[0], model.head[1]
    assert isinstance(first, Standardize)
    if isinstance(last, GridHead):
        first.fit(readouts, last.channels, last.cells)
    else:
        first.fit(readouts)


def _linear_of(model: Model) -> nn.Linear:
    assert isinstance(model.head, nn.Sequential)
    found = model.head[1]
    linear = found.linear if isinstance(found, ResidualHead | GridHead) else found
    assert isinstance(linear, nn.Linear)
    return linear


def scores_of(model: Any, statistics: np.ndarray, target: Target) -> np.ndarray:
    """Return quantities, or probabilities of all classes, also of those not in training."""
    if not isinstance(target, Classes):
        return model.predict(statistics)
    found = np.zeros((len(statistics), len(target.labels)))
    found[:, model.classes_] = model.predict_proba(statistics)
    return found


def fit_baselines(
    target: Target,
    known: tuple[Tensor, np.ndarray],
    test: tuple[Tensor, np.ndarray] | None,
    folds: np.ndarray,
    linear: LinearFits,
    seed: int,
) -> list[Baseline]:
    """Fit all baselines on statistics, and predict the test sets.

    Args:
        target: What to predict.
        known: Plain statistics (n, w) and labels of all sets for training and validation.
        test: The same of the test sets; None to predict the sets that the folds hold out.
        folds: As for `fit_linear`.
        linear: The result of `fit_linear`.
        seed: Of gradient boosting.
    """
    statistics, targets = known
    is_class = isinstance(target, Classes)
    boosting = HistGradientBoostingClassifier if is_class else HistGradientBoostingRegressor
    dummy = DummyClassifier(strategy="prior") if is_class else DummyRegressor()
    first = f"{'logistic' if is_class else 'ridge'} regression on statistics"
    others = {
        "gradient boosting on statistics": boosting(random_state=seed),
        "the most frequent class" if is_class else "the mean": dummy,
    }
    if test is not None:
        table, unseen = (standardized(statistics, part) for part in (statistics, test[0]))
        models = {first: linear.whole} | {n: m.fit(table, targets) for n, m in others.items()}
        return [
            Baseline(name, Predictions(scores_of(model, unseen, target), test[1]))
            for name, model in models.items()
        ]
    tables = [standardized(statistics[folds != fold], statistics) for fold in range(1 + max(folds))]
    found = {first: linear.held}
    for name, model in others.items():
        fits = [
            clone(model).fit(table[folds != fold], targets[folds != fold])
            for fold, table in enumerate(tables)
        ]
        found[name] = held_out(target, fits, tables, targets, folds)
    return [Baseline(name, own) for name, own in found.items()]
