"""Network parts shared by the tasks."""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise

from torch import nn


class Activation(StrEnum):
    """Activation function after a linear layer."""

    TANH = "tanh"
    RELU = "relu"

    def module(self) -> nn.Module:
        """Build the module."""
        return {"tanh": nn.Tanh, "relu": nn.ReLU}[self.value]()


def linears(*widths: int) -> nn.Sequential:
    """Build linear layers of these widths, with ReLUs in between.

    >>> linears(5, 64, 64)
    Sequential(
      (0): Linear(in_features=5, out_features=64, bias=True)
      (1): ReLU()
      (2): Linear(in_features=64, out_features=64, bias=True)
    )
    """
    layers = [[nn.ReLU(), nn.Linear(*pair)] for pair in pairwise(widths)]
    return nn.Sequential(*[module for pair in layers for module in pair][1:])
