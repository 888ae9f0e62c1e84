"""Every law, on every exported streaming encoder, in situations that hypothesis chooses."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import setfold
from setfold.checks.laws import LAWS
from tests.strategies import MODELS, cases

EXPORTED = [
    kind
    for name in setfold.__all__
    if inspect.isclass(kind := getattr(setfold, name))
    and issubclass(kind, setfold.StreamingSetEncoder)
    and not inspect.isabstract(kind)
]
CHEAP = [law for law in LAWS if not law.once]
TIES_CHOOSE = "equal gradients"  # a maximum that two elements share has no single gradient
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


def test_every_exported_encoder_is_held_to_the_laws():
    assert set(EXPORTED) == set(MODELS)


@pytest.mark.parametrize("law", CHEAP, ids=lambda law: law.name)
@pytest.mark.parametrize("kind", EXPORTED, ids=lambda kind: kind.__name__)
@settings(max_examples=20)
@given(data=st.data(), training=st.booleans(), tracked=st.booleans())
def test_law_holds_in_float64(kind, law, data, training, tracked):
    model = data.draw(MODELS[kind]).double().train(training)
    case = data.draw(cases(ties=law.name != TIES_CHOOSE))
    if law.obstacle(model) is None:
        with torch.set_grad_enabled(tracked):
            assert law.error(model, case) <= TOLERANCES[torch.float64]


@pytest.mark.parametrize("law", CHEAP, ids=lambda law: law.name)
@pytest.mark.parametrize("kind", EXPORTED, ids=lambda kind: kind.__name__)
@settings(max_examples=5)
@given(data=st.data())
def test_law_holds_in_float32(kind, law, data):
    model = data.draw(MODELS[kind]).eval()
    case = data.draw(cases(torch.float32, ties=law.name != TIES_CHOOSE))
    if law.obstacle(model) is None:
        with torch.no_grad():
            assert law.error(model, case) <= law.slack * TOLERANCES[torch.float32]
