"""Schedules of the learning rate: functions from progress, in [0, 1), to a factor."""

from __future__ import annotations

import math


def cosine(progress: float, warmup: float = 0.05) -> float:
    """Rise linearly from zero, then fall to zero along a cosine.

    Args:
        progress: The fraction of the training that is done.
        warmup: The fraction of the training during which the rate rises.

    >>> [round(cosine(progress), 3) for progress in (0.0, 0.025, 0.05, 0.525, 1.0)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def constant(progress: float) -> float:
    """Keep the rate.

    >>> constant(0.3)
    1.0
    """
    return 1.0
