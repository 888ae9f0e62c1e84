"""Max regression: the largest of a few numbers, as the Set Transformer's paper poses it.

Sets of one to ten numbers, uniform in [0, 100]; the mean absolute error of the predicted maximum.
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
    """Sets of numbers, padded."""

    values: Tensor  # (B, n, 1), in [0, LARGEST]
    mask: Tensor  # (B, n), True where there is one

    def maximum(self) -> Tensor:
        """The largest number of each set: (B,)."""
        return self.values.squeeze(-1).masked_fill(~self.mask, -torch.inf).amax(1)


def draw_numbers(sets: int, most: int, generator: torch.Generator | None = None) -> Numbers:
    """Sets of 1 to `most` numbers each, all numbers of a set uniform and independent."""
    values = LARGEST * torch.rand(sets, most, 1, generator=generator)
    lengths = torch.randint(1, most + 1, (sets, 1), generator=generator)
    return Numbers(values, torch.arange(most) < lengths)


class Regressor(nn.Module):
    """encoder -> a small network -> one number, in the unit of the input.

    Args:
        encoder: (B, n, 1) -> (B, width), of numbers in [0, 1].
        width: of the encoding.
    """

    def __init__(self, encoder: SetEncoder, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = linears(width, width, width, 1)

    def forward(self, numbers: Numbers) -> Tensor:
        """The predicted maxima (B,)."""
        encoding = self.encoder(numbers.values / LARGEST, numbers.mask)
        return LARGEST * self.head(encoding).squeeze(-1)


@dataclass(frozen=True)
class Maximum(Task):
    """The maximum of a set of numbers.

    Args:
        pool: folds the numbers' features.
        layers: linear layers on each number before the pool, with a ReLU between them.
        width: of these layers, and of the encoding.
        sets: in an epoch.
        most: numbers in a set.
        tested: sets on which the model is measured.
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
        """Sets that are drawn anew, whatever their numbers are."""
        return draw_numbers(len(items), self.most)

    def loss(self, model: nn.Module, batch: Numbers) -> Tensor:
        return l1_loss(model(batch), batch.maximum())

    def evaluate(self, model: nn.Module, split: str) -> Metrics:
        """The mean absolute error on sets that are drawn once."""
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(EVALUATION_SEEDS[split])
        drawn = draw_numbers(self.tested, self.most, generator)
        there = Numbers(*(part.to(device) for part in drawn))
        return {self.metric: l1_loss(model(there), there.maximum()).item()}
