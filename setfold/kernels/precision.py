"""The precision of running totals."""

from __future__ import annotations

import torch


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """float64, because low-precision running sums stagnate; float32 where the device has no other.

    >>> accumulator_dtype(torch.device("cpu"))
    torch.float64
    """
    return torch.float32 if device.type == "mps" else torch.float64
