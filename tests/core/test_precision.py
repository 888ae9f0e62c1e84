"""float16 and bfloat16 against float64: what is rounded is the result, not what it is made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import setfold
from tests.core.test_whole import ENCODERS
from tests.small import draw, make, moved

NARROW = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LOGITS = ("to_key", "to_query", "queries", "seeds", "to_logit", "temperature")  # that shape them
MASK = torch.arange(40) < torch.tensor([[40], [17], [0]])


@pytest.fixture(params=NARROW)
def dtype(request):
    return NARROW[request.param]


def pair_of(name, dtype, sharp=1.0):
    """An encoder in a narrow dtype, and one in float64 with the same weights."""
    torch.manual_seed(0)
    encoder = moved(ENCODERS[name]())
    with torch.no_grad():
        for path, parameter in encoder.named_parameters():
            if any(word in path for word in LOGITS):
                parameter.mul_(sharp)
    encoder = encoder.to(dtype)
    return encoder, copy.deepcopy(encoder).double()


def error(found, expected, scale=None):
    """The largest difference, in units of the last place of the largest number."""
    found, expected = found.detach(), expected.detach().to(found.dtype).double()  # may overflow
    apart = torch.where(found.double() == expected, 0, (found.double() - expected).abs()).max()
    scale = expected.abs().nan_to_num(posinf=0).max() if scale is None else scale
    return float(apart / scale) / torch.finfo(found.dtype).eps


def with_gradients(encoder, elements, mask):
    """The encoding, and the gradients of elements and parameters."""
    leaf = elements.clone().requires_grad_()
    found = encoder(leaf, mask)
    wanted = [leaf, *encoder.parameters()]
    slope = draw(*found.shape, seed=5)
    grads = torch.autograd.grad((found.double() * slope).sum(), wanted, allow_unused=True)
    return found.detach(), [g for g in grads if g is not None]


@pytest.mark.parametrize("name", ENCODERS)
def test_encodings_and_gradients_are_those_of_float64_rounded(name, dtype):
    narrow, wide = pair_of(name, dtype)
    elements = draw(3, 40, 3, seed=1).to(dtype)
    found, grads = with_gradients(narrow, elements, MASK)
    expected, wanted = with_gradients(wide, elements.double(), MASK)
    assert found.dtype == dtype
    assert error(found, expected) < 2
    scale = max(gradient.abs().max() for gradient in wanted)
    for ours, theirs in zip(grads, wanted, strict=True):
        assert ours.dtype == dtype
        assert error(ours, theirs, scale) < 4


@pytest.mark.parametrize("sharp", [30.0, 300.0])
@pytest.mark.parametrize("name", ENCODERS)
def test_extreme_logits_are_no_nan(name, dtype, sharp):
    """Logits of 1e5 and more, beyond what float16 can hold; weights far below what it can hold."""
    narrow, wide = pair_of(name, dtype, sharp)
    elements = draw(3, 40, 3, seed=1).to(dtype)
    found, grads = with_gradients(narrow, elements, MASK)
    assert all(gradient.isfinite().all() for gradient in grads)
    with torch.no_grad():
        expected = wide(elements.double(), MASK)
    assert error(found, expected) < 32  # random slots are rounded, and logits multiply that


@pytest.mark.parametrize("name", ENCODERS)
def test_elements_whose_sums_and_squares_overflow(name, dtype):
    narrow, wide = pair_of(name, dtype)
    elements = (300 * draw(3, 40, 3, seed=1)).to(dtype)
    found, grads = with_gradients(narrow, elements, MASK)
    assert all(gradient.isfinite().all() for gradient in grads)
    with torch.no_grad():
        assert error(found, wide(elements.double(), MASK)) < 4


@pytest.mark.parametrize("name", [n for n, b in ENCODERS.items() if b().passes is not None])
def test_a_fold_is_the_whole_set(name, dtype):
    narrow, _ = pair_of(name, dtype)
    elements = draw(2, 40, 3, seed=1).to(dtype)
    expected = narrow(elements)
    for tracked in (True, False):
        with torch.set_grad_enabled(tracked):
            found = setfold.fold(narrow, elements.split([1, 9, 30], 1))
        assert error(found, expected.double()) < 2
    parameters = [p for p in narrow.parameters() if p.requires_grad]
    if parameters:
        slope = draw(*expected.shape, seed=5)
        ours, theirs = (
            torch.autograd.grad((e.double() * slope).sum(), parameters, allow_unused=True)
            for e in (setfold.fold(narrow, elements.split([1, 9, 30], 1)), expected)
        )
        scale = max(float(g.abs().max()) for g in theirs if g is not None)
        for one, other in zip(ours, theirs, strict=True):
            if other is not None:
                assert error(one, other.double(), scale) < 4


@pytest.mark.parametrize("aggregate", ["mean", "weighted_mean"])
@pytest.mark.parametrize("attention", ["sigmoid", "softmax"])
@pytest.mark.parametrize("length", [100, 10_000])
def test_means_of_what_adds_up_to_more_than_the_dtype_holds(dtype, length, aggregate, attention):
    elements = (1000 + draw(1, length, 3)).to(dtype)
    assert elements.double().sum() > 65504
    encoder = make(aggregate=aggregate, attention=attention).to(dtype)
    for model in (setfold.Pool(3).to(dtype), encoder):
        wide = copy.deepcopy(model).double()
        with torch.no_grad():
            expected = wide(elements.double())
            state = model.initial_state()
            for chunk in elements.split(max(1, length // 20), 1):
                state = model.update(state, chunk)
            assert error(model.readout(state), expected) < 2
        assert error(model(elements), expected) < 2


def test_slots_that_nothing_belongs_to_share_an_element(dtype):
    """sigmoid is zero for all slots, so that only the epsilon of 1e-8 is left."""
    encoder = make(aggregate="weighted_mean").to(dtype)
    with torch.no_grad():
        encoder.to_key.bias.zero_()
        encoder.to_query.weight.zero_()
        encoder.to_query.bias.fill_(-300)
        encoder.to_key.bias.fill_(100)
    elements = draw(1, 5, 3).to(dtype)
    state = encoder.update(encoder.initial_state(), elements)
    assert torch.equal(encoder.weights(state, elements), torch.full((1, 5, 4), 0.25, dtype=dtype))
    assert error(encoder.readout(state), encoder.double()(elements.double())) < 2


@pytest.mark.parametrize(
    "encoder",
    [make(), make(attention="softmax"), setfold.AttentionPool(3, 4, 6), setfold.PMA(3, 4, 1)],
    ids=["sigmoid", "softmax", "attention", "seeds"],
)
def test_attention_weights_sum_to_one(dtype, encoder):
    encoder, elements = copy.deepcopy(encoder).to(dtype), draw(2, 50, 3).to(dtype)
    state = encoder.update(encoder.initial_state(2), elements)
    weights = encoder.weights(state, elements)
    assert weights.dtype == dtype
    axis = 2 if isinstance(encoder, setfold.SlotSetEncoder) else 1
    total = weights.double().sum(axis)
    torch.testing.assert_close(
        total, torch.ones_like(total), rtol=0, atol=4 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("scale", [1e12, 1e18, 1e19, 1e20, 1e30])
@pytest.mark.parametrize("tracked", [True, False])
def test_huge_keys_are_normalized_in_single_precision(scale, tracked):
    """Squares of 1e20 overflow in float32."""
    encoder, elements = make(similarity="cosine").float(), scale * draw(2, 9, 3).float()
    wide = copy.deepcopy(encoder).double()
    with torch.set_grad_enabled(tracked):
        torch.testing.assert_close(
            encoder(elements).double(), wide(elements.double()), rtol=1e-4, atol=1e-5 * scale
        )
        grown = torch.func.vmap(encoder)(elements.unsqueeze(1)).squeeze(1)  # as a formula
        torch.testing.assert_close(grown, encoder(elements), rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("over", ["feature", "set"])
@pytest.mark.parametrize(("kind", "scale"), [(torch.float32, 1e20), (torch.float16, 300.0)])
def test_a_set_norm_of_huge_deviations(kind, scale, over):
    layer, elements = setfold.SetNorm(3, over).to(kind), (scale * draw(2, 50, 3)).to(kind)
    expected = copy.deepcopy(layer).double()(elements.double())
    assert error(layer(elements), expected) < 4


class Doubled(nn.Module):
    """An activation with weights, which it uses twice and shares with another module."""

    def __init__(self):
        super().__init__()
        self.one = self.again = nn.PReLU(init=2.0)
        self.tied = nn.PReLU()
        self.tied.weight = self.one.weight

    def forward(self, values):
        return self.tied(-self.again(-self.one(values)) / 2)


def test_levels_of_large_sums_meet_in_single_precision(dtype):
    upper = setfold.SlotSetEncoder(5, 2, 6, 5)
    levels = [make(aggregate="sum"), upper]
    encoder = setfold.HierarchicalSlotSetEncoder(levels, Doubled()).to(dtype).eval()
    seen = []
    encoder.activation.register_forward_hook(lambda m, inputs, output: seen.append(output.dtype))
    elements = torch.full((1, 3000, 3), 100.0, dtype=dtype)  # sums of 3e5
    wide = copy.deepcopy(encoder).double()
    found = encoder(elements)
    assert seen == [torch.float32]
    assert error(found, wide(elements.double())) < 4
    found.sum().backward()
    weight = encoder.activation.one.weight
    assert weight is encoder.activation.again.weight is encoder.activation.tied.weight
    assert weight.dtype == weight.grad.dtype == dtype
    assert isinstance(weight, nn.Parameter)
