"""Max regression: predict the largest of a few numbers, as in the Set Transformer paper.

Sets have one to ten numbers, uniform in [0, 100]. The metric is the mean absolute error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss

from experiments.pools import Pool
from experiments.recipe import Metrics, Task
from experiments.tasks.networks import linears
from setfold import SetEncoder

LARGEST = 100.0
EVALUATION_SEEDS = {"validation": 1, "test": 2}


class Numbers(NamedTuple):
    """Padded sets of numbers."""

    values: Tensor  # (B, n, 1), in [0, LARGEST]
    mask: Tensor  # (B, n), False for padding

    def maximum(self) -> Tensor:
        """Return the largest number of each set: (B,)."""
        return self.values.squeeze(-1).masked_fill(~self.mask, -torch.inf).amax(1)


def draw_numbers(sets: int, most: int, generator: torch.Generator | None = None) -> Numbers:
    """Draw sets of 1 to `most` independent uniform numbers."""
    values = LARGEST * torch.rand(sets, most, 1, generator=generator)
    lengths = torch.randint(1, most + 1, (sets, 1), generator=generator)
    return Numbers(values, torch.arange(most) < lengths)


class Regressor(nn.Module):
    """A set encoder and a small network that predicts one number, in the scale of the input.

    Args:
        encoder: set encoder of numbers in [0, 1], (B, n, 1) -> (B, width).
        width: width of the encoding.
    """

    def __init__(self, encoder: SetEncoder, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = linears(width, width, width, 1)

    def forward(self, numbers: Numbers) -> Tensor:
        """Predict the maxima (B,)."""
        encoding = self.encoder(numbers.values / LARGEST, numbers.mask)
        return LARGEST * self.head(encoding).squeeze(-1)


@dataclass(frozen=True)
class Maximum(Task):
    """Predict the maximum of a set of numbers.

    Args:
        pool: set encoder of the numbers' features.
        layers: number of linear layers on each number before the pool, with ReLUs in between.
        width: width of these layers and of the encoding.
        sets: number of sets per epoch.
        most: largest number of elements in a set.
        tested: number of sets in evaluation.
    """

    metric: ClassVar[str] = "error"
    larger_is_better: ClassVar[bool] = False

    pool: Pool
    layers: int = 4
    width: int = 64
    sets: int = 128_000
    most: int = 10
    tested: int = 20_000

    def items(self) -> int:
        return self.sets

    def build(self) -> Regressor:
        features = linears(1, *[self.width] * self.layers)
        encoder = self.pool.build(self.width, self.width, features)
        return Regressor(encoder, self.width)

    def batch(self, items: Tensor) -> Numbers:
        """Draw random sets; only the number of items matters."""
        return draw_numbers(len(items), self.most)

    def loss(self, model: nn.Module, batch: Numbers) -> Tensor:
        return l1_loss(model(batch), batch.maximum())

    def evaluate(self, model: nn.Module, split: str) -> Metrics:
        """Measure the mean absolute error on fixed sets."""
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(EVALUATION_SEEDS[split])
        drawn = draw_numbers(self.tested, self.most, generator)
        there = Numbers(*(part.to(device) for part in drawn))
        return {self.metric: l1_loss(model(there), there.maximum()).item()}
