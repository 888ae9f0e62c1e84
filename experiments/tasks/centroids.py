"""Class centroids: prototypical networks with support sets of any size.

A class is the set of its support images, folded into one vector (its centroid). The same model
encodes a query as a set of one element and assigns it to the class with the nearest centroid.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from sklearn.manifold import TSNE
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from experiments.data import mnist, tiny_imagenet
from experiments.pools import Pool
from experiments.recipe import Metrics, Task
from experiments.tasks.networks import linears
from setfold import SetEncoder, SetState, StreamingSetEncoder

DIM = 128  # dimensions of a centroid
CHUNK = 500  # elements per chunk in evaluation


@dataclass(frozen=True)
class Centroids(Task):
    """Classify queries by the nearest class centroid.

    Args:
        pool: set encoder that folds the features of a support set into its centroid.
        way: number of classes per episode.
        support: number of support elements per class.
        query: number of queries per class.
        episodes: number of episodes per epoch.
    """

    metric: ClassVar[str] = "accuracy"
    larger_is_better: ClassVar[bool] = True

    pool: Pool
    way: int
    support: int
    query: int
    episodes: int

    @abstractmethod
    def data(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return items (n, ...) and labels (n,) of each split."""

    @abstractmethod
    def prepared(self, items: Tensor) -> Tensor:
        """Convert items (N, ...) to elements for the model."""

    def items(self) -> int:
        return self.episodes

    def batch(self, items: Tensor) -> Tensor:
        """Draw random episodes (E, way, support + query, ...); only the number of items matters."""
        rows = torch.stack([self._episode() for _ in items])
        images = self.data()[0]["train"]
        return self.prepared(images[rows.flatten()]).unflatten(0, rows.shape)

    def _episode(self) -> Tensor:
        """Draw row indices (way, support + query) of the train split."""
        classes = _rows_of_classes(self)
        size = self.support + self.query
        chosen = torch.randperm(len(classes))[: self.way].tolist()
        return torch.stack([_drawn(classes[label], size) for label in chosen])

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the cross-entropy of a softmax over negative squared distances to centroids."""
        centroids, queries = self.encode(model, batch)  # (E, way, d), (E, way * query, d)
        distances = (queries.unsqueeze(2) - centroids.unsqueeze(1)).square().sum(-1)
        labels = torch.arange(batch.shape[1], device=batch.device)
        labels = labels.repeat_interleave(self.query).expand(batch.shape[0], -1)
        return cross_entropy(-distances.flatten(0, 1), labels.flatten())

    def encode(self, model: nn.Module, episodes: Tensor) -> tuple[Tensor, Tensor]:
        """Encode centroids (E, way, d) and queries (E, way * query, d) in one batch.

        The features run once, and random slots are the same for centroids and queries.
        """
        number, way = episodes.shape[:2]
        support, query = episodes.split([self.support, self.query], dim=2)
        sets, singles = number * way, number * way * self.query
        owner = torch.arange(sets, device=episodes.device).repeat_interleave(self.support)
        alone = torch.arange(sets, sets + singles, device=episodes.device)
        encodings = model(
            torch.cat([support.flatten(0, 2), query.flatten(0, 2)]),
            index=torch.cat([owner, alone]),
            batch_size=sets + singles,
        )
        centroids, queries = encodings.split([sets, singles])
        return centroids.unflatten(0, (number, way)), queries.unflatten(0, (number, -1))

    def evaluate(self, model: nn.Module, split: str) -> Metrics:
        """Measure accuracy over all classes on 2,000 queries, with supports as in training."""
        ways = (len(_rows_of_classes(self)),)
        found = self.growing(
            model, supports=(self.support,), ways=ways, draws=5, queries=2000, split=split
        )
        accuracies = found[accuracy_key(ways[0])]
        assert isinstance(accuracies, list)
        return {self.metric: accuracies[0]}

    # ---- measurements of the recipes ---------------------------------------------------------

    @torch.no_grad()
    def growing(
        self,
        model: nn.Module | None,
        *,
        queries: int | None = None,
        split: str = "test",
        **arguments: Any,
    ) -> Metrics:
        """Measure the accuracy of the nearest centroid while support sets grow.

        Args:
            model: model in eval mode.
            queries: number of queries, evenly spaced over the split; None for all.
            split: split of the queries.
            arguments: other arguments of `accuracies`.
        """
        model = _streaming(model)
        items, labels = self.queries(split, queries)
        encodings = encoded(model, self, items)
        return self.accuracies(
            model,
            lambda state: torch.cdist(encodings, model.readout(state)),
            labels.to(encodings.device),
            split=split,
            **arguments,
        )

    def accuracies(
        self,
        model: StreamingSetEncoder,
        distances_to: Callable[[SetState], Tensor],
        labels: Tensor,
        *,
        supports: Sequence[int],
        ways: Sequence[int],
        draws: int = 10,
        redrawn: int = 100,
        split: str = "test",
    ) -> Metrics:
        """Measure accuracy while support sets grow: one stream per class, read at several sizes.

        Args:
            model: model in eval mode that absorbs the supports.
            distances_to: function of the state of all classes: distances (queries, classes).
            labels: classes of the queries (queries,).
            supports: increasing sizes at which the states are read; smaller classes use all items.
            ways: numbers of classes to choose from; if not all, the mean over ten random choices.
            draws: number of random streams to average over.
            redrawn: largest size to average over `draws` streams; larger sizes use the first one.
            split: split of the queries.
        """
        hits: dict[tuple[int, int], list[float]] = {}
        for draw in range(draws):
            generator = torch.Generator().manual_seed(draw)
            sizes = [size for size in supports if draw == 0 or size <= redrawn]
            for size, state in self._states(model, sizes, split, generator):
                distances = distances_to(state)
                for way in ways:
                    found = accuracy(distances, labels, way, generator)
                    hits.setdefault((way, size), []).append(found)
        measured: Metrics = {"supports": [float(size) for size in supports]}
        for way in ways:
            means = [sum(hits[way, size]) / len(hits[way, size]) for size in supports]
            measured[accuracy_key(way)] = means
        return measured

    @torch.no_grad()
    def picture(
        self,
        model: nn.Module | None,
        *,
        classes: int = 10,
        queries: int = 400,
        split: str = "test",
    ) -> Metrics:
        """Project queries and centroids (of one support and of all) to the plane by t-SNE.

        Args:
            model: model in eval mode.
            classes: number of classes to show.
            queries: total number of queries.
            split: split of the queries.
        """
        model = _streaming(model)
        items, labels = self.queries(split)
        of_classes = _rows_by_label(labels)[:classes]
        shown = torch.cat([rows[: queries // classes] for rows in of_classes])
        most = max(len(rows) for rows in _rows_by_label(self._supports(split)[1]))
        states = self._states(model, [1, most], split, torch.Generator().manual_seed(0))
        one, everything = (model.readout(state)[:classes] for _, state in states)
        points = torch.cat([encoded(model, self, items[shown]), one, everything]).cpu().numpy()
        flat = torch.from_numpy(TSNE(random_state=0, perplexity=15).fit_transform(points))
        measured: Metrics = {"labels": labels[shown].float().tolist()}
        parts = flat.split([len(shown), classes, classes])
        for name, part in zip(("queries", "one support", "all supports"), parts, strict=True):
            for axis, values in zip("xy", part.T.tolist(), strict=True):
                measured[f"{name}, {axis}"] = [round(value, 3) for value in values]
        return measured

    def queries(self, split: str, number: int | None = None) -> tuple[Tensor, Tensor]:
        """Return items and labels of a split, or some of them, evenly spaced."""
        items, labels = (part[split] for part in self.data())
        step = 1 if number is None else -(-len(labels) // number)
        return items[::step], labels[::step]

    def _supports(self, split: str) -> tuple[Tensor, Tensor]:
        """Return the train split, or train and validation splits for the final test."""
        items, labels = self.data()
        splits = ["train", "validation"] if split == "test" else ["train"]
        return torch.cat([items[s] for s in splits]), torch.cat([labels[s] for s in splits])

    def _states(
        self,
        model: StreamingSetEncoder,
        sizes: Sequence[int],
        split: str,
        generator: torch.Generator,
    ) -> Iterator[tuple[int, SetState]]:
        """Yield the state of all classes after each number of supports per class."""
        items, labels = self._supports(split)
        classes = [_drawn(rows, len(rows), generator) for rows in _rows_by_label(labels)]
        state, seen = model.initial_state(len(classes)), 0
        for size in sizes:
            arriving = torch.cat([rows[seen:size] for rows in classes])
            state = absorbed(model, self, state, items[arriving], labels[arriving])
            seen = size
            yield size, state


@dataclass(frozen=True)
class DigitCentroids(Centroids):
    """MNIST digits, 5-way with 10 supports and 10 queries; a small convolutional network.

    Args:
        channels: channels after the second of three convolutions; None for 64.
    """

    way: int = 5
    support: int = 10
    query: int = 10
    episodes: int = 1000
    channels: int | None = None

    def data(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        digits = mnist.load(made_up=self.made_up)
        return digits.images, digits.labels

    def prepared(self, items: Tensor) -> Tensor:
        return items.unsqueeze(1).float() / 255  # (N, 1, 28, 28)

    def build(self) -> SetEncoder:
        channels = 64 if self.channels is None else self.channels
        features = nn.Sequential(
            _convolution(1, 32),
            nn.MaxPool2d(2),
            _convolution(32, channels),
            nn.MaxPool2d(2),
            _convolution(channels, DIM),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        return self.pool.build(DIM, DIM, features)


@dataclass(frozen=True)
class FeatureCentroids(Centroids):
    """Frozen features of Tiny ImageNet, 20-way with 2 supports and 2 queries.

    Args:
        layers: number of linear layers before the pool, with ReLUs in between.
        hidden: units of these layers but the last; None for as many as a centroid has dimensions.
    """

    way: int = 20
    support: int = 2
    query: int = 2
    episodes: int = 1000
    layers: int = 0
    hidden: int | None = None

    def data(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        found = tiny_imagenet.load(made_up=self.made_up)
        return found.features, found.labels

    def prepared(self, items: Tensor) -> Tensor:
        return items

    def build(self) -> SetEncoder:
        width = self.data()[0]["train"].shape[1]
        if self.layers == 0:
            return self.pool.build(width, DIM)
        hidden = DIM if self.hidden is None else self.hidden
        return self.pool.build(DIM, DIM, linears(width, *[hidden] * (self.layers - 1), DIM))


def accuracy_key(way: int) -> str:
    """Return the key of the accuracies in the metrics of `growing`."""
    return f"accuracy, {way}-way"


def accuracy(distances: Tensor, labels: Tensor, way: int, generator: torch.Generator) -> float:
    """Return the fraction of queries that are nearest to their own centroid.

    Args:
        distances: (queries, classes).
        labels: (queries,).
        way: number of classes to choose from; if not all, the mean over ten random choices.
        generator: random generator for these choices.
    """
    classes = distances.shape[1]
    if way >= classes:
        return (distances.argmin(1) == labels).float().mean().item()
    found = []
    for _ in range(10):
        chosen = torch.randperm(classes, generator=generator)[:way].to(labels.device)
        among = torch.isin(labels, chosen)
        nearest = chosen[distances[among][:, chosen].argmin(1)]
        found.append((nearest == labels[among]).float().mean().item())
    return sum(found) / len(found)


def encoded(model: StreamingSetEncoder, task: Centroids, items: Tensor) -> Tensor:
    """Encode queries (N, ...), each as a set of one element: (N, d)."""
    device = model.initial_state().device
    chunks = items.split(CHUNK)
    return torch.cat([model(task.prepared(c).to(device).unsqueeze(1)) for c in chunks])


def absorbed(
    model: StreamingSetEncoder, task: Centroids, state: SetState, items: Tensor, labels: Tensor
) -> SetState:
    """Update the state of all classes with items (N, ...), chunk by chunk."""
    for chunk, owner in zip(items.split(CHUNK), labels.split(CHUNK), strict=True):
        elements = task.prepared(chunk).to(state.device)
        state = model.update(state, elements, index=owner.to(state.device))
    return state


def _convolution(dim_in: int, dim_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(dim_in, dim_out, 3, padding=1), nn.BatchNorm2d(dim_out), nn.LeakyReLU()
    )


def _streaming(model: nn.Module | None) -> StreamingSetEncoder:
    if not isinstance(model, StreamingSetEncoder):
        raise TypeError(
            "growing centroids need an encoder that folds in one pass (StreamingSetEncoder); got "
            f"{type(model).__name__}."
        )
    return model


def _drawn(rows: Tensor, number: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw rows without replacement, in random order."""
    if number > len(rows):
        raise ValueError(f"cannot draw {number} elements of a class that has {len(rows)}.")
    return rows[torch.randperm(len(rows), generator=generator)[:number]]


def _rows_by_label(labels: Tensor) -> list[Tensor]:
    """Return the row indices of each label."""
    return list(labels.argsort(stable=True).split(labels.bincount().tolist()))


@cache
def _rows_of_classes(task: Centroids) -> list[Tensor]:
    """Return the row indices of each class in the train split."""
    return _rows_by_label(task.data()[1]["train"])
