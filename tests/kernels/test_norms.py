"""Layer norms against the formula in float64, for numbers of any size."""

from __future__ import annotations

import pytest
import torch
from torch import vmap
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import setfold
from setfold.encoders.layers import LayerNorm
from setfold.kernels.norms import layer_norm
from tests.small import draw

SIZES = [1e-40, 1e-30, 1e-3, 1.0, 1e10, 1e18, 2e19, 1e20, 1e30, 1e38]


def formula(values, weight=None, bias=None, epsilon=1e-5):
    centred = values - values.mean(-1, keepdim=True)
    normal = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + epsilon)
    return normal if weight is None else normal * weight + bias


def ways(function):
    """As it is, and for transforms, where no value decides."""
    return function, lambda rows: vmap(function)(rows.unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_rows_of_any_size(size, dtype):
    values = (size * draw(40, 7).clamp(-3, 3)).to(dtype)
    expected = formula(values.double())
    for way in ways(layer_norm):
        found = way(values)
        assert found.dtype == dtype
        assert_close(found.double(), expected, atol=4 * torch.finfo(dtype).eps, rtol=1e-2)


def test_rows_of_different_sizes_do_not_disturb_each_other():
    values = (torch.tensor(SIZES).double()[:, None] * draw(len(SIZES), 7).clamp(-3, 3)).float()
    for way in ways(layer_norm):
        assert_close(way(values).double(), formula(values.double()), atol=2e-6, rtol=1e-5)
        assert torch.equal(way(values)[3], layer_norm(values[3]))


def test_huge_rows_that_are_nearly_constant():
    values = torch.full((1, 1000), 1e30)
    values[0, 0] = torch.nextafter(values[0, 0], torch.tensor(torch.inf))
    values[0, 1:500] -= 1e26
    assert_close(layer_norm(values).double(), formula(values.double()), atol=1e-3, rtol=1e-3)
    assert_close(layer_norm(torch.full((2, 8), 1e30)), torch.zeros(2, 8))


@pytest.mark.parametrize("size", [1.0, 1e200])
def test_gradients(size):
    values, weight, bias = size * draw(5, 4), draw(4, seed=1), draw(4, seed=2)
    slope = draw(5, 4, seed=3)
    leaf, wanted = values.clone().requires_grad_(), (values / size).clone().requires_grad_()
    epsilon = 1e-5 / size / size  # of the formula, in units of the size
    (found,) = torch.autograd.grad((layer_norm(leaf, weight, bias) * slope).sum(), leaf)
    (expected,) = torch.autograd.grad(
        (formula(wanted, weight, bias, epsilon) * slope).sum(), wanted
    )
    assert_close(found * size, expected, rtol=1e-10, atol=1e-12)


def test_gradients_of_gradients():
    inputs = [draw(3, 4, seed=n).requires_grad_() for n in range(1)]
    inputs += [draw(4, seed=n).requires_grad_() for n in (1, 2)]
    assert gradcheck(layer_norm, inputs)
    assert gradgradcheck(layer_norm, inputs)


def test_gradients_of_huge_rows_in_float32():
    values, slope = (1e25 * draw(5, 4)).float(), draw(5, 4, seed=3)
    grads = []
    for function, leaf in ((layer_norm, values), (formula, values.double())):
        leaf = leaf.clone().requires_grad_()
        (found,) = torch.autograd.grad((function(leaf) * slope).sum(), leaf)
        grads.append(found.double() * 1e25)
    assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_the_layer_says_so_if_an_earlier_one_overflowed():
    layer = LayerNorm(3)
    for bad in (torch.inf, torch.nan):
        with pytest.raises(setfold.NonFiniteError, match=r"layers overflow in float32\. Scale"):
            layer(torch.tensor([[1.0, bad, 2.0]]))
    assert layer(torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_does_not_narrow_it(dtype):
    layer, values = LayerNorm(3), draw(5, 3).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        found = layer(values)
    assert_close(found, torch.nn.functional.layer_norm(values.float(), (3,)))
