"""Nothing that is kept of an encoder's modules and settings goes stale.

An encoder is used, changed, and used again. It must then give exactly what a copy gives that was
made before any use and changed in the same way, and states from before must raise.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import setfold
from setfold.core import weights as core_weights
from tests.core.stale import (
    USED,
    Scale,
    assert_nothing_stale,
    assert_stale,
    built,
    everything,
    slot_set,
)
from tests.core.test_stale_values import VALUES
from tests.core.test_weights import step
from tests.small import TIGHT, draw


def replace_module(encoder):
    torch.manual_seed(7)
    encoder.to_key = nn.Linear(3, 3).double()


def replace_parameter(encoder):
    encoder.to_value.weight = nn.Parameter(encoder.to_value.weight.detach() + 1)


def remove_bias(encoder):
    encoder.to_value.bias = None


def set_norm_epsilon(encoder):
    encoder.norm.eps = 0.5


def set_attention(encoder):
    encoder.attention = "softmax"


class Negative(nn.Module):
    def forward(self, weight):
        return -weight


def parametrize(encoder):
    nn.utils.parametrize.register_parametrization(encoder.to_key, "weight", Negative())


STRUCTURE = {
    "module": replace_module,
    "parameter": replace_parameter,
    "no bias": remove_bias,
    "epsilon": set_norm_epsilon,
    "attention": set_attention,
    "parametrization": parametrize,
}


@pytest.mark.parametrize("change", STRUCTURE.values(), ids=STRUCTURE)
@pytest.mark.parametrize("aggregate", ["mean", ["weighted_mean", "max"]], ids=str)
def test_changed_parts_and_settings_are_used(aggregate, change):
    encoder = built(lambda: slot_set(aggregate=aggregate))
    nn.init.normal_(encoder.to_value.bias)
    before, after = assert_nothing_stale(encoder, change)
    assert all((b - a).abs().max() > 0 for b, a in zip(before, after, strict=True))


@pytest.mark.parametrize("change", STRUCTURE.values(), ids=STRUCTURE)
def test_changed_parts_and_settings_of_a_part_are_used(change):
    encoder = built(lambda: setfold.Concat([setfold.Pool(3), slot_set()]))
    nn.init.normal_(encoder.encoders["1"].to_value.bias)
    assert_nothing_stale(encoder, lambda e: change(e.encoders["1"]))


def test_a_bias_that_is_added_is_used():
    def add_bias(encoder):
        encoder.to_value.bias = nn.Parameter(torch.ones(3, dtype=torch.float64))

    before, after = assert_nothing_stale(built(lambda: slot_set(bias=False)), add_bias)
    assert all((b - a).abs().max() > 1e-3 for b, a in zip(before, after, strict=True))


def test_a_parametrization_may_change_and_be_removed():
    encoder, unused = built(slot_set), built(slot_set)  # a copy would share the class of to_key
    parametrize(encoder)
    parametrize(unused)

    def change_original(model):
        model.to_key.parametrizations.weight.original.data.add_(0.1)

    def remove(model):
        nn.utils.parametrize.remove_parametrizations(model.to_key, "weight")

    assert_nothing_stale(encoder, change_original, unused=unused)
    encoder.to_key.parametrizations.weight.original.data.add_(0.1)
    unused.to_key.parametrizations.weight.original.data.add_(0.1)
    before, after = assert_nothing_stale(encoder, remove, states_stay=None, unused=unused)
    assert_close(after, before, **TIGHT)  # the weight stays what it was


def test_a_weight_norm_may_change():
    encoder = built(slot_set)
    nn.utils.parametrizations.weight_norm(encoder.to_value)

    def change_length(model):
        model.to_value.parametrizations.weight.original0.data.mul_(2)

    before, after = assert_nothing_stale(encoder, change_length)
    assert all((b - a).abs().max() > 1e-3 for b, a in zip(before, after, strict=True))


FEATURES = {
    "buffer": lambda f: f.shift.add_(1),
    "buffer, data": lambda f: f.shift.data.add_(1),
    "buffer, replaced": lambda f: f.register_buffer("shift", 3 * torch.ones(3).double()),
    "setting": lambda f: setattr(f, "exponent", 2.0),
    "module": lambda f: setattr(f, "linear", nn.Identity()),
}


@pytest.mark.parametrize("change", FEATURES.values(), ids=FEATURES)
def test_changed_features_are_used(change):
    encoder = built(lambda: setfold.Composition(slot_set(), Scale()))
    before, after = assert_nothing_stale(encoder, lambda e: change(e.features))
    assert all((b - a).abs().max() > 0 for b, a in zip(before, after, strict=True))


ADDED = {
    "appended": lambda e: e.features.append(nn.Tanh()),
    "appended, with weights": lambda e: e.features.append(moved_linear()),
    "inserted": lambda e: e.features.insert(0, nn.Tanh()),
    "deleted": lambda e: e.features.__delitem__(1),
    "removed": lambda e: setattr(e, "features", None),
}


def moved_linear():
    torch.manual_seed(3)
    return nn.Linear(3, 3).double()


@pytest.mark.parametrize("change", ADDED.values(), ids=ADDED)
def test_layers_that_are_added_or_removed_are_used(change):
    features = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
    encoder = built(lambda: setfold.Composition(slot_set(), features))
    before, after = assert_nothing_stale(encoder, change)
    assert all((b - a).abs().max() > 0 for b, a in zip(before, after, strict=True))


def test_features_that_are_added_later_are_used():
    encoder = built(lambda: setfold.Composition(slot_set()))
    before, after = assert_nothing_stale(encoder, lambda e: setattr(e, "features", nn.Tanh()))
    assert all((b - a).abs().max() > 0 for b, a in zip(before, after, strict=True))


class Optional(nn.Module):
    """A setting that is None at first."""

    def __init__(self):
        super().__init__()
        self.limit = None

    def forward(self, rows):
        return rows if self.limit is None else rows.clamp(-self.limit, self.limit)


def test_a_setting_that_was_none_is_used():
    encoder = built(lambda: setfold.Composition(slot_set(), Optional()))
    before, after = assert_nothing_stale(encoder, lambda e: setattr(e.features, "limit", 0.1))
    assert all((b - a).abs().max() > 0 for b, a in zip(before, after, strict=True))


def versions(package, first, second):
    """Two versions of a class of a package, as modules."""
    for kind in (first, second):
        kind.__module__, kind.__qualname__ = f"{package}.layers", "Layer"
    return first(3), second(3)


class Early(nn.Module):
    def __init__(self, width, bias=True):
        super().__init__()
        self.width, self.bias = width, bias


class Later(nn.Module):
    """One more argument, and one more attribute."""

    def __init__(self, width, bias=True, mode="plain"):
        super().__init__()
        self.width, self.bias, self.mode, self.is_fast = width, bias, mode, True


@pytest.mark.parametrize("package", ["setfold", "torch.nn"])
def test_states_outlive_new_arguments_and_attributes_of_a_class(package):
    early, later = versions(package, Early, Later)
    assert core_weights._structure([early]) == core_weights._structure([later])
    later.mode = "other"
    assert core_weights._structure([early]) != core_weights._structure([later])
    early.width = 4
    assert core_weights._structure([early]) != core_weights._structure([Early(3)])


def test_all_attributes_of_other_classes_are_settings():
    early, later = versions("elsewhere", Early, Later)
    assert core_weights._structure([early]) != core_weights._structure([later])


# ---- weights that do not shape the state, but the encoding


HEADS = {
    "head": lambda: setfold.Composition(slot_set(), None, nn.Linear(3, 3)),
    "hierarchy": lambda: setfold.HierarchicalSlotSetEncoder([slot_set(), slot_set()]),
    "hierarchy, learned": lambda: setfold.HierarchicalSlotSetEncoder(
        [slot_set(), slot_set(slots="learned")]
    ),
    "hierarchy within": lambda: setfold.Composition(
        setfold.HierarchicalSlotSetEncoder([slot_set(), slot_set()])
    ),
    "concat": lambda: setfold.Concat(
        [setfold.HierarchicalSlotSetEncoder([slot_set(), slot_set(slots="learned")])]
    ),
}


def weights_of_the_readout(encoder):
    shaping = {id(p) for m in encoder.shaping_modules() for p in m.parameters()}
    return [p for p in encoder.parameters() if id(p) not in shaping]


@pytest.mark.parametrize("exchanged", [False, True])
@pytest.mark.parametrize("build", HEADS.values(), ids=HEADS)
def test_a_readout_that_is_trained_alone_is_used_in_forward(build, exchanged):
    """Each weight of the readout on its own, so that none hides another."""
    count = len(weights_of_the_readout(built(build)))
    assert count
    for number in range(count):
        encoder = built(build)
        unused = copy.deepcopy(encoder)
        everything(encoder)
        for model in (encoder, unused):
            weight = weights_of_the_readout(model)[number]
            change = draw(*weight.shape, seed=number)
            weight.data = weight.data + change if exchanged else weight.data.add_(change)
        for found, expected in zip(everything(encoder), everything(unused), strict=True):
            assert torch.equal(found, expected), number


# ---- copies, borrowed weights, inference mode, shared modules


@pytest.mark.parametrize("name", USED)
@pytest.mark.parametrize("changed", ["copy", "original"])
def test_of_a_used_encoder_and_its_copy_only_one_is_changed(name, changed):
    original = built(USED[name])
    expected = everything(original)
    twin = copy.deepcopy(original)
    assert all(map(torch.equal, everything(twin), expected))
    one, other = (twin, original) if changed == "copy" else (original, twin)
    with torch.no_grad():
        states = [e.update(e.initial_state(2), draw(2, 5, 3)) for e in (one, other)]
    assert int(states[0].merge(states[1]).count[0]) == 10
    VALUES["data, in place"](one)
    assert_stale(one, states[0])
    assert_stale(one, states[1])
    assert all(map(torch.equal, everything(other), expected))
    assert not any(map(torch.equal, everything(one), expected))
    assert int(other.update(states[0], draw(2, 5, 3)).merge(states[1]).count[0]) == 15


@pytest.mark.parametrize("name", USED)
def test_weights_that_are_borrowed_are_used_and_given_back(name):
    encoder, elements = built(USED[name]), draw(2, 5, 3)
    other = copy.deepcopy(encoder)
    VALUES["in place"](other)
    borrowed = dict(other.named_parameters())
    with torch.no_grad():
        expected, theirs = encoder(elements), other(elements)
        for _ in range(2):
            found = torch.func.functional_call(encoder, borrowed, (elements,))
            assert torch.equal(found, theirs)
            plain = {name: weight.detach().clone() for name, weight in borrowed.items()}
            found = torch.func.functional_call(encoder, plain, (elements,))
            # tensors that are not parameters may take another path, with other roundings
            torch.testing.assert_close(found, theirs, rtol=1e-12, atol=1e-12)
            assert torch.equal(encoder(elements), expected)


@pytest.mark.parametrize("name", USED)
def test_gradients_after_inference_mode(name):
    """What was kept in inference mode must not become part of a graph."""
    encoder, elements = built(USED[name]), draw(2, 5, 3).requires_grad_()
    unused = copy.deepcopy(encoder)
    with torch.inference_mode():
        for found, expected in zip(everything(encoder), everything(unused), strict=True):
            assert torch.equal(found, expected)
    unused = copy.deepcopy(encoder)
    with torch.no_grad():
        begun = encoder.initial_state(2)  # after inference mode, and before training
    wanted = [elements, *encoder.parameters()]
    for found, expected in (
        (encoder(elements), unused(elements)),
        (setfold.fold(encoder, elements.split(2, 1)), setfold.fold(unused, elements.split(2, 1))),
    ):
        assert_close(found, expected, **TIGHT)
        mine = torch.autograd.grad(found.square().sum(), wanted, allow_unused=True)
        theirs = torch.autograd.grad(
            expected.square().sum(), [elements, *unused.parameters()], allow_unused=True
        )
        assert_close(mine, theirs, **TIGHT)
    encoder.readout(encoder.update(begun, elements)).square().sum().backward()
    assert elements.grad.abs().max() > 0
    step(encoder)
    with torch.inference_mode():
        assert torch.equal(encoder(elements), copy.deepcopy(encoder)(elements))


def test_two_encoders_that_share_a_module_both_notice():
    one, two = built(slot_set), built(lambda: slot_set(aggregate="max"))
    two.to_key = one.to_key
    for model in (one, two):
        everything(model)
    with torch.no_grad():
        states = [e.update(e.initial_state(2), draw(2, 5, 3)) for e in (one, two)]
    one.to_key.weight.data.add_(0.1)
    for model, state in zip((one, two), states, strict=True):
        assert_stale(model, state)
        for found, expected in zip(
            everything(model), everything(copy.deepcopy(model)), strict=True
        ):
            assert torch.equal(found, expected)


def test_training_mode_keeps_nothing():
    encoder = built(slot_set)
    everything(encoder)
    encoder.train()
    with torch.no_grad():
        torch.manual_seed(1)
        one, two = encoder(draw(1, 5, 3)), encoder(draw(1, 5, 3))
    assert not torch.equal(one, two)  # new slots each time
    encoder.eval()
    assert all(map(torch.equal, everything(encoder), everything(copy.deepcopy(encoder))))


def test_an_object_that_was_freed_is_not_mistaken_for_another():
    """Memory and ids are used again; what was kept for an encoder must go with it."""
    for seed in range(20):
        torch.manual_seed(seed)
        encoder = slot_set().double().eval()
        found = everything(encoder)
        assert all(map(torch.equal, found, everything(copy.deepcopy(encoder))))
        del encoder
        gc.collect()
