from __future__ import annotations

from dataclasses import dataclass

import torch

from experiments.memory import cost_of_step
from tests.experiments.tiny import Line


@dataclass(frozen=True)
class Hungry(Line):
    """A step that takes a hundred megabytes for a moment."""

    def loss(self, model, batch):
        return super().loss(model, batch) + 0 * torch.ones(25_000_000).sum()


def test_a_steps_memory_is_its_own_whatever_the_parent_holds():
    held = torch.ones(150_000_000)  # 600 MB
    assert 50 < cost_of_step(Hungry(), 8, steps=1).megabytes < 300
    assert len(held)
