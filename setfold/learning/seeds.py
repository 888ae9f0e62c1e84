"""Seeds of a training. They follow from what they are for, so no generator needs to be saved."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import NamedTuple

import torch


class Draw(StrEnum):
    """The purpose of random numbers; each has its own stream."""

    WEIGHTS = "weights"
    ORDER = "order"
    STEP = "step"
    VALIDATION = "validation"
    MEASUREMENT = "measurement"


class Seeds(NamedTuple):
    """The seeds of one training.

    Args:
        seed: The seed that a user chooses.
        stage: The number of trainings that came before, if this one continues with their weights.
            They draw different numbers.

    >>> Seeds(3).of(Draw.STEP, 7) == seed_for(Draw.STEP, 3, 7)
    True
    """

    seed: int = 0
    stage: int = 0

    def of(self, use: Draw, *numbers: int) -> int:
        """Return the seed for a purpose, such as step 7."""
        return seed_for(use, self.seed, *numbers, *([self.stage] if self.stage else []))


def seed_for(use: Draw, *numbers: int) -> int:
    """Derive a 63-bit seed from its purpose and some numbers.

    >>> seed_for(Draw.STEP, 0, 1) != seed_for(Draw.STEP, 1, 0)
    True
    """
    text = " ".join([use, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch like `torch.manual_seed`, but only for the device in use.

    `torch.manual_seed` takes a millisecond, because it formats a traceback for every other device.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
