"""Every law, on every exported encoder that folds, in situations that hypothesis chooses."""

from __future__ import annotations

import contextlib
import copy
import inspect
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import setfold
from setfold.core import absorb as absorbing
from setfold.kernels import extrema, ragged, softmax, sums, tiles
from setfold.laws.law import difference
from setfold.laws.laws import LAWS
from tests.strategies import MODELS, RESTRICTED, SCALES, cases, models

EXPORTED = [
    kind
    for name in setfold.__all__
    if inspect.isclass(kind := getattr(setfold, name))
    and issubclass(kind, setfold.StreamingSetEncoder | setfold.MultiPassSetEncoder)
    and not inspect.isabstract(kind)
]
CHEAP = [law for law in LAWS if not law.once]
REMOVAL, NOT_FINITE = "removal", "NaN and infinity"
TIES_CHOOSE = "equal gradients"  # a maximum that two elements share has no single gradient
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}

# ---- which laws apply to which encoders --------------------------------------------------------

SEVERAL_PASSES = (
    setfold.EquivariantDeepSets,
    setfold.LayeredSetEncoder,
    setfold.SetTransformer,
    setfold.SlotAttention,
)
NO_STATE, NO_SLOTS, NO_REMOVAL = "has no initial_state", "no slot axis", "cannot remove"
# By law, the encoders to which it never applies, and a part of the reason that the law gives.
EXCLUDED = {
    law: dict.fromkeys(SEVERAL_PASSES, NO_STATE)
    for law in (
        "identity",
        "associativity",
        "commutativity",
        "forward",
        "slot equivariance",
        REMOVAL,
        "inputs unchanged",
        "readout repeatable",
        "update after merge",
        "save and load",
        "weights change later",
        NOT_FINITE,
    )
}
EXCLUDED["slot equivariance"] |= dict.fromkeys(
    (
        setfold.AttentionPool,
        setfold.Concat,
        setfold.ConstantMemoryEncoder,
        setfold.Covariance,
        setfold.DeepSets,
        setfold.GatedAttentionPool,
        setfold.Moments,
        setfold.PMA,
        setfold.PlacedSlotEncoder,
        setfold.Pool,
        setfold.SeedAttention,
        setfold.SummaryStatistics,
    ),
    NO_SLOTS,
)
EXCLUDED[REMOVAL] |= dict.fromkeys(
    (
        setfold.AttentionPool,
        setfold.ConstantMemoryEncoder,
        setfold.Covariance,
        setfold.GatedAttentionPool,
        setfold.Moments,
        setfold.PMA,
        setfold.SeedAttention,
        setfold.SummaryStatistics,
    ),
    NO_REMOVAL,
)


def excluded(kind, law):
    return EXCLUDED.get(law.name, {}).get(kind)


ALL_PAIRS = [(kind, law) for kind in EXPORTED for law in CHEAP]
LEFT_OUT = [pair for pair in ALL_PAIRS if excluded(*pair)]


def test_every_exported_encoder_is_held_to_the_laws():
    assert set(EXPORTED) == set(MODELS)


def test_only_existing_laws_and_encoders_are_excluded_or_restricted():
    names = {law.name for law in CHEAP}
    for table in (EXCLUDED, RESTRICTED):
        assert table.keys() <= names
        assert all(set(kinds) <= set(EXPORTED) for kinds in table.values())
    assert all(not excluded(kind, law) for law in CHEAP for kind in RESTRICTED.get(law.name, ()))
    assert len(LEFT_OUT) == sum(map(len, EXCLUDED.values()))


@pytest.mark.parametrize(
    ("kind", "law"), LEFT_OUT, ids=[f"{kind.__name__}-{law.name}" for kind, law in LEFT_OUT]
)
@settings(max_examples=5)
@given(data=st.data())
def test_an_excluded_law_applies_to_no_configuration(kind, law, data):
    reason = law.obstacle(data.draw(MODELS[kind]))
    assert reason is not None, "the law applies: remove the pair from EXCLUDED"
    assert excluded(kind, law) in reason


# ---- rounding ----------------------------------------------------------------------------------

# Some draws are ill-conditioned: the numbers that are added up cancel, such as those of SetNorm,
# whose sum over the set is zero, or a gradient is the difference of two that are a thousand times
# as large. Then two correct ways to compute it differ by more than the tolerance, which is
# relative to the result. How much rounding matters is measured on what the law EXPECTS (the whole
# set, in one go), in float32 against float64; what the law finds has no influence on it, except in
# a removal, where what was removed may be larger than what is left. A fold may differ by SAFETY
# times as much, at the rounding unit of its dtype, and no more than MOST. An example whose
# expectation is nothing but rounding, such as the variance of equal elements, is drawn again.
SAFETY = 8
MOST = {torch.float64: 1e-8, torch.float32: 0.1}
VARIATIONS = 8  # of the elements, in the last bit: one rounding may be exact by chance


