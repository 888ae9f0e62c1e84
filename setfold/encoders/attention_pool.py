"""Softmax attention over elements, as a fold. The state keeps the largest logit and two sums."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.arguments import check_flags, check_heads, check_sizes
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.readout import Count
from setfold.core.state import SetState
from setfold.core.statistic import Field, Fields, Softmax, Statistics, spread
from setfold.errors import InputError
from setfold.kernels.modes import widened, without_autocast
from setfold.kernels.scores import GatedScores, Scores, folded_heads, projected_heads
from setfold.kernels.softmax import exponentials, softmax_sums


class SoftmaxPool(StreamingSetEncoder):
    """Q weighted means of the elements. The weights are a softmax of logits over the elements.

        m_j = max_i l_ij     T_j = sum_i exp(l_ij - m_j) [x_i, 1]     mean_j = T_j[:-1] / T_j[-1]

    Joining two states rescales both to the larger peak m, so logits of any size are safe.
    Subclasses define `num_logits`, the logits (`scores`) and the encoding (`conclude`).

    Attributes:
        num_logits: the number Q of logits of an element, over all heads.
        num_heads: the number of heads.
    """

    dim_in: int
    num_logits: int
    num_heads: int = 1

    @abstractmethod
    def scores(self) -> Scores:
        """The function that maps an element to its Q logits, in float32 or wider."""

    @abstractmethod
    def conclude(self, means: Tensor) -> Tensor:
        """The encoding (B, ...) from the weighted means (B, Q, d), both in float32 or wider."""

    @property
    @abstractmethod
    def first_weight(self) -> Tensor:
        """A weight, whose dtype and device the elements must share."""

    def prepare(self, frame: tuple[Tensor, ...]) -> Scores:
        with without_autocast(self.first_weight.device):
            return self.scores()

    def fields(self, frame: tuple[Tensor, ...]) -> Fields:
        return {"softmax": Field(Softmax(), (self.num_logits, self.dim_in + 1))}

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Scores) -> Statistics:
        elements = elements.to(prepared[0].dtype)  # features computed under autocast
        with without_autocast(elements.device):
            return {"softmax": softmax_sums(elements, mask, prepared)}

    def finish(self, statistics: Statistics, count: Count, prepared: Scores) -> Tensor:
        _, sums = statistics["softmax"]
        mass = sums[..., -1:].clamp_min(1)  # at least 1, the weight of the largest logit, or 0
        means = sums[..., :-1] / mass
        with without_autocast(means.device):
            encoding = self.conclude(means)
        if isinstance(count, Tensor):
            encoding = torch.where(spread(count > 0, encoding), encoding, 0)
        return encoding.to(self.first_weight.dtype)

    def weigh(self, elements: Tensor, state: SetState, prepared: Scores) -> Tensor:
        if not bool((state.count > 0).all()):
            raise InputError(
                "weights over elements need a state that has seen all elements; got an empty "
                "state. Call update with the elements first."
            )
        peak, sums = state.statistics["softmax"]
        with without_autocast(elements.device):
            logits = prepared.logits(widened(elements))
        # The mass is at least 1, the weight of the largest logit.
        mass = sums[..., -1].clamp_min(1).unsqueeze(1)
        weights = (exponentials(logits, peak.to(logits.dtype)) / mass).to(elements.dtype)
        return weights.unflatten(-1, (self.num_heads, -1)).mean(-2)  # (B, n, K)


class AttentionPool(SoftmaxPool):
    """Learned queries attend to the elements: softmax pooling, with any number of heads.

    With queries q_j, keys k_i = to_key(x_i) and values v_i = to_value(x_i), head by head:

        encoding_j = sum_i softmax_i(k_i . q_j / sqrt(d_head)) v_i

    The softmax is over all elements of the set, and still folds: the state keeps the largest logit,
    the denominator and the numerator. Queries are multiplied into the key projection once, and
    values are projected at readout. The encoding is (B, num_queries, dim_out).

    Args:
        dim_in: width d of the elements.
        num_queries: number K of queries. Each returns one vector.
        dim_out: width of keys, queries and values.
        num_heads: number of heads; must divide dim_out.
        bias: whether the projections have a bias.

    >>> encoder = AttentionPool(dim_in=3, num_queries=4, dim_out=16, num_heads=2)
    >>> encoder(torch.randn(2, 100, 3)).shape
    torch.Size([2, 4, 16])
    """

    def __init__(
        self, dim_in: int, num_queries: int, dim_out: int, num_heads: int = 1, bias: bool = True
    ) -> None:
        super().__init__()
        check_sizes(dim_in=dim_in, num_queries=num_queries, dim_out=dim_out, num_heads=num_heads)
        check_heads(num_heads, dim_out=dim_out)
        check_flags(bias=bias)
        self.dim_in = dim_in
        self.num_queries = num_queries
        self.dim_out = dim_out
        self.num_heads = num_heads
        self.bias = bias
        self.num_logits = num_heads * num_queries
        self.queries = nn.Parameter(torch.randn(num_queries, dim_out))
        self.to_key = nn.Linear(dim_in, dim_out, bias=bias)
        self.to_value = nn.Linear(dim_in, dim_out, bias=bias)

    def extra_repr(self) -> str:
        return f"num_queries={self.num_queries}, num_heads={self.num_heads}"

    @property
    def first_weight(self) -> Tensor:
        return self.queries

    def scores(self) -> Scores:
        return folded_heads(self.queries, self.to_key.weight, self.to_key.bias, self.num_heads)

    def conclude(self, means: Tensor) -> Tensor:
        return projected_heads(means, self.to_value.weight, self.to_value.bias, self.num_heads)


class GatedAttentionPool(SoftmaxPool):
    """Attention-based pooling for multiple-instance learning (Ilse et al., ICML 2018), as a fold.

        l_i = w (tanh(V x_i) * sigmoid(U x_i))        encoding = sum_i softmax_i(l_i) x_i

    The encoding is (B, num_branches, dim_in).

    Args:
        dim_in: width d of the elements, such as features of the patches of a slide.
        dim_hidden: width of V x and U x.
        num_branches: number K of vectors w. Each returns one vector.
        gated: whether to use the gate sigmoid(U x). Without it the logits are w tanh(V x).
        bias: whether V and U have a bias.

    >>> encoder, patches = GatedAttentionPool(dim_in=8, dim_hidden=16), torch.randn(1, 500, 8)
    >>> state = encoder.update(encoder.initial_state(), patches)
    >>> encoder.readout(state).shape
    torch.Size([1, 1, 8])
    >>> encoder.weights(state, patches[:, :100]).shape  # a part of the slide's heat map
    torch.Size([1, 100, 1])
    """

    def __init__(
        self,
        dim_in: int,
        dim_hidden: int,
        num_branches: int = 1,
        gated: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_sizes(dim_in=dim_in, dim_hidden=dim_hidden, num_branches=num_branches)
        check_flags(gated=gated, bias=bias)
        self.dim_in = dim_in
        self.dim_hidden = dim_hidden
        self.num_branches = num_branches
        self.gated = gated
        self.bias = bias
        self.num_logits = num_branches
        self.to_hidden = nn.Linear(dim_in, dim_hidden, bias=bias)
        self.to_gate = nn.Linear(dim_in, dim_hidden, bias=bias) if gated else None
        # A bias would cancel in the softmax.
        self.to_logit = nn.Linear(dim_hidden, num_branches, bias=False)

    def extra_repr(self) -> str:
        return f"gated={self.gated}"

    @property
    def first_weight(self) -> Tensor:
        return self.to_hidden.weight

    def scores(self) -> Scores:
        gate: Any = self.to_gate or nn.Identity()
        tensors = (
            self.to_logit.weight,
            self.to_hidden.weight,
            self.to_hidden.bias,
            getattr(gate, "weight", None),
            getattr(gate, "bias", None),
        )
        wide: Any = (None if tensor is None else widened(tensor) for tensor in tensors)
        return GatedScores(*wide)

    def conclude(self, means: Tensor) -> Tensor:
        return means
