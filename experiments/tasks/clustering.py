"""Amortised clustering: predict the parameters of a mixture of Gaussians from a set of points.

The task follows the Set Transformer paper (Lee et al., ICML 2019): mixtures of four Gaussians in
the plane, 100 to 500 points, log-likelihood per point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from experiments.pools import Pool
from experiments.recipe import Metrics, Task
from experiments.tasks.networks import linears
from setfold import SAB, SetEncoder, fold

SPREAD = 4.0  # means are uniform in [-SPREAD, SPREAD]^2
DEVIATION = 0.3  # standard deviation of every cluster, in both directions
EVALUATION_SEEDS = {"validation": 1, "test": 2}


class Mixture(NamedTuple):
    """Parameters of B mixtures of K Gaussians with diagonal covariance."""

    log_weights: Tensor  # (B, K)
    means: Tensor  # (B, K, 2)
    deviations: Tensor  # (B, K, 2)

    def log_likelihood(self, points: Tensor) -> Tensor:
        """Return the log-likelihood (B, n) of points (B, n, 2)."""
        apart = (points.unsqueeze(2) - self.means.unsqueeze(1)) / self.deviations.unsqueeze(1)
        scale = self.deviations.log().sum(-1) + math.log(2 * math.pi)  # (B, K)
        of_clusters = -apart.square().sum(-1) / 2 - scale.unsqueeze(1)  # (B, n, K)
        return (of_clusters + self.log_weights.unsqueeze(1)).logsumexp(-1)

    def draw(self, number: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw `number` points of each mixture: (B, number, 2)."""
        clusters = torch.multinomial(
            self.log_weights.exp(), number, replacement=True, generator=generator
        ).unsqueeze(-1)
        noise = torch.randn(*clusters.shape[:2], 2, generator=generator)
        means, deviations = (
            part.take_along_dim(clusters, 1) for part in (self.means, self.deviations)
        )
        return means + deviations * noise


def draw_mixtures(number: int, clusters: int, generator: torch.Generator | None = None) -> Mixture:
    """Draw mixtures with weights from a flat Dirichlet and means uniform in a square."""
    shares = torch.empty(number, clusters).exponential_(generator=generator)
    means = SPREAD * (2 * torch.rand(number, clusters, 2, generator=generator) - 1)
    weights = shares / shares.sum(1, keepdim=True)  # exponentials over their sum: Dirichlet(1)
    return Mixture(weights.log(), means, torch.full_like(means, DEVIATION))


