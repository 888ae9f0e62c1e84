"""One small set with gradients takes a shortcut; it must give what the general path gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import setfold
from setfold.errors import NonFiniteError
from setfold.native import slots as native
from setfold.native.library import choice

LENGTHS = (1, 7, 60, 700)
settings = pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"slots": "learned"},
        {"aggregate": "sum", "attention": "softmax"},
        {"bias": False, "slots": "learned"},
    ],
    ids=lambda chosen: "-".join(map(str, chosen.values())) or "default",
)


@pytest.fixture
def calls(monkeypatch):
    """How often the compiled kernels ran, forward and backward."""
    if choice.kernels is None:
        pytest.skip("no compiled kernels")
    found = {"forward": 0, "backward": 0}
    forward, backward = native.encode_slots, native.encode_slots_back

    def count(name, result):
        found[name] += result is not None
        return result

    monkeypatch.setattr(native, "encode_slots", lambda *a: count("forward", forward(*a)))
    monkeypatch.setattr(native, "encode_slots_back", lambda *a: count("backward", backward(*a)))
    return found


def make(dtype=torch.float32, **chosen):
    torch.manual_seed(0)
    encoder = setfold.SlotSetEncoder(5, 8, 12, 16, **chosen)
    nn.init.normal_(encoder.norm.weight)
    nn.init.normal_(encoder.norm.bias)
    return encoder.to(dtype)


def general(encoder, elements):
    """The encoding without the shortcut, which takes no mask."""
    return encoder(elements, torch.ones(elements.shape[:2], dtype=torch.bool))


def gradients(encode, encoder, elements):
    """The encoding, and the gradients of elements and parameters."""
    torch.manual_seed(1)  # of the slots
    elements = elements.clone().requires_grad_()
    encoding = encode(elements)
    parameters = dict(encoder.named_parameters())
    found = torch.autograd.grad(encoding.square().sum(), [elements, *parameters.values()])
    return encoding.detach(), dict(zip(["elements", *parameters], found, strict=True))


def assert_same(left, right, tolerance):
    assert (left[0] - right[0]).abs().max() <= tolerance * right[0].abs().max()
    largest = max(float(grad.abs().max()) for grad in right[1].values())
    for name, grad in right[1].items():
        assert (left[1][name] - grad).abs().max() <= tolerance * largest, name


@settings
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("training", [True, False])
def test_in_double_precision(length, training, chosen):
    encoder = make(torch.float64, **chosen).train(training)
    elements = torch.randn(1, length, 5, dtype=torch.float64)
    found = gradients(encoder, encoder, elements)
    expected = gradients(lambda e: general(encoder, e), encoder, elements)
    assert_same(found, expected, 1e-12)


@settings
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("training", [True, False])
def test_compiled(calls, length, training, chosen):
    encoder = make(**chosen).train(training)
    elements = torch.randn(1, length, 5)
    found = gradients(encoder, encoder, elements)
    assert calls == {"forward": 1, "backward": 1}
    expected = gradients(lambda e: general(encoder, e), encoder, elements)
    assert calls == {"forward": 1, "backward": 1}
    assert_same(found, expected, 2e-5)


def test_gradients_accumulate_and_share_no_memory(calls):
    encoder, elements = make(), torch.randn(1, 9, 5)
    encoder.eval()(elements).sum().backward()
    once = [p.grad.clone() for p in encoder.parameters()]
    assert len({p.grad.untyped_storage().data_ptr() for p in encoder.parameters()}) == len(once)
    encoder(elements).sum().backward()
    for parameter, grad in zip(encoder.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * grad)
    assert calls == {"forward": 2, "backward": 2}


def test_the_graph_can_be_kept(calls):
    encoder, elements = make(), torch.randn(1, 9, 5)
    loss, weights = encoder(elements).sum(), list(encoder.parameters())
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    second = torch.autograd.grad(loss, weights)
    assert all(map(torch.equal, first, second))
    assert calls == {"forward": 1, "backward": 2}


def test_frozen_parameters_get_no_gradient(calls):
    encoder, elements = make(), torch.randn(1, 9, 5)
    expected = gradients(lambda e: general(encoder, e), encoder, elements)[1]
    encoder.to_key.requires_grad_(False)
    encoder.slot_deviation.requires_grad_(False)
    torch.manual_seed(1)
    encoder(elements).square().sum().backward()
    assert encoder.to_key.weight.grad is encoder.to_key.bias.grad is None
    assert encoder.slot_deviation.grad is None
    torch.testing.assert_close(encoder.to_query.weight.grad, expected["to_query.weight"])
    assert calls["backward"] == 1
    frozen = make().requires_grad_(False)
    assert not frozen(elements).requires_grad


@pytest.mark.parametrize("length", [3, 60])
def test_second_derivatives(calls, length):
    encoder, elements = make(slots="learned"), torch.randn(1, length, 5)
    found = []
    for dtype in (torch.float32, torch.float64):
        model = copy.deepcopy(encoder).to(dtype)
        some = elements.to(dtype).requires_grad_()
        inputs = [some, *model.parameters()]
        first = torch.autograd.grad(model(some).square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        found.append((first[0].detach(), dict(enumerate(second))))
    assert calls["forward"] == 1
    assert_same(*found, 1e-4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("length", [3, 60])
def test_bad_numbers_raise(bad, length):
    encoder, elements = make(), torch.randn(1, length, 5)
    elements[0, -1, 2] = bad
    with pytest.raises(NonFiniteError, match=rf"elements\[0, {length - 1}, 2\]"):
        encoder(elements)


def test_changes_between_the_passes_are_noticed(calls):
    encoder, elements = make(), torch.randn(1, 9, 5)
    for tensor in (encoder.to_key.weight, elements):
        loss = encoder(elements).sum()
        with torch.no_grad():
            tensor.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert calls["backward"] == 0


def test_other_memory_is_not_read(calls):
    """What takes the place of the memory that was saved is used, as by any node of torch."""
    encoder, elements = make(slots="learned"), torch.randn(1, 9, 5)
    loss = encoder(elements).square().sum()
    expected = torch.autograd.grad(loss, list(encoder.parameters()), retain_graph=True)
    for parameter in encoder.parameters():
        parameter.data = parameter.data.clone()
    found = torch.autograd.grad(loss, list(encoder.parameters()))
    assert calls["backward"] == 1
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_saved_tensors_hooks(calls):
    encoder, elements = make(slots="learned"), torch.randn(1, 9, 5)
    expected = gradients(encoder, encoder, elements)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        found = gradients(encoder, encoder, elements)
    assert calls == {"forward": 2, "backward": 1}
    assert_same(found, expected, 2e-5)


def test_anomaly_mode():
    encoder, elements = make(), torch.randn(1, 9, 5)
    expected = gradients(encoder, encoder, elements)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        found = gradients(encoder, encoder, elements)
    assert_same(found, expected, 0)


class Changed(nn.Module):
    def forward(self, weight):
        return 2 * weight + torch.linspace(0, 1, weight.shape[-1])


def hook_forward(encoder, seen):
    encoder.to_query.register_forward_hook(lambda *_: seen.append("hook"))


def hook_before(encoder, seen):
    encoder.norm.register_forward_pre_hook(lambda *_: seen.append("hook"))


def hook_backward(encoder, seen):
    encoder.to_query.register_full_backward_hook(lambda *_: seen.append("hook"))


def hook_before_backward(encoder, seen):
    encoder.norm.register_full_backward_pre_hook(lambda *_: seen.append("hook"))


def replace_forward(encoder, seen):
    forward = encoder.norm.forward
    encoder.norm.forward = lambda slots: (seen.append("hook"), forward(slots))[1]


@pytest.mark.parametrize(
    "change", [hook_forward, hook_before, hook_backward, hook_before_backward, replace_forward]
)
def test_hooks_run(calls, change):
    encoder, elements, seen = make(), torch.randn(1, 9, 5), []
    change(encoder, seen)
    encoder(elements).sum().backward()
    assert seen  # twice, as the first call probes the encoder
    assert calls["forward"] == 0


def test_compiled_layers_run(calls):
    encoder, seen = make(), []
    norm = encoder.norm
    norm._compiled_call_impl = lambda *given: (seen.append("call"), norm.forward(*given))[1]
    encoder(torch.randn(1, 9, 5))
    assert seen
    assert calls["forward"] == 0


def test_hooks_of_all_modules_run(calls):
    encoder, seen = make(), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        encoder(torch.randn(1, 9, 5))
    finally:
        handle.remove()
    assert encoder.norm in seen
    assert encoder.to_query in seen


def parametrize_key(encoder):
    parametrize.register_parametrization(encoder.to_key, "weight", Changed())


def parametrize_slots(encoder):
    parametrize.register_parametrization(encoder, "slot_mean", Changed())


def normalize_value(encoder):
    parametrizations.spectral_norm(encoder.to_value)
    encoder.eval()


def replace_query_bias(encoder):
    bias = 3 * encoder.to_query.bias.detach() + 1
    del encoder.to_query.bias
    encoder.to_query.bias = bias


def register_key_bias(encoder):
    bias = 3 * encoder.to_key.bias.detach() + 1
    del encoder.to_key.bias
    encoder.to_key.register_buffer("bias", bias)


def replace_query(encoder):
    class Shifted(nn.Linear):
        def forward(self, slots):
            return super().forward(slots) + 1

    encoder.to_query = Shifted(12, 16)


def replace_norm(encoder):
    encoder.norm = nn.LayerNorm(12, elementwise_affine=False)


def wider_epsilon(encoder):
    encoder.norm = nn.LayerNorm(12, eps=0.5, bias=False)


@pytest.mark.parametrize(
    "change",
    [
        *[parametrize_key, parametrize_slots, normalize_value],
        *[replace_query_bias, register_key_bias],
        *[replace_query, replace_norm, wider_epsilon],
    ],
)
def test_changed_layers(change):
    encoder, elements = make(), torch.randn(1, 9, 5)
    before = gradients(encoder, encoder, elements)[0]
    change(encoder)
    found = gradients(encoder, encoder, elements)
    assert not torch.allclose(found[0], before)
    assert_same(found, gradients(lambda e: general(encoder, e), encoder, elements), 2e-5)


def test_a_pruned_bias():
    encoder, elements = make().eval(), torch.randn(1, 9, 5)
    prune.random_unstructured(encoder.to_value, "bias", amount=0.5)
    torch.testing.assert_close(encoder(elements), general(encoder, elements))


def test_a_subclass_that_draws_other_slots(calls):
    class Fixed(setfold.SlotSetEncoder):
        def draw_frame(self, num_slots, generator):
            return (torch.linspace(-1, 1, 96).view(1, 8, 12),)

    encoder, elements = Fixed(5, 8, 12, 16), torch.randn(1, 9, 5)
    torch.testing.assert_close(encoder(elements), general(encoder, elements))
    assert calls["forward"] == 0


def test_function_transforms():
    encoder, elements = make(slots="learned"), torch.randn(1, 9, 5)
    expected = gradients(encoder, encoder, elements)[1]

    def loss(parameters):
        return torch.func.functional_call(encoder, parameters, (elements,)).square().sum()

    found = torch.func.grad(loss)(dict(encoder.named_parameters()))
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5)
    outside = {name: p.detach().clone() for name, p in encoder.named_parameters()}
    assert torch.equal(loss(outside), loss(dict(encoder.named_parameters())))


def test_torch_compile():
    encoder, elements = make(slots="learned"), torch.randn(1, 9, 5)
    compiled = torch.compile(encoder, backend="aot_eager")
    expected = gradients(encoder, encoder, elements)
    assert_same(gradients(compiled, encoder, elements), expected, 2e-5)


def test_autocast_takes_the_general_path(calls):
    encoder, elements = make(), torch.randn(1, 9, 5)
    with torch.autocast("cpu", torch.bfloat16):
        encoder(elements).sum().backward()
    assert calls["forward"] == 0


@pytest.mark.parametrize(
    ("sizes", "elements"),
    [
        ((128, 64, 64, 128), torch.randn(1, 4096, 128)),  # too much for one thread
        ((16, 8, 16, 16), torch.randn(1, 4096, 16, dtype=torch.float64)),
        ((16, 8, 16, 16), torch.randn(1, 16, 4096).mT),
    ],
    ids=["wide", "float64", "not contiguous"],
)
def test_random_slots_are_drawn_once(calls, sizes, elements):
    """A set that is too large for the shortcut leaves it before slots are drawn."""
    encoder, found = setfold.SlotSetEncoder(*sizes).to(elements.dtype), []
    for encode in (encoder, lambda some: general(encoder, some)):
        torch.manual_seed(1)
        found.append((encode(elements).detach(), torch.get_rng_state()))
    assert calls["forward"] == 0
    (one, after), (other, expected) = found
    torch.testing.assert_close(one, other)
    assert torch.equal(after, expected)
