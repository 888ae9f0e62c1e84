"""From elements to weights over slots: logits, then a normalisation over slots.

A scores object is a tuple of tensors with one method, `logits`. Three forms exist because they
cost differently: `FoldedScores` multiplies the query into the key projection beforehand, so that
no key is ever computed; `KeyScores` keeps the two apart, which is cheaper when there are many
slots and wide elements; `CosineScores` must see the key, to normalise it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

ATTENTIONS = ("sigmoid", "softmax")
EPSILON = 1e-8  # the paper's, added to every sigmoid


class FoldedScores(NamedTuple):
    """logits = [x, 1] A, with A = [Wk | bk]^T q^T / sqrt(d_out): the last row is the offset."""

    matrix: Tensor  # (d + 1, K)

    def logits(self, elements: Tensor) -> Tensor:  # (..., d) -> (..., K)
        return linear(elements, self.matrix[:-1].t(), self.matrix[-1])

    @property
    def num_slots(self) -> int:
        return self.matrix.shape[1]


class KeyScores(NamedTuple):
    """logits = (x Wk^T + bk) q^T, with the scale inside q."""

    key_weight: Tensor  # (d_out, d)
    key_bias: Tensor | None  # (d_out,)
    query: Tensor  # (K, d_out)

    def logits(self, elements: Tensor) -> Tensor:
        return linear(linear(elements, self.key_weight, self.key_bias), self.query)

    @property
    def num_slots(self) -> int:
        return self.query.shape[0]


class CosineScores(NamedTuple):
    """logits = t cos(k, q) + b: keys layer-normalised, queries of unit length times t / sqrt(d_out)."""

    key_weight: Tensor  # (d_out, d)
    key_bias: Tensor | None  # (d_out,)
    query: Tensor  # (K, d_out)
    offset: Tensor  # (K,)

    def logits(self, elements: Tensor) -> Tensor:
        keys = linear(elements, self.key_weight, self.key_bias)
        return linear(layer_norm(keys, keys.shape[-1:]), self.query, self.offset)

    @property
    def num_slots(self) -> int:
        return self.query.shape[0]


Scores = FoldedScores | KeyScores | CosineScores


def weigh(logits: Tensor, attention: str) -> Tensor:
    """Weights over slots, differentiably: each element's weights sum to 1.

    sigmoid: W_ij = a_ij / sum_l a_il with a = sigmoid(logits) + 1e-8; softmax: over slots.
    """
    if attention == "softmax":
        return logits.softmax(-1)
    activation = logits.sigmoid() + EPSILON
    return activation / activation.sum(-1, keepdim=True)


def weigh_(logits: Tensor, attention: str, ones: Tensor) -> Tensor:
    """`weigh` in place on (r, K), without autograd; `ones` is (K,).

    The sum over slots is a matrix-vector product: about twice as fast as a short reduction.
    """
    if attention == "softmax":
        return torch.softmax(logits, -1, out=logits)
    activation = logits.sigmoid_().add_(EPSILON)
    return activation.div_(torch.mv(activation, ones).unsqueeze_(-1))
