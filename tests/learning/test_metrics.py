"""Metrics agree with those of scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics

from setfold import Classes, Quantity
from setfold.learning.metrics import Predictions, loss_of, measure


@pytest.mark.parametrize("classes", [2, 4])
def test_classes(classes):
    random = np.random.default_rng(classes)
    scores = random.dirichlet(np.ones(classes), 50).round(1) + 1e-3  # with ties
    scores /= scores.sum(1, keepdims=True)
    labels = np.concatenate([np.arange(classes), random.integers(0, classes, 50 - classes)])
    found = measure(Classes("kind", list("abcd")[:classes]), Predictions(scores, labels))
    guesses = scores.argmax(1)
    positive = scores[:, 1] if classes == 2 else scores
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(labels, guesses))
    assert found["balanced accuracy"] == pytest.approx(
        metrics.balanced_accuracy_score(labels, guesses)
    )
    assert found["AUC"] == pytest.approx(metrics.roc_auc_score(labels, positive, multi_class="ovr"))
    assert found["log loss"] == pytest.approx(metrics.log_loss(labels, scores))


def test_quantities():
    random = np.random.default_rng(0)
    found = Predictions(random.standard_normal(30), random.standard_normal(30))
    measured, target = measure(Quantity("age", 0.0, 2.0), found), Quantity("age", 0.0, 2.0)
    pair = found.targets, found.scores
    assert measured["rmse"] == pytest.approx(metrics.root_mean_squared_error(*pair))
    assert measured["mae"] == pytest.approx(metrics.mean_absolute_error(*pair))
    assert measured["R2"] == pytest.approx(metrics.r2_score(*pair))
    assert loss_of(target, found) == pytest.approx(metrics.mean_squared_error(*pair) / 4)


def test_classes_without_sets_are_left_out():
    found = measure(Classes("kind", list("abc")), Predictions(np.eye(3)[:2], np.array([0, 1])))
    assert found["balanced accuracy"] == 1.0
    assert "AUC" not in found
