from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.testing import assert_close

import setfold
from tests import peers, reference
from tests.small import TIGHT, draw
from tests.strategies import cases, pools


@given(encoder=pools(), case=cases())
def test_a_pool_is_what_the_loops_say(encoder, case):
    encoder = encoder.double()
    found = encoder(case.elements)
    names = [a.name for a in encoder.aggregates]
    for number in range(case.batch_size):
        expected = reference.pool(case.elements[number], names)
        np.testing.assert_allclose(found[number], expected, rtol=1e-12, atol=1e-13)


def test_deep_sets_is_features_then_pool_then_head():
    torch.manual_seed(0)
    features, head = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(8, 2)
    model = setfold.DeepSets(features, 4, ["mean", "max"], head).double()
    elements = torch.randn(2, 7, 3, dtype=torch.float64)
    made = features(elements)
    expected = head(torch.cat([made.mean(1), made.amax(1)], -1))
    assert_close(model(elements), expected, rtol=1e-12, atol=1e-13)


def test_deep_sets_is_pygs():
    torch.manual_seed(0)
    features, head = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), nn.Linear(4, 2)
    model = setfold.DeepSets(features, 4, "sum", head).double()
    theirs = peers.DeepSetsAggregation(features, head)
    rows, index = draw(14, 3), torch.tensor([0] * 3 + [1] * 10 + [3])
    expected = theirs(rows, index, dim_size=4)
    assert_close(model(rows, index=index, batch_size=4), expected, **TIGHT)


LINEAR_LAST = {
    "linear": lambda: nn.Linear(3, 4),
    "hidden": lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4)),
    "unbiased": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4, bias=False)),
}


@pytest.mark.parametrize("form", ["dense", "masked", "ragged"])
@pytest.mark.parametrize("aggregate", ["sum", "mean", ["mean", "sum"]])
@pytest.mark.parametrize("layers", LINEAR_LAST)
def test_a_last_linear_layer_follows_the_sum(layers, aggregate, form):
    """In float64 it is applied to each element, so that it is the reference."""
    torch.manual_seed(0)
    head = nn.Linear(4 if isinstance(aggregate, str) else 8, 2)
    model = setfold.DeepSets(LINEAR_LAST[layers](), 4, aggregate, head)
    options = {"masked": {"mask": torch.rand(3, 7) < 0.5}}.get(form, {})
    elements = torch.randn(3, 7, 3)
    if form == "ragged":
        elements, options = elements[0], {"index": torch.tensor([2, 0, 2, 2, 0, 0, 2])}
    found = model(elements, **options)
    gradients = torch.autograd.grad(found.square().sum(), list(model.parameters()))
    model = model.double()
    expected = model(elements.double(), **options)
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, wanted, strict=True):
        assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def hidden_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4))


def test_a_last_linear_layer_is_not_applied_to_each_element(monkeypatch):
    model, rows, forward = setfold.DeepSets(hidden_layers(), 4), [], nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda m, x: rows.append(len(x)) or forward(m, x))
    model(torch.randn(1, 7, 3))
    assert rows == [7]  # of the first layer


@pytest.mark.parametrize("hooked", ["features", "last"])
@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_see_each_element(hooked, hook):
    model, seen = setfold.DeepSets(hidden_layers(), 4), []
    module = model.features if hooked == "features" else model.features[-1]
    getattr(module, hook)(lambda *arguments: seen.append(len(arguments[1][0])))
    model(torch.randn(1, 7, 3))
    assert seen == [7]


def test_hooks_of_all_modules_see_each_element():
    model, seen = setfold.DeepSets(hidden_layers(), 4), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        model(torch.randn(1, 7, 3))
    finally:
        handle.remove()
    assert {model.features, *model.features} <= set(seen)


@pytest.mark.parametrize("compiled", ["features", "last"])
def test_compiled_modules_see_each_element(compiled):
    model, seen = setfold.DeepSets(hidden_layers(), 4), []
    module = model.features if compiled == "features" else model.features[-1]
    module._compiled_call_impl = lambda x: (seen.append(len(x)), module.forward(x))[1]
    model(torch.randn(1, 7, 3))
    assert seen == [7]


class Rectified(setfold.DeepSets):
    def featurize(self, elements, mask, context):
        return super().featurize(elements, mask, context).relu()


class RectifiedLater(setfold.DeepSets):
    def absorb(self, elements, mask, prepared):
        return super().absorb(elements.relu(), mask, prepared)


class RectifiedPool(setfold.Pool):
    def absorb(self, elements, mask, prepared):
        return super().absorb(elements.relu(), mask, prepared)


def rectified_instance(*arguments):
    model = setfold.DeepSets(*arguments)
    original = model.featurize
    model.featurize = lambda *given: original(*given).relu()
    return model


def rectified_encoder(features, dim_features, aggregate):
    model = setfold.DeepSets(features, dim_features, aggregate)
    model.encoder = RectifiedPool(dim_features, aggregate)
    return model


@pytest.mark.parametrize(
    "build", [Rectified, RectifiedLater, rectified_instance, rectified_encoder]
)
def test_whoever_changes_the_features_gets_them(build):
    model, elements = build(hidden_layers(), 4, "sum"), torch.randn(1, 7, 3)
    assert_close(model(elements), model.features(elements).relu().sum(1))
    state = model.update(model.initial_state(), elements)
    assert_close(model.readout(state), model.features(elements).relu().sum(1))


@pytest.mark.parametrize("features", [None, nn.Sequential(), nn.Identity()])
def test_there_need_not_be_a_layer(features):
    elements = torch.randn(1, 7, 3)
    assert_close(setfold.DeepSets(features, 3)(elements), elements.mean(1))


def test_a_last_linear_layer_may_be_lazy_or_too_wide():
    model, elements = setfold.DeepSets(nn.LazyLinear(4), 4), torch.randn(1, 7, 3)
    assert_close(model(elements), model.features(elements).mean(1))
    assert_close(model(elements), model.features(elements).mean(1))
    with pytest.raises(setfold.InputError, match=r"the features must return \(3,\)"):
        setfold.DeepSets(hidden_layers(), 3)(elements)
    with pytest.raises(setfold.InputError, match=r"the features must return \(4,\)"):
        setfold.DeepSets(hidden_layers(), 4)(torch.randn(1, 7, 2, 3))


def test_a_pool_has_no_mass_and_no_slots():
    with pytest.raises(setfold.InputError, match="aggregate must be one of sum, mean, max, min"):
        setfold.Pool(3, "weighted_mean")
    with pytest.raises(setfold.InputError, match="has no slots"):
        setfold.Pool(3).initial_state(1, num_slots=4)
    assert setfold.Pool(3).initial_state(1).slots is None


def test_elements_of_the_models_dtype_are_wanted():
    with pytest.raises(setfold.InputError, match=r"float64.*float32"):
        setfold.Pool(3)(torch.randn(1, 5, 3, dtype=torch.float64))
    assert (
        setfold.Pool(3).double()(torch.randn(1, 5, 3, dtype=torch.float64)).dtype == torch.float64
    )
