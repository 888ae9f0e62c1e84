"""Maxima without the big tensor against maxima with it."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from setfold.kernels import extrema
from setfold.kernels.scores import FoldedScores, weigh

WIDTH, SLOTS, OUT = 4, 3, 5


def literal(elements, mask, scores, attention, projection, largest):
    weights = weigh(scores.logits(elements), attention)
    product = weights.unsqueeze(-1) * linear(elements, *projection).unsqueeze(-2)
    fill = -torch.inf if largest else torch.inf
    if mask is not None:
        product = product.masked_fill(~mask[:, :, None, None], fill)
    return product.amax(1) if largest else product.amin(1)


def setting(shape, masked):
    draw = torch.Generator().manual_seed(3)

    def normal(*size):
        return torch.randn(size, generator=draw, dtype=torch.float64).requires_grad_()

    mask = torch.rand(shape, generator=draw) < 0.5 if masked else None
    scores = FoldedScores(normal(WIDTH + 1, SLOTS))
    return normal(*shape, WIDTH), mask, scores, (normal(OUT, WIDTH), normal(OUT))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("attention", ["sigmoid", "softmax"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (3, 4), (2, 33)])
@pytest.mark.parametrize("many", [0, 1000], ids=["all elements", "few elements"])
def test_values_and_gradients_are_the_literal_ones(
    monkeypatch, many, shape, masked, attention, largest
):
    monkeypatch.setattr(extrema, "TILE_BYTES", 8 * OUT * 7)  # tiles of seven rows
    monkeypatch.setattr(extrema, "MANY_WINS", many)
    elements, mask, scores, projection = setting(shape, masked)
    expected = literal(elements, mask, scores, attention, projection, largest)
    found = extrema.slot_extrema(elements, mask, scores, attention, projection, largest)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        again = extrema.slot_extrema(elements, mask, scores, attention, projection, largest)
    torch.testing.assert_close(again, expected, rtol=1e-12, atol=1e-12)
    weight = torch.arange(found.numel(), dtype=torch.float64).reshape(found.shape).cos()
    wanted = (elements, *scores, *projection)
    losses = [torch.where(e.isfinite(), e, 0).mul(weight).sum() for e in (found, expected)]
    for f, e in zip(*(torch.autograd.grad(loss, wanted) for loss in losses), strict=True):
        torch.testing.assert_close(f, e, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("many", [0, 1000], ids=["all elements", "few elements"])
@pytest.mark.parametrize("row", [0, 3, 11])
def test_nan_is_not_hidden(monkeypatch, row, many):
    monkeypatch.setattr(extrema, "TILE_BYTES", 8 * OUT * 7)
    monkeypatch.setattr(extrema, "MANY_WINS", many)
    elements, mask, scores, projection = setting((2, 14), False)
    elements = elements.detach().clone()
    elements[1, row, 2] = torch.nan
    found = extrema.slot_extrema(elements, mask, scores, "sigmoid", projection, True)
    assert found.requires_grad
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_places_are_those_of_the_first_maxima(dtype):
    values = torch.tensor([[1, 3, 3, -torch.inf], [2, torch.nan, 5, torch.nan]], dtype=dtype)
    assert extrema._argmax(values).tolist() == [1, 1]


def test_function_transforms_find_the_same_gradients():
    elements, mask, scores, projection = setting((2, 9), True)

    def loss(given):
        return extrema.slot_extrema(given, mask, scores, "sigmoid", projection, True).cos().sum()

    (expected,) = torch.autograd.grad(loss(elements), elements)
    torch.testing.assert_close(torch.func.grad(loss)(elements.detach()), expected)


def test_no_elements_are_the_identity():
    elements, mask, scores, projection = setting((2, 0), False)
    for largest, empty in ((True, -torch.inf), (False, torch.inf)):
        found = extrema.slot_extrema(elements, mask, scores, "sigmoid", projection, largest)
        assert (found == empty).all()
        assert found.shape == (2, SLOTS, OUT)


def test_the_big_tensor_never_exists(monkeypatch):
    """The largest tensor on the way is far below n x K x d_out numbers."""
    elements, mask, scores, projection = setting((1, 200_000), False)
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with Watch():
        extrema.slot_extrema(elements, mask, scores, "sigmoid", projection, True)
    assert largest <= elements.untyped_storage().nbytes()
    assert largest < 200_000 * SLOTS * OUT * 8 / 3
