"""Random cases, and what the kernels must find: plain numpy in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

EPSILON = 1e-8
ATTENTIONS = ["sigmoid", "softmax"]
MASKS = ["all", "some", "one hidden"]
# (B, n, d, K): around the widths of vectors (4, 8, 16) and of blocks (32, 64, 256, 512)
SHAPES = [
    *[(1, 1, 1, 1), (1, 1, 1, 2), (2, 3, 2, 3), (1, 5, 16, 16), (3, 15, 3, 15), (2, 17, 15, 17)],
    *[(1, 31, 17, 31), (2, 33, 31, 33), (1, 65, 33, 5), (3, 64, 5, 65), (1, 257, 65, 2)],
    *[(1, 1100, 4, 7), (2, 600, 16, 16), (5, 63, 7, 48)],
]


class Case(NamedTuple):
    elements: torch.Tensor  # (B, n, d)
    mask: torch.Tensor | None
    matrix: torch.Tensor  # (d + 1, K)

    @property
    def shown(self):
        return np.ones(self.elements.shape[:2], bool) if self.mask is None else self.mask.numpy()


def make_case(shape, mask="all", seed=0, scale=1.0):
    batch, length, width, slots = shape
    draw = torch.Generator().manual_seed(seed)
    elements = torch.randn(batch, length, width, generator=draw) * scale
    matrix = torch.randn(width + 1, slots, generator=draw)
    shown = None
    if mask != "all":
        shown = torch.rand(batch, length, generator=draw) < 0.6
        if mask == "one hidden":
            shown[-1] = False
        elements[~shown] = 0
    return Case(elements, shown, matrix)


def exact(tensor):
    return tensor.detach().numpy().astype(np.float64)


def with_one(rows):
    return np.concatenate([rows, np.ones((*rows.shape[:-1], 1))], -1)


def logits_of(rows, matrix):
    return with_one(exact(rows)) @ exact(matrix)


def weights_of(rows, matrix, attention):
    """Weights over slots (n, K) of rows (n, d)."""
    logits = logits_of(rows, matrix)
    if attention == "sigmoid":
        tail = np.exp(-np.abs(logits))
        numerators = np.where(logits > 0, 1, tail) / (1 + tail) + EPSILON
    else:
        numerators = np.exp(logits - logits.max(-1, keepdims=True))
    return numerators / numerators.sum(-1, keepdims=True)


def sums_of(case, attention):
    """(B, K, d + 1), row by row."""
    batch, _, width = case.elements.shape
    found = np.zeros((batch, case.matrix.shape[1], width + 1))
    for b, shown in enumerate(case.shown):
        rows = case.elements[b][torch.from_numpy(shown)]
        found[b] = weights_of(rows, case.matrix, attention).T @ with_one(exact(rows))
    return found


def assert_close(found, expected, tolerance=4e-6, floor=0.0):
    """Equal to rounding, relative to the largest number, or to `floor` if that is larger."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    scale = np.abs(expected[np.isfinite(expected)]).max(initial=floor)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * scale)
