"""The Constant Memory Attention Block (Feng et al., 2023): latents that attend to a stream.

CMAB_b(L, X) = SAB(MAB(L, SAB(MAB(S_b, X))))        S_b: the learned latents of block b

Only S_b attends to the elements, and it does not depend on them. So all blocks fold in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from setfold.core.absorb import check_encoding
from setfold.core.arguments import check_sizes
from setfold.core.composition import Composition
from setfold.core.readout import Count
from setfold.core.statistic import Statistics, spread
from setfold.encoders.concat import Concat
from setfold.encoders.layers import LayerNorm
from setfold.encoders.set_transformer import MAB, SAB, SeedAttention
from setfold.kernels.modes import widened


class ConstantMemoryEncoder(Composition):
    """Stacked Constant Memory Attention Blocks, as one fold, (B, n, d) -> (B, num_latents, dim).

    With learned latents L_0, and learned latents S_b of each block b:

        X   = norm(linear(elements))
        Y_b = SAB(MAB(S_b, X))        the latents of a block attend to the elements
        L_b = SAB(MAB(L_b-1, Y_b))    they update the latents of the encoder

    The encoding is L_b of the last block. The state keeps one softmax over elements for each block,
    head and latent of the block. Everything else runs at readout, on a constant number of vectors.

    Args:
        dim_in: width d of the elements.
        dim: width of all blocks, and of the encoding.
        num_latents: number K of latents L, the vectors of the encoding.
        num_block_latents: number m of latents S_b of each block, which attend to the elements.
        num_blocks: number of blocks.
        num_heads: number of heads; must divide dim.
        layer_norm: whether to use layer norms.

    >>> encoder = ConstantMemoryEncoder(dim_in=3, dim=16, num_latents=4).eval()
    >>> encoder(torch.randn(2, 100, 3)).shape
    torch.Size([2, 4, 16])
    >>> encoder.passes
    1
    """

    def __init__(
        self,
        dim_in: int,
        dim: int,
        num_latents: int = 16,
        num_block_latents: int = 16,
        num_blocks: int = 2,
        num_heads: int = 4,
        layer_norm: bool = True,
    ) -> None:
        check_sizes(dim_in=dim_in, dim=dim, num_latents=num_latents)
        check_sizes(num_block_latents=num_block_latents, num_blocks=num_blocks)
        pools, updates = [], []
        for _ in range(num_blocks):
            pools.append(SeedAttention(dim, num_block_latents, num_heads, layer_norm))
            nn.init.normal_(pools[-1].seeds)  # the scale of what they attend to
            updates.append(LatentUpdate(dim, num_heads, layer_norm))
        norm = LayerNorm(dim) if layer_norm else nn.Identity()
        features = nn.Sequential(nn.Linear(dim_in, dim), norm)
        super().__init__(Concat(pools), features, Latents(num_latents, dim, updates))
        self.dim_in = dim_in
        self.dim = dim
        self.num_latents = num_latents
        self.num_block_latents = num_block_latents
        self.num_blocks = num_blocks
        self.num_heads = num_heads
        self.layer_norm = layer_norm

    def finish(self, statistics: Statistics, count: Count, prepared: Any) -> Tensor:
        encoding = super().finish(statistics, count, prepared)
        if isinstance(count, Tensor):  # an empty set is encoded as zeros
            encoding = torch.where(spread(count > 0, encoding), encoding, 0)
        return encoding


class LatentUpdate(nn.Module):
    """What a block does at readout: L -> SAB(MAB(L, SAB(Z))), where Z attended to the elements.

    Args:
        dim: width of all vectors.
        num_heads: number of heads; must divide dim.
        layer_norm: whether to use layer norms.

    >>> LatentUpdate(8, num_heads=2)(torch.randn(2, 5, 8), torch.randn(2, 3, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, dim: int, num_heads: int, layer_norm: bool = True) -> None:
        super().__init__()
        self.dim = dim
        self.num_heads = num_heads
        self.layer_norm = layer_norm
        self.among_block = SAB(dim, num_heads, layer_norm)
        self.across = MAB(dim, num_heads, layer_norm)
        self.among_latents = SAB(dim, num_heads, layer_norm)

    def forward(self, latents: Tensor, attended: Tensor) -> Tensor:
        """Update latents (B, K, d) with what the latents of the block attended to, (B, m, d)."""
        return self.among_latents(self.across(latents, self.among_block(attended)))


class Latents(nn.Module):
    """Learned latents that the blocks update one after the other.

    Args:
        num_latents: number K of latents.
        dim: width d of a latent.
        updates: one for each block, in order.

    >>> head = Latents(5, 8, [LatentUpdate(8, num_heads=2) for _ in range(2)])
    >>> head(torch.randn(3, 2 * 4 * 8)).shape  # 2 blocks of 4 latents of width 8
    torch.Size([3, 5, 8])
    """

    def __init__(self, num_latents: int, dim: int, updates: Sequence[LatentUpdate]) -> None:
        super().__init__()
        self.num_latents = num_latents
        self.dim = dim
        self.updates = nn.ModuleList(updates)
        self.latents = nn.Parameter(torch.randn(num_latents, dim))

    def forward(self, attended: Tensor) -> Tensor:
        """Map what the latents of all blocks attended to, (B, blocks * m * d), to (B, K, d)."""
        of_blocks = widened(attended).unflatten(1, (len(self.updates), -1, self.dim)).unbind(1)
        latents = widened(self.latents).expand(attended.shape[0], -1, -1)
        for update, own in zip(self.updates, of_blocks, strict=True):
            latents = cast("Tensor", update(latents, own))
        check_encoding(latents)
        return latents.to(self.latents.dtype)
