"""What is kept of a set that grows: a state, or the features of all elements.

kept = keep(encoder, None, first)  # a new set
kept = keep(encoder, kept, second)
encoding = encode(encoder, kept)   # that of both chunks
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

import setfold


class Rereader(nn.Module):
    """Keeps the features of all elements; a network reads all of them for every encoding.

    Args:
        features: a module applied to each element, (B, n, ...) -> (B, n, d).
        network: a module on the features of all elements, (B, n, d) -> (B, ...).

    >>> Rereader(nn.Linear(3, 8), nn.Identity())(torch.randn(2, 100, 3)).shape
    torch.Size([2, 100, 8])
    """

    def __init__(self, features: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.network = network

    def forward(self, elements: Tensor) -> Tensor:
        return self.network(self.features(elements))


Encoder = setfold.StreamingSetEncoder | Rereader
Kept = setfold.SetState | Tensor


def keep(encoder: Encoder, kept: Kept | None, chunk: Tensor) -> Kept:
    """Return what is kept of sets after another chunk (B, n, ...); None is kept of empty sets."""
    if isinstance(encoder, Rereader):
        features = encoder.features(chunk)
        return torch.cat([kept, features], 1) if isinstance(kept, Tensor) else features
    state = kept if isinstance(kept, setfold.SetState) else encoder.initial_state(len(chunk))
    return encoder.update(state, chunk)


def encode(encoder: Encoder, kept: Kept) -> Tensor:
    """Return the encoding of sets from what is kept of them."""
    if isinstance(encoder, Rereader):
        return encoder.network(kept)
    return encoder.readout(cast("setfold.SetState", kept))


def numbers(kept: Kept) -> int:
    """Return how many numbers are kept of each set."""
    if isinstance(kept, Tensor):
        return kept[0].numel()
    return sum(part[0].numel() for parts in kept.statistics.values() for part in parts)
