"""The precision of running totals."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """float64, because running sums in lower precision stagnate; float32 on MPS, without float64.

    >>> accumulator_dtype(torch.device("cpu"))
    torch.float64
    """
    return torch.float32 if device.type == "mps" else torch.float64


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context that disables autocast, so that running totals are not rounded."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else nullcontext()


def autocasts(device: torch.device) -> bool:
    """Whether autocast is enabled for a device; False for the meta device, which has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