def amplification(model, case, law):
    """By how much rounding errors grow in what a law expects: 1 is one unit in the last place."""
    single, double = copy.deepcopy(model).eval().float(), copy.deepcopy(model).eval().float()
    double = double.double()
    unit, worst = torch.finfo(torch.float32).eps, 0.0
    noise = torch.Generator().manual_seed(case.seed)
    for _ in range(VARIATIONS):
        factor = 1 + unit * torch.randn(case.elements.shape, generator=noise)
        elements = case.elements.float() * factor
        rounded = law.pairs(single, replace(case, elements=elements))
        exact = law.pairs(double, replace(case, elements=elements.double()))
        for (found, expected), (exact_found, exact_expected) in zip(rounded, exact, strict=True):
            worst = max(worst, difference(expected, exact_expected))
            if law.name == REMOVAL:
                worst = max(worst, difference(found, exact_found))
    return worst / unit


def assert_law(law, model, case):
    """A law holds, up to rounding; in every example it applies and there is something to compare."""
    assert law.obstacle(model) is None, f"{law.name} does not apply: add the pair to EXCLUDED"
    errors = [difference(*pair) for pair in law.pairs(model, case)]
    assert errors, law.name
    error, dtype = max(errors), case.elements.dtype
    allowed = law.slack * TOLERANCES[dtype]
    if error > allowed:
        amplified = amplification(model, case, law)
        assume(amplified * torch.finfo(torch.float32).eps < 1)
        allowed += min(SAFETY * amplified * torch.finfo(dtype).eps, MOST[dtype])
    assert error <= allowed, law.name


# ---- the laws ----------------------------------------------------------------------------------


class Situations(NamedTuple):
    """The models and cases to draw for a law; a law leaves both as they were."""

    models: st.SearchStrategy
    ties: bool
    shown: bool
    scales: tuple[float, ...]

    def draw(self, data, dtype):
        model = data.draw(self.models).to(dtype)
        options = {"ties": self.ties, "shown": self.shown, "scales": self.scales}
        return model, data.draw(cases(dtype, **options))


def situations(kind, law):
    # an encoder of several passes is asked only for masks that show something, and one element of
    # a set is made NaN
    shown = law.name == NOT_FINITE or (law.name == "mask" and kind in SEVERAL_PASSES)
    # with large elements, weights differ by so much that what is removed leaves only rounding
    scales = (0.1, 1.0) if law.name == REMOVAL else SCALES
    return Situations(models(kind, law), law.name != TIES_CHOOSE, shown, scales)


def groups():
    """The laws that hold for an encoder, together if they hold in the same situations."""
    found = {}
    for kind, law in ALL_PAIRS:
        if not excluded(kind, law):
            found.setdefault((kind, situations(kind, law)), []).append(law)
    return [(kind, situation, laws) for (kind, situation), laws in found.items()]


def name_of(kind, laws):
    more = f" and {len(laws) - 1} more" if len(laws) > 1 else ""
    return f"{kind.__name__}-{laws[0].name}{more}"


# Drawing a model and a case takes as long as testing a law on them, so a draw serves many laws.
on_groups = pytest.mark.parametrize(
    ("kind", "situation", "laws"),
    groups(),
    ids=[name_of(kind, laws) for kind, _, laws in groups()],
)


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
        yield


@on_groups
@settings(max_examples=20)
@given(data=st.data(), training=st.booleans(), tracked=st.booleans(), tiny=st.booleans())
def test_laws_hold_in_float64(kind, situation, laws, data, training, tracked, tiny):
    # whole sets and passes share no state, so slots that are drawn anew would differ
    training = training and issubclass(kind, setfold.StreamingSetEncoder)
    model, case = situation.draw(data, torch.float64)
    with torch.set_grad_enabled(tracked), sizes(tiny):
        for law in laws:
            assert_law(law, model.train(training), case)


@on_groups
@settings(max_examples=5)
@given(data=st.data())
def test_laws_hold_in_float32(kind, situation, laws, data):
    model, case = situation.draw(data, torch.float32)
    with torch.no_grad():
        for law in laws:
            assert_law(law, model.eval(), case)