class Clusterer(nn.Module):
    """Encoder, self-attention between one vector per cluster, and a linear map to parameters.

    Args:
        encoder: set encoder (B, n, 2) -> (B, clusters * width).
        clusters: number of clusters in a mixture.
        width: width of a cluster's vector.
        blocks: number of self-attention blocks between the clusters.
    """

    def __init__(self, encoder: SetEncoder, clusters: int, width: int, blocks: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = nn.Sequential(
            nn.Unflatten(1, (clusters, width)),
            *(SAB(width, num_heads=4, layer_norm=False) for _ in range(blocks)),
            nn.Linear(width, 5),
        )

    def forward(self, points: Tensor) -> Mixture:
        """Predict the mixtures of points (B, n, 2)."""
        return self.decode(self.encoder(points))

    def decode(self, encoding: Tensor) -> Mixture:
        """Predict the mixtures from encodings (B, clusters * width)."""
        weight, means, scales = self.decoder(encoding).split([1, 2, 2], dim=-1)
        deviations = nn.functional.softplus(scales) + 1e-3  # keeps clusters from collapsing
        return Mixture(weight.squeeze(-1).log_softmax(-1), means, deviations)


@dataclass(frozen=True)
class Clustering(Task):
    """Predict the parameters of mixtures of Gaussians from sets of points.

    Args:
        pool: set encoder of the points' features.
        layers: number of linear layers on each point before the pool, with ReLUs in between.
        width: width of these layers and of a cluster's vector.
        blocks: number of self-attention blocks between the clusters' vectors.
        sets: number of sets per epoch.
        least: smallest number of points in a set; all sets of a batch have the same number.
        most: largest number of points in a set.
        clusters: number of clusters in a mixture.
        tested: number of batches of ten sets in evaluation.
    """

    metric: ClassVar[str] = "log-likelihood"
    larger_is_better: ClassVar[bool] = True

    pool: Pool
    layers: int = 3
    width: int = 128
    blocks: int = 1
    sets: int = 10_000
    least: int = 100
    most: int = 500
    clusters: int = 4
    tested: int = 100

    def items(self) -> int:
        return self.sets

    def build(self) -> Clusterer:
        features = linears(2, *[self.width] * self.layers)
        encoder = self.pool.build(self.width, self.clusters * self.width, features)
        return Clusterer(encoder, self.clusters, self.width, self.blocks)

    def batch(self, items: Tensor) -> Tensor:
        """Draw points (B, n, 2) of random mixtures; only the number of items matters."""
        number = int(torch.randint(self.least, self.most + 1, ()))
        return draw_mixtures(len(items), self.clusters).draw(number)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        mixture: Mixture = model(batch)
        return -mixture.log_likelihood(batch).mean()

    def evaluate(self, model: nn.Module, split: str) -> Metrics:
        """Measure the log-likelihood per point of the model and of the true parameters."""
        device = next(model.parameters()).device
        found, true = [], []
        for mixture, points in self._fixed(split):
            there = points.to(device)
            found.append(model(there).log_likelihood(there).mean().item())
            true.append(mixture.log_likelihood(points).mean().item())
        return {self.metric: fmean(found), "oracle": fmean(true)}

    def _fixed(self, split: str) -> Iterator[tuple[Mixture, Tensor]]:
        """Yield batches of ten mixtures and their points, the same in every call."""
        generator = torch.Generator().manual_seed(EVALUATION_SEEDS[split])
        for _ in range(self.tested):
            number = int(torch.randint(self.least, self.most + 1, (), generator=generator))
            mixture = draw_mixtures(10, self.clusters, generator)
            yield mixture, mixture.draw(number, generator)

    @torch.no_grad()
    def streamed(
        self, model: nn.Module | None, *, mixtures: Mapping[int, int], chunk: int = 40_000
    ) -> Metrics:
        """Measure the log-likelihood per point of larger and larger sets, folded in chunks.

        Points are generated on demand; only one chunk is in memory. Fewer mixtures are the first
        of more mixtures, so their scores can be compared one by one.

        Args:
            model: model in eval mode whose encoder folds in one or several passes.
            mixtures: number of sets for each number of points per set.
            chunk: points per chunk, of all sets together.

        Returns:
            For each number of points, the log-likelihood of each set minus that under the true
            parameters.
        """
        assert isinstance(model, Clusterer)
        device = next(model.parameters()).device
        most = draw_mixtures(
            max(mixtures.values()), self.clusters, torch.Generator().manual_seed(0)
        )
        found: Metrics = {}
        for size, number in mixtures.items():
            truth = Mixture(*(part[:number] for part in most))
            chunks = partial(_points, truth, size, max(1, chunk // number), device)
            guess = model.decode(fold(model.encoder, chunks))
            there = Mixture(*(part.to(device) for part in truth))
            apart = _log_likelihood_of(guess, chunks()) - _log_likelihood_of(there, chunks())
            found[below_oracle_key(size)] = apart.tolist()
        return found


def below_oracle_key(size: int) -> str:
    """Return the key of the scores of sets with this many points, in the metrics of `streamed`."""
    return f"below oracle, {size} points"


def _points(mixture: Mixture, size: int, chunk: int, device: torch.device) -> Iterator[Tensor]:
    """Yield points of mixtures in chunks (B, n, 2), the same in every call."""
    generator = torch.Generator().manual_seed(size)
    for start in range(0, size, chunk):
        yield mixture.draw(min(chunk, size - start), generator).to(device)


def _log_likelihood_of(mixture: Mixture, chunks: Iterator[Tensor]) -> Tensor:
    """Return the mean log-likelihood per point of each set (B,), over all chunks."""
    parts = [
        (mixture.log_likelihood(points).sum(1, dtype=torch.float64), points.shape[1])
        for points in chunks
    ]
    return torch.stack([total for total, _ in parts]).sum(0) / sum(count for _, count in parts)
