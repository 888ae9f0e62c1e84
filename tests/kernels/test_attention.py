"""Attention among whole sets against the formula in float64, with logits of any size."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from setfold.kernels.attention import attend
from tests.small import draw

MASK = torch.tensor([[True] * 6, [True, False, True, True, False, False]])


def formula(query, key, value, heads, mask):
    query, key, value = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (query, key, value))
    logits = query @ key.mT / query.shape[-1] ** 0.5
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], -torch.inf)
    return (logits.softmax(-1) @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e10, 1e18, 1e20, 1e30])
def test_logits_of_any_size(size, mask):
    inputs = [(size * draw(2, n, 4, seed=n)).float() for n in (5, 6)]
    inputs.append(draw(2, 6, 4, seed=9).float())
    expected = formula(*(tensor.double() for tensor in inputs), 2, mask)
    found = attend(*inputs, 2, mask)
    assert found.dtype == torch.float32
    assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_logits_that_are_all_below_the_smallest_number():
    query, value = torch.full((1, 1, 2), 1e20), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    key = torch.tensor([[[-1e20, -1e20], [-3e20, -3e20]]])
    assert_close(attend(query, key, value, 1, None), value[:, :1])  # torch alone returns zeros


def test_gradients_of_huge_logits():
    inputs = [1e10 * draw(1, 3, 2, seed=n) for n in range(2)] + [draw(1, 3, 2, seed=4)]
    grads = []
    for function, dtype in ((attend, torch.float32), (formula, torch.float64)):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        found = torch.autograd.grad(function(*leaves, 1, None).sum(), leaves)
        grads.append([tensor.double() for tensor in found])
    assert_close(*grads, rtol=1e-4, atol=1e-5)
