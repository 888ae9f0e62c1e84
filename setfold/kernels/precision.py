"""The precision of running totals."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """float64, because low-precision running sums stagnate; float32 where the device has no other.

    >>> accumulator_dtype(torch.device("cpu"))
    torch.float64
    """
    return torch.float32 if device.type == "mps" else torch.float64


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which nothing is cast: what is summed up must not be rounded on the way."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on; there is none on the meta device, and no way to ask."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
