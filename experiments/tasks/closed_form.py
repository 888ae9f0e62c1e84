"""Class centroids without training: plain statistics of the items, by the same measure.

Each function is the measurement of a run without training, so its first argument is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import setfold
from experiments.recipe import Metrics
from experiments.tasks.centroids import Centroids, absorbed


def mean_accuracy(model: None, task: Centroids, **arguments: Any) -> Metrics:
    """Measure the mean of the items themselves.

    Args:
        model: Always None: nothing is trained.
        task: task with the items.
        arguments: of `Centroids.growing`.
    """
    return task.growing(_of_items(setfold.Pool(width_of(task), "mean")), **arguments)


def whitened_accuracy(model: None, task: Centroids, **arguments: Any) -> Metrics:
    """Measure the mean of items that are whitened within classes by the train split."""
    layer = setfold.whitening(_statistics(task)).float()
    encoder = setfold.Pool(width_of(task), "mean")
    return task.growing(_of_items(encoder, layer).eval(), **arguments)


@torch.no_grad()
def discriminant_accuracy(
    model: None,
    task: Centroids,
    *,
    supports: Sequence[int],
    split: str = "test",
    **arguments: Any,
) -> Metrics:
    """Measure linear discriminant analysis of the supports alone, from two supports per class on.

    Args:
        model: Always None: nothing is trained.
        task: task with the items.
        supports: increasing sizes at which the states are read. Sizes below two are left out: there
            is no covariance within classes of one item.
        split: split of the queries.
        arguments: other arguments of `Centroids.accuracies`.
    """
    items, labels = task.queries(split)
    queries = _flat(task, items).double()

    def distances(state: setfold.SetState) -> Tensor:
        return -setfold.linear_discriminant(state)(queries)

    encoder = _of_items(setfold.Covariance(width_of(task)))
    enough = [size for size in supports if size >= 2]
    return task.accuracies(encoder, distances, labels, supports=enough, split=split, **arguments)


def untrained_accuracy(model: None, task: Centroids, **arguments: Any) -> Metrics:
    """Measure the task's model as it is before training."""
    return task.growing(task.build().eval(), **arguments)


def width_of(task: Centroids) -> int:
    """Return the number of numbers of an item."""
    return _flat(task, task.data()[0]["train"][:1]).shape[1]


def _statistics(task: Centroids) -> setfold.SetState:
    """Return the state of `Covariance` of all classes after the train split."""
    encoder = _of_items(setfold.Covariance(width_of(task)))
    items, labels = (part["train"] for part in task.data())
    order = labels.argsort(stable=True)  # a chunk of few classes touches few states
    empty = encoder.initial_state(int(labels.max()) + 1)
    return absorbed(encoder, task, empty, items[order], labels[order])


def _of_items(encoder: setfold.StreamingSetEncoder, *layers: nn.Module) -> setfold.Composition:
    """Let an encoder read the task's items as vectors, after these layers."""
    return setfold.Composition(encoder, nn.Sequential(nn.Flatten(), *layers))


def _flat(task: Centroids, items: Tensor) -> Tensor:
    return task.prepared(items).flatten(1)
