"""Needles in large bags: multiple-instance learning in the shape of whole-slide pathology.

A bag holds thousands of digits. A positive bag holds a few zeros, the needles, and a negative one
none. Only the bag has a label. New bags are drawn in every step, as rows of a matrix of elements;
the elements are copied chunk by chunk. The metric is the area under the ROC curve (AUC).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding

import setfold
from experiments.data import digit_elements
from experiments.pools import StreamingPool
from experiments.recipe import Metrics, Task
from experiments.tasks.networks import linears
from setfold.learning.baselines import fit_linear, scores_of, standardized
from setfold.preprocessing.targets import Classes

NEEDLE = 0
EVALUATION_SEEDS = {"validation": 1, "test": 2}
BAGS = 8  # drawn at a time outside of training
ROWS = 20_000  # elements of all bags at a time outside of training
TOPS = (1, 10, 100, 1000)  # how many of the largest scores of elements may be the score of a bag


class Bags(NamedTuple):
    """Bags of elements, and their labels."""

    rows: Tensor  # (B, n) int64, rows of the matrix of elements
    labels: Tensor  # (B,) float, 1 for positive


class Chunks(Sequence[Any]):
    """Chunks (B, chunk, d) of bags, each copied when it is read.

    Args:
        elements: the matrix of elements (N, d).
        rows: (B, n), its rows in each bag.
        chunk: elements of a bag in a chunk.

    >>> chunks = Chunks(torch.arange(8.0).view(4, 2), torch.tensor([[3, 0, 2]]), chunk=2)
    >>> [chunk.tolist() for chunk in chunks]
    [[[[6.0, 7.0], [0.0, 1.0]]], [[[4.0, 5.0]]]]
    """

    def __init__(self, elements: Tensor, rows: Tensor, chunk: int) -> None:
        self.elements, self.parts = elements, rows.split(chunk, 1)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, number: Any) -> Any:
        return embedding(self.parts[number], self.elements)  # indexing takes six times as long


class Classifier(nn.Module):
    """A set encoder and a network that predicts one logit.

    Args:
        encoder: set encoder (B, n, d) -> (B, width).
        width: width of the encoding.
        normalise: whether to apply a BatchNorm to the encoding.
    """

    def __init__(self, encoder: setfold.SetEncoder, width: int, normalise: bool) -> None:
        super().__init__()
        self.encoder = encoder
        norm = nn.BatchNorm1d(width) if normalise else nn.Identity()
        self.head = nn.Sequential(norm, linears(width, width, 1))

    def forward(self, chunks: Sequence[Any], gradient: str = "exact") -> Tensor:
        """Map bags in chunks (B, n_i, d) to logits (B, 1)."""
        return self.head(setfold.fold(self.encoder, chunks, gradient=gradient))


@dataclass(frozen=True)
class BagTask(Task):
    """Bags with and without needles.

    Args:
        size: elements of a bag.
        share: share of needles in a positive bag.
        bags: bags of a training.
        chunk: elements of a bag in a chunk.
        hidden: widths of the layers on each element, each with a ReLU.
        validated: bags for validation, half of them positive.
        tested: bags for the test, half of them positive.
    """

    metric: ClassVar[str] = "auc"
    larger_is_better: ClassVar[bool] = True

    size: int
    share: float
    bags: int
    chunk: int = 250
    hidden: tuple[int, ...] = (32, 32)
    validated: int = 100
    tested: int = 200

    @property
    def needles(self) -> int:
        """Number of needles in a positive bag."""
        return max(1, round(self.share * self.size))

    @property
    def length(self) -> int:
        """Number of elements of a bag that a training step reads."""
        return self.size

    def items(self) -> int:
        return self.bags

    def batch(self, items: Tensor) -> Bags:
        """Draw bags; those of odd items are positive."""
        return self.drawn("train", items % 2 == 1, self.length)

    def drawn(
        self,
        split: str,
        positive: Tensor,
        length: int,
        generator: torch.Generator | None = None,
    ) -> Bags:
        """Draw the first elements of bags, whose elements are in random order.

        Bags that are larger than the split repeat elements, so all are drawn with replacement.

        Args:
            split: the split that the elements come from.
            positive: (B,), whether a bag holds needles.
            length: number of elements to draw; needles beyond them are left out.
            generator: random generator; None for torch's global one.
        """
        features, others = self._elements(split)
        rows = torch.randint(others, (len(positive), length), generator=generator)
        for bag in torch.nonzero(positive)[:, 0].tolist():
            places = torch.randperm(self.size, generator=generator)[: self.needles]
            places = places[places < length]
            needles = torch.randint(others, len(features), places.shape, generator=generator)
            rows[bag, places] = needles
        return Bags(rows, positive.float())

    def chunks(self, split: str, rows: Tensor, chunk: int) -> Chunks:
        """Return bags of a split in chunks."""
        return Chunks(self._elements(split)[0].to(rows.device), rows, chunk)

    def blocks(
        self, split: str, bags: int, generator: torch.Generator | None = None
    ) -> Iterator[Bags]:
        """Yield whole bags of a split, a few at a time, half of them positive."""
        for numbers in torch.arange(bags).split(BAGS):
            yield self.drawn(split, numbers % 2 == 1, self.size, generator)

    def fixed(self, split: str) -> Iterator[Bags]:
        """Yield the bags for validation or test, the same in every call."""
        bags = {"validation": self.validated, "test": self.tested}[split]
        yield from self.blocks(split, bags, torch.Generator().manual_seed(EVALUATION_SEEDS[split]))

    def evaluate(self, model: nn.Module, split: str) -> Metrics:
        """Measure the AUC; of several scores of a bag, the best in validation counts."""
        found = self.areas(model, split)
        known = found
        if split != "validation" and len(found) > 1:
            known = self.areas(model, "validation")
        return {"auc": found[int(np.argmax(known))]}

    def areas(self, model: nn.Module, split: str) -> list[float]:
        """Return the AUC of each score."""
        device = next(model.parameters()).device
        scores, labels = [], []
        for bags in self.fixed(split):
            chunks = self.chunks(split, bags.rows.to(device), ROWS // BAGS)
            scores.append(self.scores(model, chunks).cpu())
            labels.append(bags.labels)
        truth = torch.cat(labels).numpy()
        return [float(roc_auc_score(truth, column)) for column in torch.cat(scores).T.numpy()]

    @abstractmethod
    def scores(self, model: nn.Module, chunks: Chunks) -> Tensor:
        """Return scores of whole bags, (B, S)."""

    def _elements(self, split: str) -> tuple[Tensor, int]:
        """Return the elements of a split, and the number of those that are no needles."""
        found = digit_elements.load(NEEDLE, made_up=self.made_up)
        return found.features[split], found.others[split]


@dataclass(frozen=True)
class Needles(BagTask):
    """Classify bags with a set encoder.

    Args:
        pool: set encoder of the elements' features.
        gradient: gradient of `setfold.fold` in training.
        normalise: whether to apply a BatchNorm to the encoding.
    """

    pool: StreamingPool = field(kw_only=True)
    gradient: str = "exact"
    normalise: bool = False

    @property
    def length(self) -> int:
        """Number of elements of a bag that a training step reads: of a subset, no others."""
        return min(self.chunk, self.size) if self.gradient == "subset" else self.size

    def build(self) -> Classifier:
        features, width = _layers(self.hidden), self.hidden[-1]
        return Classifier(self.pool.build(width, width, features), width, self.normalise)

    def loss(self, model: nn.Module, batch: Bags) -> Tensor:
        logits = model(self.chunks("train", batch.rows, self.chunk), self.gradient)
        return binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels)

    def scores(self, model: nn.Module, chunks: Chunks) -> Tensor:
        return model(chunks)


@dataclass(frozen=True)
class Instances(BagTask):
    """Classify elements, as if each had the label of its bag.

    The score of a bag is the mean of its largest scores. How many is chosen in validation.
    """

    @property
    def length(self) -> int:
        """Number of elements of a bag that a training step reads: one chunk."""
        return min(self.chunk, self.size)

    def build(self) -> nn.Module:
        return nn.Sequential(_layers(self.hidden), nn.Linear(self.hidden[-1], 1))

    def loss(self, model: nn.Module, batch: Bags) -> Tensor:
        (elements,) = self.chunks("train", batch.rows, self.chunk)
        logits = model(elements).squeeze(2)
        labels = batch.labels.unsqueeze(1).expand_as(logits)
        return binary_cross_entropy_with_logits(logits, labels)

    def scores(self, model: nn.Module, chunks: Chunks) -> Tensor:
        found = torch.cat([model(chunk).squeeze(2) for chunk in chunks], 1)
        largest = found.topk(min(max(TOPS), found.shape[1]), 1).values
        return torch.stack([largest[:, :top].mean(1) for top in TOPS], 1)


def _layers(hidden: Sequence[int]) -> nn.Module:
    return nn.Sequential(linears(digit_elements.DIM, *hidden), nn.ReLU())


def statistics_auc(model: None, task: BagTask) -> Metrics:
    """Measure logistic regression on plain statistics of as many bags as a training draws.

    Mean, deviation, minimum and maximum of each column. The penalty is chosen in validation.
    """
    train, validation, test = (
        _statistics(task, split, bags)
        for split, bags in (
            ("train", task.blocks("train", task.bags)),
            ("validation", task.fixed("validation")),
            ("test", task.fixed("test")),
        )
    )
    known, labels = (torch.cat(parts) for parts in zip(train, validation, strict=True))
    folds = np.repeat([-1, 0], [len(train[0]), len(validation[0])])
    target = Classes("bag", [0, 1])
    fitted = fit_linear(target, known, labels.long().numpy(), folds).whole
    scores = scores_of(fitted, standardized(known, test[0]), target)[:, 1]
    return {"auc": float(roc_auc_score(test[1].numpy(), scores))}


def _statistics(task: BagTask, split: str, bags: Iterator[Bags]) -> tuple[Tensor, Tensor]:
    """Return statistics (bags, 257) and labels (bags,)."""
    encoder = setfold.SummaryStatistics(digit_elements.DIM)
    found = [
        (setfold.fold(encoder, task.chunks(split, some.rows, ROWS // BAGS)), some.labels)
        for some in bags
    ]
    statistics, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    return statistics, labels
