"""The Set Transformer (Lee et al., ICML 2019): its blocks, and two encoders built from them.

MAB(X, Y)  = norm(H + relu(feed(H)))  with  H = norm(X + Multihead(X, Y, Y))
SAB(X)     = MAB(X, X)                      each element attends to all others: no fold
ISAB(X)    = MAB(X, MAB(I, X))              through inducing points I: folds in two passes
PMA(X)     = MAB(S, relu(linear(X)))        learned seeds S attend to the elements: a fold
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from setfold.core.absorb import check_encoding
from setfold.core.arguments import check_flags, check_heads, check_modules, check_sizes
from setfold.core.composition import Composition
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.passes import Layer, LayeredSetEncoder, apply_pool
from setfold.core.weights import NARROW, caller_for
from setfold.core.whole import WholeSetEncoder
from setfold.encoders.attention_pool import SoftmaxPool
from setfold.encoders.layers import LayerNorm
from setfold.kernels.attention import attend
from setfold.kernels.modes import widened
from setfold.kernels.scores import Scores, folded_heads, projected_heads


class MAB(nn.Module):
    """Multi-head attention block: queries attend to elements, followed by a feed-forward layer.

        H = norm(X + to_out(concat_h softmax(Q_h K_h^T / sqrt(d_h)) V_h))    norm(H + relu(feed(H)))

    Args:
        dim: width of queries and elements.
        num_heads: number of heads; must divide dim.
        layer_norm: whether to use the two layer norms.

    >>> MAB(8, num_heads=2)(torch.randn(2, 5, 8), torch.randn(2, 100, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, dim: int, num_heads: int, layer_norm: bool = True) -> None:
        super().__init__()
        check_sizes(dim=dim, num_heads=num_heads)
        check_heads(num_heads, dim=dim)
        check_flags(layer_norm=layer_norm)
        self.dim = dim
        self.num_heads = num_heads
        self.layer_norm = layer_norm
        self.to_query = nn.Linear(dim, dim)
        self.to_key = nn.Linear(dim, dim)
        self.to_value = nn.Linear(dim, dim)
        self.to_out = nn.Linear(dim, dim)
        self.norm = LayerNorm(dim) if layer_norm else nn.Identity()
        self.feed = nn.Linear(dim, dim)
        self.last_norm = nn.LayerNorm(dim) if layer_norm else nn.Identity()

    def forward(self, queries: Tensor, elements: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend to the elements.

        Args:
            queries: (B, m, d).
            elements: (B, n, d).
            mask: (B, n), True where an element is present; None if all are.

        Returns:
            (B, m, d).
        """
        if mask is not None:  # 0 * NaN is NaN, so a weight of 0 is not enough
            elements = elements.masked_fill(~mask.unsqueeze(-1), 0)
        call = caller_for(self.to_query.weight.dtype)
        query = call(self.to_query, queries)
        key, value = call(self.to_key, elements), call(self.to_value, elements)
        return self.digest(queries, attend(query, key, value, self.num_heads, mask))

    def digest(self, queries: Tensor, attended: Tensor) -> Tensor:
        """What follows the attention: queries and attended values, both (B, m, d), -> (B, m, d)."""
        dtype = self.to_query.weight.dtype
        call = caller_for(dtype)
        hidden = call(self.norm, queries + call(self.to_out, attended))
        found = call(self.last_norm, hidden + call(self.feed, hidden).relu())
        return found.to(queries.dtype) if dtype in NARROW else found


class SAB(nn.Module):
    """Self-attention block: each element attends to all others.

    It is equivariant, takes time quadratic in n, and does not fold.

    Args:
        dim: width of the elements.
        num_heads: number of heads; must divide dim.
        layer_norm: whether to use the two layer norms.

    >>> SAB(8, num_heads=2)(torch.randn(2, 100, 8)).shape
    torch.Size([2, 100, 8])
    """

    def __init__(self, dim: int, num_heads: int, layer_norm: bool = True) -> None:
        super().__init__()
        self.dim = dim
        self.num_heads = num_heads
        self.layer_norm = layer_norm
        self.block = MAB(dim, num_heads, layer_norm)

    def forward(self, elements: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, n, d) -> (B, n, d); the output is zero where the mask (B, n) is False."""
        if mask is None:
            return self.block(elements, elements)
        hidden = ~mask.unsqueeze(-1)
        elements = elements.masked_fill(hidden, 0)
        return self.block(elements, elements, mask).masked_fill(hidden, 0)


class SeedAttention(SoftmaxPool):
    """MAB(S, X) as a fold: learned seeds S attend to the elements, (B, n, d) -> (B, K, d).

    The state keeps the largest logit, the denominator and the numerator of the softmax over
    elements. Projections, norms and the feed-forward layer run at readout.

    Args:
        dim: width of the elements.
        num_seeds: number K of seeds.
        num_heads: number of heads; must divide dim.
        layer_norm: whether to use layer norms.

    >>> SeedAttention(8, num_seeds=4, num_heads=2)(torch.randn(2, 100, 8)).shape
    torch.Size([2, 4, 8])
    """

    def __init__(self, dim: int, num_seeds: int, num_heads: int, layer_norm: bool = True) -> None:
        super().__init__()
        check_sizes(num_seeds=num_seeds)
        self.block = MAB(dim, num_heads, layer_norm)
        self.seeds = nn.Parameter(nn.init.xavier_uniform_(torch.empty(num_seeds, dim)))
        self.dim = self.dim_in = dim
        self.num_seeds = num_seeds
        self.num_heads = num_heads
        self.layer_norm = layer_norm
        self.num_logits = num_heads * num_seeds

    def extra_repr(self) -> str:
        return f"num_seeds={self.num_seeds}, num_heads={self.num_heads}"

    @property
    def first_weight(self) -> Tensor:
        return self.seeds

    def scores(self) -> Scores:
        call = caller_for(self.seeds.dtype)
        query, key = call(self.block.to_query, self.seeds), self.block.to_key
        return folded_heads(query, key.weight, key.bias, self.num_heads)

    def conclude(self, means: Tensor) -> Tensor:
        value = self.block.to_value
        attended = projected_heads(means, value.weight, value.bias, self.num_heads)
        seeds = widened(self.seeds).expand(means.shape[0], -1, -1)
        encoding = self.block.digest(seeds, attended)
        if not self.layer_norm:
            check_encoding(encoding)
        return encoding


class ISAB(Layer):
    """Induced set attention block: inducing points attend to the set, elements attend to them.

    (B, n, d) -> (B, n, d), linear in n.

    Args:
        dim: width of the elements.
        num_inducing: number of inducing points, which are learned.
        num_heads: number of heads; must divide dim.
        layer_norm: whether to use layer norms.

    >>> ISAB(8, num_inducing=4, num_heads=2)(torch.randn(2, 100, 8)).shape
    torch.Size([2, 100, 8])
    """

    def __init__(
        self, dim: int, num_inducing: int, num_heads: int, layer_norm: bool = True
    ) -> None:
        check_sizes(num_inducing=num_inducing)
        pool = SeedAttention(dim, num_inducing, num_heads, layer_norm)
        super().__init__(pool, MAB(dim, num_heads, layer_norm))
        self.dim = self.dim_out = dim
        self.num_inducing = num_inducing
        self.num_heads = num_heads
        self.layer_norm = layer_norm


class PMA(Composition):
    """Pooling by multi-head attention: MAB(S, relu(linear(X))) with K learned seeds S, as a fold.

    Args:
        dim: width of the elements.
        num_seeds: number K of seeds. Each returns one vector.
        num_heads: number of heads; must divide dim.
        layer_norm: whether to use layer norms.

    >>> PMA(8, num_seeds=2, num_heads=2)(torch.randn(3, 100, 8)).shape
    torch.Size([3, 2, 8])
    """

    def __init__(
        self, dim: int, num_seeds: int = 1, num_heads: int = 4, layer_norm: bool = True
    ) -> None:
        attention = SeedAttention(dim, num_seeds, num_heads, layer_norm)
        super().__init__(attention, nn.Sequential(nn.Linear(dim, dim), nn.ReLU()))
        self.dim = self.dim_in = dim
        self.num_seeds = num_seeds
        self.num_heads = num_heads
        self.layer_norm = layer_norm


class SetTransformer(LayeredSetEncoder):
    """ISAB layers, then PMA. Linear in n, and folds exactly in num_layers + 1 passes.

    Args:
        dim_in: width d of the elements.
        dim: width of all layers, and of the encoding (B, num_seeds, dim).
        num_heads: number of heads; must divide dim.
        num_inducing: number of inducing points of each ISAB.
        num_layers: number L of ISABs; `passes` is L + 1.
        num_seeds: number of vectors that PMA returns.
        num_decoder_layers: number of SABs on those vectors, after PMA.
        layer_norm: whether to use layer norms.
        head: a module on the encoding; None for no head.

    >>> import setfold
    >>> encoder = SetTransformer(dim_in=3, dim=16, num_layers=2, num_seeds=4).eval()
    >>> encoder(torch.randn(2, 100, 3)).shape
    torch.Size([2, 4, 16])
    >>> encoder.passes
    3
    >>> setfold.fold(encoder, [torch.randn(2, 10, 3) for _ in range(5)]).shape
    torch.Size([2, 4, 16])
    """

    obstacle = "self-attention: through the ISABs, each element depends on all other elements"

    def __init__(
        self,
        dim_in: int,
        dim: int,
        num_heads: int = 4,
        num_inducing: int = 16,
        num_layers: int = 2,
        num_seeds: int = 1,
        num_decoder_layers: int = 0,
        layer_norm: bool = True,
        head: nn.Module | None = None,
    ) -> None:
        check_sizes(dim_in=dim_in, dim=dim, num_layers=num_layers)
        check_sizes(0, num_decoder_layers=num_decoder_layers)
        layers = [ISAB(dim, num_inducing, num_heads, layer_norm) for _ in range(num_layers)]
        pool = _decoder(dim, num_seeds, num_heads, num_decoder_layers, layer_norm)
        super().__init__(layers, pool, features=nn.Linear(dim_in, dim), head=head)
        self.dim_in = dim_in
        self.dim = dim
        self.num_heads = num_heads
        self.num_inducing = num_inducing
        self.num_layers = num_layers
        self.num_seeds = num_seeds
        self.num_decoder_layers = num_decoder_layers
        self.layer_norm = layer_norm


class FullSetTransformer(WholeSetEncoder):
    """SAB layers, then PMA. Each element attends to all others, so it cannot be folded.

    Args:
        dim_in: width d of the elements.
        dim: width of all layers, and of the encoding (B, num_seeds, dim).
        num_heads: number of heads; must divide dim.
        num_layers: number of SABs.
        num_seeds: number of vectors that PMA returns.
        num_decoder_layers: number of SABs on those vectors, after PMA.
        layer_norm: whether to use layer norms.
        head: a module on the encoding; None for no head.

    >>> FullSetTransformer(dim_in=3, dim=16)(torch.randn(2, 100, 3)).shape
    torch.Size([2, 1, 16])
    """

    obstacle = "self-attention: each element attends to all other elements"

    def __init__(
        self,
        dim_in: int,
        dim: int,
        num_heads: int = 4,
        num_layers: int = 2,
        num_seeds: int = 1,
        num_decoder_layers: int = 0,
        layer_norm: bool = True,
        head: nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_sizes(dim_in=dim_in, dim=dim, num_layers=num_layers)
        check_sizes(0, num_decoder_layers=num_decoder_layers)
        check_modules(head=head)
        self.dim_in = dim_in
        self.dim = dim
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.num_seeds = num_seeds
        self.num_decoder_layers = num_decoder_layers
        self.layer_norm = layer_norm
        self.features = nn.Linear(dim_in, dim)
        self.layers = nn.ModuleList(SAB(dim, num_heads, layer_norm) for _ in range(num_layers))
        self.pool = _decoder(dim, num_seeds, num_heads, num_decoder_layers, layer_norm)
        self.head = head

    def encode(self, elements: Tensor, mask: Tensor | None) -> Tensor:
        elements = self.features(elements)
        for layer in self.layers:
            elements = layer(elements, mask)
        return apply_pool(self.pool, elements, mask)


def _decoder(
    dim: int, num_seeds: int, num_heads: int, num_layers: int, layer_norm: bool
) -> StreamingSetEncoder:
    """PMA, then SABs on the vectors that it returns."""
    pool = PMA(dim, num_seeds, num_heads, layer_norm)
    if num_layers == 0:
        return pool
    return Composition(
        pool, head=nn.Sequential(*(SAB(dim, num_heads, layer_norm) for _ in range(num_layers)))
    )
