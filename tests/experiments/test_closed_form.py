"""Baselines without training agree with numpy and scikit-learn, which compute them another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.covariance import oas
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from experiments.pools import DeepSets
from experiments.recipe import Metrics
from experiments.tasks.centroids import Centroids, DigitCentroids, FeatureCentroids, accuracy_key
from experiments.tasks.closed_form import (
    discriminant_accuracy,
    mean_accuracy,
    untrained_accuracy,
    whitened_accuracy,
)

FEATURES = FeatureCentroids(DeepSets(), made_up=True)
DIGITS = DigitCentroids(DeepSets(), made_up=True)
TASKS = [(FEATURES, 20), (DIGITS, 10)]
SUPPORTS = (2, 1000)  # the latter is more than a class has
pytestmark = pytest.mark.parametrize(("task", "classes"), TASKS, ids=["features", "digits"])


def arrays(task: Centroids, *splits: str) -> tuple[np.ndarray, np.ndarray]:
    items, labels = task.data()
    flat = [task.prepared(items[split]).flatten(1).double().numpy() for split in splits]
    return np.concatenate(flat), np.concatenate([labels[split].numpy() for split in splits])


def supports_of(task: Centroids, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The first supports of each class in the first stream."""
    items, labels = arrays(task, "train", "validation")
    generator, chosen = torch.Generator().manual_seed(0), []
    for label in range(labels.max() + 1):
        (rows,) = np.nonzero(labels == label)
        chosen.append(rows[torch.randperm(len(rows), generator=generator).numpy()[:size]])
    return items[np.concatenate(chosen)], labels[np.concatenate(chosen)]


def measured(measure: Callable[..., Metrics], task: Centroids, classes: int) -> list[float]:
    found = measure(None, task=task, supports=SUPPORTS, ways=(classes,), draws=1)
    assert found["supports"] == [2.0, 1000.0]
    values = found[accuracy_key(classes)]
    assert isinstance(values, list)
    return values


def within(items: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, float]:
    """What is left of items without the means of their classes, and how far to shrink it."""
    means = np.stack([items[labels == label].mean(0) for label in range(labels.max() + 1)])
    apart = items - means[labels]
    return apart, float(oas(apart, assume_centered=True)[1])


def nearest(task: Centroids, size: int, metric: np.ndarray) -> float:
    """Accuracy of the nearest class mean by (x - m)^T metric (x - m)."""
    items, labels = supports_of(task, size)
    queries, truth = arrays(task, "test")
    hits = 0
    for query, label in zip(queries, truth, strict=True):
        distances = []
        for other in range(labels.max() + 1):
            apart = query - items[labels == other].mean(0)
            distances.append(apart @ metric @ apart)
        hits += int(np.argmin(distances)) == label
    return hits / len(truth)


def test_the_mean_of_items(task: Centroids, classes: int) -> None:
    metric = np.eye(arrays(task, "test")[0].shape[1])
    expected = [nearest(task, size, metric) for size in SUPPORTS]
    assert measured(mean_accuracy, task, classes) == pytest.approx(expected, abs=0.003)


def test_the_whitened_mean_is_the_nearest_by_mahalanobis(task: Centroids, classes: int) -> None:
    apart, share = within(*arrays(task, "train"))
    covariance = apart.T @ apart / len(apart)
    scale = np.trace(covariance) / len(covariance)
    metric = np.linalg.inv((1 - share) * covariance + share * scale * np.eye(len(covariance)))
    expected = [nearest(task, size, metric) for size in SUPPORTS]
    assert measured(whitened_accuracy, task, classes) == pytest.approx(expected, abs=0.003)


def test_linear_discriminant_analysis_of_the_supports(task: Centroids, classes: int) -> None:
    queries, truth = arrays(task, "test")
    expected = []
    for size in SUPPORTS:
        items, labels = supports_of(task, size)
        analysis = LinearDiscriminantAnalysis("lsqr", shrinkage=within(items, labels)[1])
        expected.append(analysis.fit(items, labels).score(queries, truth))
    assert measured(discriminant_accuracy, task, classes) == pytest.approx(expected, abs=0.003)


def test_one_support_has_no_covariance(task: Centroids, classes: int) -> None:
    found = discriminant_accuracy(None, task, supports=(1, 4), ways=(classes,), draws=2)
    assert found["supports"] == [4.0]


def test_an_untrained_model_is_the_one_that_training_starts_from(
    task: Centroids, classes: int
) -> None:
    small = replace(task, way=5, support=2, query=2)
    arguments = {"supports": (2,), "ways": (classes,), "draws": 1}
    torch.manual_seed(3)
    found = untrained_accuracy(None, small, **arguments)
    torch.manual_seed(3)
    assert found == small.growing(small.build().eval(), **arguments)
