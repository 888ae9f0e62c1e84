"""Featurewise sort pooling (Zhang, Hare and Prügel-Bennett, ICLR 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from setfold.core.inputs import check_sizes
from setfold.core.whole import WholeSetEncoder
from setfold.kernels.precision import accumulator_dtype


class FSPool(WholeSetEncoder):
    """Sorts each feature over the set, and weighs each value by its relative rank.

    With x_(0)c >= ... >= x_(n-1)c the values of feature c in descending order:

        y_c = sum_i f_c(r_i) x_(i)c     r_i = i / (n - 1)
        f_c(r) = sum_j max(0, 1 - |r P - j|) w_jc     j = 0 ... P

    f_c is continuous and linear on each of P pieces of [0, 1]; the w_jc are its learned values at
    their ends. So one set of weights serves sets of every size. The only element of a set has
    r = 0. With w_jc = 1 everywhere it is the sum; with w_0c = 1 and zeros the maximum, of sets of at
    most P + 1 elements.

    The weights begin standard normal, as the authors' do. Where elements tie, there is no single
    gradient: each of them gets the weight of one of the ranks that they share.

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
    obstacle = "sorting: an element's weight depends on its rank among all the others"

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
            return (ranked * self._weights(ranks, torch.full_like(ranks[:1], size))).sum(1)
        count = mask.sum(1, keepdim=True)  # (B, 1)
        # Below every element, so that what is hidden comes last; then zero, so that it weighs nothing.
        lowered = elements.masked_fill(~mask.unsqueeze(-1), float("-inf"))
        ranked = lowered.sort(dim=1, descending=True).values
        ranked = ranked.masked_fill((ranks >= count).unsqueeze(-1), 0)
        return (ranked * self._weights(ranks, count)).sum(1)

    def _weights(self, ranks: Tensor, count: Tensor) -> Tensor:
        """The weight f_c(r) of each rank in each feature.

        Args:
            ranks: (n,), from 0.
            count: how many elements the set has, (1,) for all sets or (B, 1).

        Returns:
            (n, d) or (B, n, d); beyond the count, anything finite.
        """
        gaps = (count - 1).clamp(min=1)
        # In whole numbers, because r P rounded down must not depend on how r was rounded.
        place = ranks * self.num_pieces
        left = (place // gaps).clamp(max=self.num_pieces)
        right = (left + 1).clamp(max=self.num_pieces)
        fraction = (place % gaps).to(accumulator_dtype(ranks.device)) / gaps
        # An embedding rather than an index: its backward pass is several times faster.
        ends = embedding(left, self.values), embedding(right, self.values)
        return torch.lerp(*ends, fraction.to(self.values.dtype).unsqueeze(-1))
