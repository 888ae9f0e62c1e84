"""From elements to logits, and from logits to weights over slots.

A scores object is a tuple of tensors with a method, `logits`, and the `room` that an element takes on
the way there, in numbers. The tensors are float32 or wider: logits of narrower types overflow, and
weights underflow. Several forms exist because they cost differently: `FoldedScores` multiplies the
query into the key projection beforehand, so that no key is ever computed; `KeyScores` keeps the two
apart, which is cheaper when there are many slots and wide elements; `CosineScores` must see the key,
to normalise it; `GatedScores` are a small network of their own.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from setfold.kernels.modes import (
    accumulator_dtype,
    needs_plain_formula,
    widened,
    working_dtype,
)
from setfold.kernels.norms import layer_norm

ATTENTIONS = ("sigmoid", "softmax")
EPSILON = 1e-8  # the paper's, added to every sigmoid


class FoldedScores(NamedTuple):
    """logits = [x, 1] A, with A = [Wk | bk]^T q^T / sqrt(d_key): the last row is the offset."""

    matrix: Tensor  # (d + 1, K), or (B, d + 1, K) where each set has slots of its own

    def logits(self, elements: Tensor) -> Tensor:  # (..., d) -> (..., K)
        if self.own:
            return torch.baddbmm(self.matrix[:, -1:], elements, self.matrix[:, :-1])
        return linear(elements, self.matrix[:-1].t(), self.matrix[-1])

    @property
    def num_slots(self) -> int:
        return self.matrix.shape[-1]

    @property
    def room(self) -> int:
        return self.num_slots

    @property
    def own(self) -> bool:
        """Whether each set has slots of its own."""
        return self.matrix.dim() == 3


class KeyScores(NamedTuple):
    """logits = (x Wk^T + bk) q^T, with the scale inside q."""

    key_weight: Tensor  # (d_key, d)
    key_bias: Tensor | None  # (d_key,)
    query: Tensor  # (K, d_key)

    def logits(self, elements: Tensor) -> Tensor:
        return linear(linear(elements, self.key_weight, self.key_bias), self.query)

    @property
    def num_slots(self) -> int:
        return self.query.shape[0]

    @property
    def room(self) -> int:
        return sum(self.query.shape)


class CosineScores(NamedTuple):
    """logits = t cos(k, q) + b: keys layer-normalised, queries of unit length times t / sqrt(d_key)."""

    key_weight: Tensor  # (d_key, d)
    key_bias: Tensor | None  # (d_key,)
    query: Tensor  # (K, d_key)
    offset: Tensor  # (K,)

    def logits(self, elements: Tensor) -> Tensor:
        keys = layer_norm(linear(elements, self.key_weight, self.key_bias))
        return linear(keys, self.query, self.offset)

    @property
    def num_slots(self) -> int:
        return self.query.shape[0]

    @property
    def room(self) -> int:
        return self.query.shape[0] + 2 * self.query.shape[1]


class GatedScores(NamedTuple):
    """logits = w (tanh(V x) * sigmoid(U x)), and without a gate w tanh(V x)."""

    out_weight: Tensor  # (Q, L)
    value_weight: Tensor  # (L, d)
    value_bias: Tensor | None  # (L,)
    gate_weight: Tensor | None  # (L, d)
    gate_bias: Tensor | None  # (L,)

    def logits(self, elements: Tensor) -> Tensor:
        inner = linear(elements, self.value_weight, self.value_bias)
        hidden, spoilt = inner.tanh(), spoil(inner, -1)  # tanh and sigmoid hide infinity
        if self.gate_weight is not None:
            gate = linear(elements, self.gate_weight, self.gate_bias)
            hidden, spoilt = hidden * gate.sigmoid(), spoilt + spoil(gate, -1)
        return linear(hidden, self.out_weight) + spoilt

    @property
    def num_slots(self) -> int:
        return self.out_weight.shape[0]

    @property
    def room(self) -> int:
        return self.num_slots + 3 * self.out_weight.shape[1]


Scores = FoldedScores | KeyScores | CosineScores | GatedScores
Projection = tuple[Tensor, Tensor | None]  # weight (d_out, d) and bias (d_out,) of the values


def has_own_slots(scores: Scores) -> bool:
    """Whether the slots differ by set."""
    return isinstance(scores, FoldedScores) and scores.own


def folded_heads(
    query: Tensor, key_weight: Tensor, key_bias: Tensor | None, num_heads: int
) -> FoldedScores:
    """The scores of multi-head attention with K queries as one matrix, head by head: (d + 1, H K).

    Args:
        query: (K, e), already projected.
        key_weight: (e, d); head h has the rows from h e / H on.
        key_bias: (e,) or None.
        num_heads: the number H of heads, which divides e.
    """
    query, keys = widened(query), _augmented(widened(key_weight), key_bias)  # (e, d + 1)
    scale = (query.shape[1] // num_heads) ** -0.5
    heads = (query * scale).t().reshape(num_heads, -1, query.shape[0])  # (H, e / H, K)
    matrix = torch.bmm(keys.reshape(num_heads, -1, keys.shape[1]).mT, heads)  # (H, d + 1, K)
    return FoldedScores(matrix.transpose(0, 1).flatten(1))


def _augmented(weight: Tensor, bias: Tensor | None) -> Tensor:
    """[weight | bias] (out, in + 1), to be multiplied with [x, 1]."""
    if bias is None:
        return torch.constant_pad_nd(weight, (0, 1))
    return torch.cat([weight, bias.to(weight.dtype).unsqueeze(1)], 1)


def projected_heads(
    means: Tensor, value_weight: Tensor, value_bias: Tensor | None, num_heads: int
) -> Tensor:
    """The values of multi-head attention from the mean element that each head sees.

    Float64 takes longer, so it is used where the values overflow on the way, or cannot be looked at.

    Args:
        means: (B, H K, d), what `folded_heads`' scores average, in float32 or wider.
        value_weight: (e, d).
        value_bias: (e,) or None.
        num_heads: the number H of heads.

    Returns:
        (B, K, e), the heads side by side, in float32 or wider.
    """
    dtype = working_dtype(value_weight.dtype)
    if not (needs_plain_formula() or means.is_meta):
        found = _projected_heads(means.to(dtype), value_weight, value_bias, num_heads)
        if math.isfinite(found.detach().sum().item()):
            return found
    precise = means.to(accumulator_dtype(means.device))
    return _projected_heads(precise, value_weight, value_bias, num_heads).to(dtype)


def _projected_heads(
    means: Tensor, value_weight: Tensor, value_bias: Tensor | None, num_heads: int
) -> Tensor:
    batch, queries, width = means.shape[0], means.shape[1] // num_heads, means.shape[2]
    rows = means.reshape(batch, num_heads, queries, width).transpose(0, 1)
    weight = value_weight.to(means.dtype).reshape(num_heads, -1, width)  # (H, e / H, d)
    values = torch.bmm(rows.reshape(num_heads, batch * queries, width), weight.mT)
    values = values.transpose(0, 1).reshape(batch, queries, len(value_weight))  # (B, K, e)
    return values if value_bias is None else values + value_bias


def weigh(logits: Tensor, attention: str) -> Tensor:
    """Weights over slots, differentiably: each element's weights sum to 1.

    sigmoid: W_ij = a_ij / sum_l a_il with a = sigmoid(logits) + 1e-8; softmax: over slots. They are
    NaN if a logit is not finite.
    """
    spoilt = spoil(logits, -1)
    if attention == "softmax":
        return logits.softmax(-1) + spoilt
    activation = logits.sigmoid() + EPSILON
    return activation / (activation.sum(-1, keepdim=True) + spoilt)


def spoil(logits: Tensor, dim: int) -> Tensor:
    """Zeros, summed over a dimension that stays; NaN where a logit is not finite.

    A logit that overflows may have the wrong sign: a part of its sum has overflowed before the rest
    was added. A weight of 0 or 1 would hide that.
    """
    return (logits.detach() * 0.0).sum(dim, keepdim=True)


def weigh_(logits: Tensor, attention: str, ones: Tensor) -> Tensor:
    """`weigh` in place on (r, K), without autograd; `ones` is (K,).

    The sum over slots is a matrix-vector product: about twice as fast as a short reduction.
    """
    spoilt = torch.mv(logits, ones / len(ones)).mul_(0.0)  # as `spoil`, in half the time
    if attention == "softmax":
        return torch.softmax(logits, -1, out=logits).add_(spoilt.unsqueeze_(-1))
    activation = logits.sigmoid_().add_(EPSILON)
    return activation.div_(spoilt.addmv_(activation, ones).unsqueeze_(-1))


def weigh_few_(logits: Tensor, attention: str, divisor: int = 1) -> Tensor:
    """`weigh_` for so few rows that the calls take longer than the arithmetic.

    Tensors in place of Python numbers, and a matrix product in place of a reduction, halve the time
    of the calls.

    Args:
        logits: (r, K), overwritten.
        attention: "sigmoid" or "softmax".
        divisor: of the weights; with the number of rows, weighted sums become means.
    """
    given = logits.shape[-1], divisor, logits.dtype, logits.device
    epsilon, divisors, shares, zero = _constants(*given)
    spoilt = torch.mm(logits, shares).mul_(zero)  # as `spoil`
    if attention == "softmax":
        weights = torch.softmax(logits, -1, out=logits).add_(spoilt)
        return weights if divisor == 1 else weights.div_(divisor)
    activation = logits.sigmoid_().add_(epsilon)
    return activation.div_(spoilt.addmm_(activation, divisors))


@lru_cache(4096)
def _constants(
    num_slots: int, divisor: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """EPSILON as a tensor, the divisor (K, 1), once for each slot, 1 / K (K, 1), and zero."""
    with torch.inference_mode(False), torch.no_grad():
        like = torch.ones(num_slots, 1, dtype=dtype, device=device)
        return like.new_tensor(EPSILON), like * divisor, like / num_slots, like.new_zeros(())
