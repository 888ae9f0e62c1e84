"""Featurewise sort pooling (Zhang, Hare and Prügel-Bennett, ICLR 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from setfold.core.arguments import check_sizes
from setfold.core.whole import WholeSetEncoder
from setfold.kernels.modes import accumulator_dtype, widened


class FSPool(WholeSetEncoder):
    """Sorts each feature over the set and weights each value by its relative rank: (B, d).

    With x_(0)c >= ... >= x_(n-1)c the values of feature c in descending order:

        y_c = sum_i f_c(r_i) x_(i)c     r_i = i / (n - 1)
        f_c(r) = sum_j max(0, 1 - |r P - j|) w_jc     j = 0 ... P

    f_c is continuous and piecewise linear on [0, 1], with P pieces of equal length. The parameters
    w_jc are its values at the ends of the pieces, so the same parameters apply to sets of any size.
    A set of one element has r = 0. If all w_jc are 1, the result is the sum. If w_0c is 1 and the
    others are 0, it is the maximum, for sets of at most P + 1 elements.

    The weights are initialized from a standard normal distribution, like the authors'. If elements
    tie, the gradient is not unique: each of them gets the weight of one of the ranks they share.

    Args:
        dim_in: width d of the elements, and of the encoding (B, d).
        num_pieces: number P of linear pieces.

    >>> encoder = FSPool(dim_in=2, num_pieces=1)
    >>> _ = nn.init.zeros_(encoder.values)
    >>> _ = nn.init.ones_(encoder.values[0])  # from 1 for the largest down to 0 for the smallest
    >>> encoder(torch.tensor([[[5.0, -1.0], [1.0, 2.0], [2.0, -4.0]]]))
    tensor([[6.0000, 1.5000]], grad_fn=<SumBackward1>)
    """

    dim_in: int
    obstacle = "sorting: the weight of an element depends on its rank among all elements"

    def __init__(self, dim_in: int, num_pieces: int = 20) -> None:
        super().__init__()
        check_sizes(dim_in=dim_in, num_pieces=num_pieces)
        self.dim_in = dim_in
        self.num_pieces = num_pieces
        self.values = nn.Parameter(torch.randn(num_pieces + 1, dim_in))

    def extra_repr(self) -> str:
        return f"dim_in={self.dim_in}, num_pieces={self.num_pieces}"

    def encode(self, elements: Tensor, mask: Tensor | None) -> Tensor:
        size = elements.shape[1]
        ranks = torch.arange(size, device=elements.device)
        if mask is None:
            ranked = elements.sort(dim=1, descending=True).values
            return self._sum(ranked, self._weights(ranks, torch.full_like(ranks[:1], size)))
        count = mask.sum(1, keepdim=True)  # (B, 1)
        # Masked elements are sorted last, then set to zero.
        lowered = elements.masked_fill(~mask.unsqueeze(-1), float("-inf"))
        ranked = lowered.sort(dim=1, descending=True).values
        ranked = ranked.masked_fill((ranks >= count).unsqueeze(-1), 0)
        return self._sum(ranked, self._weights(ranks, count))

    @staticmethod
    def _sum(ranked: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum over the set, rounded once."""
        return (widened(ranked) * weights).sum(1).to(ranked.dtype)

    def _weights(self, ranks: Tensor, count: Tensor) -> Tensor:
        """The weight f_c(r) of each rank in each feature.

        Args:
            ranks: (n,), from 0.
            count: number of elements, (1,) for all sets or (B, 1).

        Returns:
            (n, d) or (B, n, d). Beyond the count the values are finite but arbitrary.
        """
        gaps = (count - 1).clamp(min=1)
        # Integer arithmetic, so that floor(r P) does not depend on rounding errors in r.
        place = ranks * self.num_pieces
        left = (place // gaps).clamp(max=self.num_pieces)
        right = (left + 1).clamp(max=self.num_pieces)
        fraction = (place % gaps).to(accumulator_dtype(ranks.device)) / gaps
        # The backward pass of embedding is several times faster than that of indexing.
        values = widened(self.values)
        ends = embedding(left, values), embedding(right, values)
        return torch.lerp(*ends, fraction.to(values.dtype).unsqueeze(-1))
