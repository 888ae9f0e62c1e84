"""Every law, on every exported encoder that folds, in situations that hypothesis chooses."""

from __future__ import annotations

import contextlib
import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import setfold
from setfold.core import absorb as absorbing
from setfold.core import encoder
from setfold.kernels import extrema, ragged, softmax, sums, tiles
from setfold.laws.laws import LAWS
from tests.strategies import MODELS, cases

EXPORTED = [
    kind
    for name in setfold.__all__
    if inspect.isclass(kind := getattr(setfold, name))
    and issubclass(kind, setfold.StreamingSetEncoder | setfold.MultiPassSetEncoder)
    and not inspect.isabstract(kind)
]
CHEAP = [law for law in LAWS if not law.once]
TIES_CHOOSE = "equal gradients"  # a maximum that two elements share has no single gradient
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


@contextlib.contextmanager
def sizes(tiny):
    """Limits so low that small cases take the ways of large ones."""
    with pytest.MonkeyPatch.context() as patch:
        if tiny:
            patch.setattr(tiles, "MIN_ROWS", 1)
            patch.setattr(tiles, "TILE_BYTES", 64)
            patch.setattr(sums, "PLAIN_ROWS", 0)
            patch.setattr(softmax, "PLAIN_ROWS", 0)
            patch.setattr(softmax, "FEW_ROWS", 1)
            patch.setattr(extrema, "TILE_BYTES", 64)
            patch.setattr(ragged, "MAX_EXACT_LENGTHS", 1)
            patch.setattr(ragged, "LADDER", 2)
            patch.setattr(absorbing, "FEATURE_ROWS", 3)
            patch.setattr(encoder, "PENDING_CHUNKS", 2)
        yield


def test_every_exported_encoder_is_held_to_the_laws():
    assert set(EXPORTED) == set(MODELS)


@pytest.mark.parametrize("law", CHEAP, ids=lambda law: law.name)
@pytest.mark.parametrize("kind", EXPORTED, ids=lambda kind: kind.__name__)
@settings(max_examples=20)
@given(data=st.data(), training=st.booleans(), tracked=st.booleans(), tiny=st.booleans())
def test_law_holds_in_float64(kind, law, data, training, tracked, tiny):
    # whole sets and passes share no state, so slots that are drawn anew would differ
    training = training and issubclass(kind, setfold.StreamingSetEncoder)
    model = data.draw(MODELS[kind]).double().train(training)
    case = data.draw(cases(ties=law.name != TIES_CHOOSE))
    if law.obstacle(model) is None:
        with torch.set_grad_enabled(tracked), sizes(tiny):
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
