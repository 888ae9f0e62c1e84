"""Settings of latents that attend to a set: frozen dataclasses that build encoders (B, K, dim).

ConstantMemory   latents of blocks, which do not depend on the set: one pass (CMANP)
Bottleneck       the same latents in every layer, which read all elements again (LBANP)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import setfold
from experiments.keeping import Rereader


@dataclass(frozen=True)
class ConstantMemory:
    """Constant Memory Attention Blocks (Feng et al., 2023).

    Args:
        dim: width of features and latents.
        num_latents: number K of latents, of the encoding and of each block.
        num_blocks: number of blocks.
        num_heads: number of heads.

    >>> ConstantMemory(dim=8, num_latents=5).build(nn.Linear(3, 8))(torch.randn(2, 100, 3)).shape
    torch.Size([2, 5, 8])
    """

    dim: int
    num_latents: int
    num_blocks: int = 2
    num_heads: int = 4

    def build(self, features: nn.Module) -> setfold.StreamingSetEncoder:
        """Build the encoder; features map each element to `dim` numbers."""
        sizes = (self.num_latents, self.num_latents, self.num_blocks, self.num_heads)
        encoder = setfold.ConstantMemoryEncoder(self.dim, self.dim, *sizes)
        return setfold.Composition(encoder, features)


@dataclass(frozen=True)
class Bottleneck:
    """Latents of Latent Bottlenecked Attentive Neural Processes (Feng et al., ICLR 2023).

    Args:
        dim: width of features and latents.
        num_latents: number K of latents.
        num_layers: number of layers.
        num_heads: number of heads.

    >>> Bottleneck(dim=8, num_latents=5).build(nn.Linear(3, 8))(torch.randn(2, 100, 3)).shape
    torch.Size([2, 5, 8])
    """

    dim: int
    num_latents: int
    num_layers: int = 4
    num_heads: int = 4

    def build(self, features: nn.Module) -> Rereader:
        """Build the encoder; features map each element to `dim` numbers."""
        embedding = nn.Sequential(features, nn.Linear(self.dim, self.dim), nn.LayerNorm(self.dim))
        return Rereader(embedding, LatentLayers(self))


class LatentLayers(nn.Module):
    """L <- SAB(MAB(L, X)), layer after layer: (B, n, dim) -> (B, K, dim)."""

    def __init__(self, settings: Bottleneck) -> None:
        super().__init__()
        dim, heads, layers = settings.dim, settings.num_heads, range(settings.num_layers)
        self.latents = nn.Parameter(torch.randn(settings.num_latents, dim))
        self.looks = nn.ModuleList(setfold.MAB(dim, heads) for _ in layers)
        self.mixes = nn.ModuleList(setfold.SAB(dim, heads) for _ in layers)

    def forward(self, elements: Tensor) -> Tensor:
        latents = self.latents.expand(len(elements), -1, -1)
        for look, mix in zip(self.looks, self.mixes, strict=True):
            latents = mix(look(latents, elements))
        return latents
