"""The Slot Set Encoder on one set, from its parameters to the encoding and back."""

from __future__ import annotations

import pytest
import torch

from setfold.kernels.slots import plain_encoding
from setfold.native import slots
from setfold.native.library import available, using
from setfold.native.slots import Settings, SlotTensors
from tests.native.cases import ATTENTIONS, assert_close

SETTINGS = Settings(6, "sigmoid", 1, 1e-5)
kernels = pytest.mark.usefixtures("isa")
# (n, d, K, h, d_key, d_out): few and many elements, around the widths of vectors (4, 8, 16)
SHAPES = [
    *[(1, 1, 2, 2, 1, 1), (1, 5, 16, 64, 64, 64), (10, 5, 16, 64, 64, 64), (40, 5, 16, 64, 64, 64)],
    *[(3, 17, 5, 31, 9, 33), (60, 17, 5, 31, 9, 33), (15, 16, 33, 8, 16, 7), (600, 3, 2, 4, 5, 6)],
    *[(2, 64, 32, 15, 65, 64), (100, 64, 32, 64, 64, 64)],
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def make(shape, noisy=True, biased=True):
    length, dim, num_slots, dim_slot, dim_key, dim_out = shape
    row, every = (dim_slot,), (num_slots, dim_slot)
    sizes = {
        "elements": (1, length, dim),
        "base": row if noisy else every,
        "deviation": row if noisy else None,
        "noise": every if noisy else None,
        "norm": row,
        "norm_bias": row if biased else None,
        "query": (dim_key, dim_slot),
        "query_bias": (dim_key,) if biased else None,
        "key": (dim_key, dim),
        "key_bias": (dim_key,) if biased else None,
        "value": (dim_out, dim),
        "value_bias": (dim_out,) if biased else None,
    }
    drawn = {n: None if size is None else torch.randn(size) for n, size in sizes.items()}
    for name in ("query", "key", "value"):
        drawn[name] /= sizes[name][1] ** 0.5
    return SlotTensors(**drawn)


def expected_of(given, settings, upstream):
    exact = [None if t is None else t.double().requires_grad_() for t in given]
    encoding = plain_encoding(SlotTensors(*exact), settings)
    present = [t for t in exact if t is not None]
    grads = iter(torch.autograd.grad(encoding, present, upstream.double()))
    return encoding.detach(), [None if t is None else next(grads) for t in exact]


@kernels
@shapes
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize(("noisy", "biased"), [(True, True), (False, False), (False, True)])
def test_encoding_and_gradients(shape, attention, noisy, biased):
    given, settings = make(shape, noisy, biased), Settings(shape[2], attention, 3, 1e-5)
    encoding, kept = slots.encode_slots(given, settings)
    upstream = torch.randn(encoding.shape)
    expected, gradients = expected_of(given, settings, upstream)
    assert_close(encoding, expected)
    needs = [name != "noise" for name in SlotTensors._fields]
    found = slots.encode_slots_back(given, kept, upstream, needs)
    largest = max(float(g.abs().max()) for g in gradients if g is not None)
    for name, grad, wanted in zip(SlotTensors._fields, found, gradients, strict=True):
        assert (grad is None) == (wanted is None or name == "noise")
        if grad is not None:  # some are differences that nearly cancel
            assert_close(grad, wanted, 2e-5, floor=0.05 * largest)


@kernels
@pytest.mark.parametrize("length", [3, 40])
def test_only_what_is_needed_is_computed(length):
    given, settings = make((length, 7, 6, 5, 9, 8)), Settings(6, "sigmoid", 1, 1e-5)
    encoding, kept = slots.encode_slots(given, settings)
    upstream, number = torch.ones(encoding.shape), len(given)
    every = slots.encode_slots_back(given, kept, upstream, [True] * number)
    for wanted in range(number):
        needs = [place == wanted for place in range(number)]
        if SlotTensors._fields[wanted] != "noise":
            found = slots.encode_slots_back(given, kept, upstream, needs)
            assert [grad is not None for grad in found] == needs
            assert torch.equal(found[wanted], every[wanted])


@kernels
def test_both_orders_are_tested():
    orders = {slots._plan(shape, False)[1] for shape in SHAPES}
    assert orders == {True, False}


@kernels
@pytest.mark.parametrize("length", [3, 40])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
def test_none_if_a_number_is_not_finite(length, bad):
    settings = Settings(6, "sigmoid", 1, 1e-5)
    for name in ("elements", "value", "key_bias", "norm"):
        given = make((length, 7, 6, 5, 9, 8))
        getattr(given, name).view(-1)[1:3] = bad
        found = slots.encode_slots(given, settings)
        assert found is None or bool(found[0].isfinite().all())
        assert bad == 3e38 or found is None


@kernels
def test_none_if_the_kernels_cannot_read_a_tensor():
    settings, shape = Settings(6, "sigmoid", 1, 1e-5), (3, 8, 6, 8, 8, 8)
    given = make(shape)
    assert slots.encode_slots(given, settings) is not None
    for name, tensor in given._asdict().items():
        for other in (tensor.double(), tensor[..., :-1].contiguous(), tensor.to("meta")):
            if name not in ("elements", "query", "value") or other.shape == tensor.shape:
                assert slots.encode_slots(given._replace(**{name: other}), settings) is None
    assert slots.encode_slots(given._replace(key=given.key.t()), settings) is None


@kernels
def test_none_if_a_tensor_is_elsewhere_when_gradients_are_wanted():
    given, settings = make((3, 8, 6, 8, 8, 8)), Settings(6, "sigmoid", 1, 1e-5)
    encoding, kept = slots.encode_slots(given, settings)
    needs, upstream = [True] * len(given), torch.ones(encoding.shape)
    assert slots.encode_slots_back(given, kept, upstream, needs) is not None
    for name, tensor in given._asdict().items():
        moved = given._replace(**{name: tensor.clone()})
        assert slots.encode_slots_back(moved, kept, upstream, needs) is None
    assert slots.encode_slots_back(given, kept, upstream.double(), needs) is None


@pytest.mark.skipif(len(available()) < 2, reason="one instruction set")
def test_none_if_other_kernels_have_been_chosen():
    """The layout of what is kept depends on the width of their vectors."""
    given, settings = make((3, 8, 6, 8, 8, 8)), Settings(6, "sigmoid", 1, 1e-5)
    first, second, *_ = available()
    with using(first):
        encoding, kept = slots.encode_slots(given, settings)
    needs, upstream = [True] * len(given), torch.ones(encoding.shape)
    for isa in (second, None):
        with using(isa):
            assert slots.encode_slots_back(given, kept, upstream, needs) is None


@kernels
def test_what_can_be_encoded_is_known_beforehand():
    given = make((3, 8, 6, 8, 8, 8))
    elements, weights = given.elements, (given.query, given.value, 6)
    assert slots.can_encode_slots(elements, *weights)
    other = torch.randn(1, 8, 3).mT
    for unreadable in (elements.double(), other, elements.expand(1 << 17, 3, 8).reshape(1, -1, 8)):
        found = slots.encode_slots(given._replace(elements=unreadable), SETTINGS)
        assert (found is not None) == slots.can_encode_slots(unreadable, *weights)
        assert found is None
