"""For each law an encoder that breaks it, so that no check passes because it cannot fail."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import setfold
from setfold.core.state import SetState
from setfold.core.statistic import Field, Statistic
from setfold.errors import SetfoldError
from setfold.laws.laws import LAWS
from tests.laws.broken import (
    BROKEN,
    AbsorbsLater,
    RedrawsSlots,
    ReplacesNaN,
    Sabotaged,
    WaitingState,
    encoder,
    remade,
)


def failing(model):
    """The names of the laws that a model breaks."""
    report = setfold.check(model, dim_in=3, processes=False)
    return {finding.law for finding in report.findings if finding.verdict == "fails"}


def test_absorbing_later_breaks_no_other_law_of_values():
    assert failing(AbsorbsLater()) - {"equal gradients"} == {"weights change later"}


class AbsorbsWhenSaved(AbsorbsLater):
    """Absorbs at once for everything except a file."""

    def update(self, state, elements, **kwargs):
        later = super().update(state, elements, **kwargs)
        if not isinstance(later, WaitingState):
            return later
        now = remade(SavedLaterState, later.absorbed())
        now.later = later
        return now


class SavedLaterState(SetState):
    def save(self, path):
        self.later.save(path)

    @staticmethod
    def load(path):
        return SetState.load(path)


class MergedLaterState(SavedLaterState):
    def save(self, path):
        SetState.save(self, path)

    def merge(self, other):
        return self.later.merge(other)


class AbsorbsWhenMerged(AbsorbsLater):
    """Absorbs at once for everything except a merge."""

    def update(self, state, elements, **kwargs):
        later = super().update(state, elements, **kwargs)
        if not later.waiting:
            return later
        now = remade(MergedLaterState, later.absorbed())
        now.later = later
        return now


@pytest.mark.parametrize("kind", [AbsorbsWhenSaved, AbsorbsWhenMerged])
def test_absorbing_when_saved_or_merged_breaks_the_law_too(kind):
    assert "weights change later" in failing(kind())


def test_replacing_nan_breaks_no_other_law():
    assert failing(ReplacesNaN()) == {"NaN and infinity"}


class ReplacesOneInfinity(Sabotaged):
    """Hides the number that a maximum would hide, in one column."""

    def update(self, state, elements, **kwargs):
        elements = elements.clone()
        elements[..., 1] = elements[..., 1].masked_fill(elements[..., 1] == -torch.inf, 0)
        return super().update(state, elements, **kwargs)


class RaisesTooLate(Sabotaged):
    """Raises for NaN after it has written into the state."""

    def update(self, state, elements, **kwargs):
        if not bool(elements.isfinite().all()):
            state.statistics["sum"][0].mul_(2)
        return super().update(state, elements, **kwargs)


@pytest.mark.parametrize("kind", [ReplacesOneInfinity, RaisesTooLate])
def test_hidden_numbers_and_changed_states_are_found(kind):
    assert "NaN and infinity" in failing(kind())


def test_there_is_a_broken_encoder_for_every_law():
    assert set(BROKEN) == {law.name for law in LAWS}


@pytest.mark.parametrize("name", BROKEN)
def test_the_check_finds_what_is_broken(name):
    report = setfold.check(BROKEN[name](), dim_in=3, processes=name == "two processes")
    finding = report[name]
    assert finding.verdict == "fails", report
    assert finding.example
    assert not report.passed
    assert name in report.verdict


def test_an_honest_encoder_passes_where_the_broken_ones_fail():
    report = setfold.check(encoder(), tolerances={torch.float64: 1e-12})
    assert report.passed, report
    assert all(f.verdict == "holds" for f in report.findings)


def test_the_smallest_example_is_reported():
    report = setfold.check(RedrawsSlots(), processes=False)
    assert report["any partition"].example.startswith("1 set of 1 x 3")


def test_batch_norm_in_training_mode_is_named_as_the_reason():
    features = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = setfold.DeepSets(features, dim_features=4)
    report = setfold.check(model, dim_in=3, processes=False)
    assert "BatchNorm in training mode" in report["any partition"].reason
    assert setfold.check(model.eval(), dim_in=3, processes=False).passed


def test_dropout_in_training_mode_is_named_as_the_reason():
    model = setfold.DeepSets(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)), dim_features=4)
    report = setfold.check(model, dim_in=3, processes=False)
    assert "dropout" in report["any partition"].reason


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, elements):
        return self.attention(elements, elements, elements, need_weights=False)[0].mean(1)


def test_self_attention_is_named_as_the_reason():
    report = setfold.check(SelfAttention().eval(), dim_in=4)
    assert report["permutation"].verdict == "holds"
    assert "self-attention" in report["mini-batch consistency"].reason
    assert not report.passed


class Centred(nn.Module):
    def forward(self, rows):
        return rows - rows.mean(0)


def test_features_that_look_at_other_elements_are_named_as_the_reason():
    model = setfold.Composition(encoder(), features=Centred())
    report = setfold.check(model, dim_in=3, processes=False)
    assert "depend on other elements" in report["any partition"].reason


class Mean(nn.Module):
    def forward(self, elements):
        return elements.mean(1)


def test_a_model_without_verbs_may_still_be_consistent():
    report = setfold.check(Mean(), dim_in=3)
    assert report["mini-batch consistency"].verdict == "holds"
    assert report.passed
    assert not report.folds


def test_an_exception_is_a_finding_and_not_a_crash():
    class Raises(Sabotaged):
        def update(self, state, elements, **kwargs):
            raise SetfoldError("on strike")

    report = setfold.check(Raises(), processes=False)
    assert "on strike" in report["any partition"].reason
    assert report["any partition"].verdict == "fails"


def test_a_report_prints_as_a_table_and_as_json():
    report = setfold.check(encoder(aggregate="max"), processes=False)
    assert "does not apply" in str(report)
    assert "any partition" in str(report)
    assert report.as_dict()["passed"] is True


def test_the_model_itself_is_left_as_it_was():
    model = encoder().train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    setfold.check(model, processes=False)
    assert model.training
    assert next(model.parameters()).dtype == torch.float32
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


def test_the_width_must_be_known():
    with pytest.raises(setfold.InputError, match="dim_in"):
        setfold.check(nn.Linear(3, 4))


class LooksAtNeighbours(nn.Module):
    def forward(self, elements, summary):
        return elements - elements.mean(1, keepdim=True)


def test_a_look_at_other_elements_is_named_as_the_reason():
    layer = setfold.Layer(setfold.Pool(3), LooksAtNeighbours())
    model = setfold.LayeredSetEncoder([layer], setfold.Pool(3, "max"))
    report = setfold.check(model, processes=False)
    assert report["any partition"].verdict == "fails"
    assert "other elements of the chunk" in report["any partition"].reason
    assert not report.passed


def test_random_slots_in_training_mode_are_named_as_the_reason():
    report = setfold.check(setfold.SlotAttention(3, 4, 8).train(), processes=False)
    assert "draws new random slots" in report["permutation"].reason


class Unfinished(setfold.WholeSetEncoder):
    dim_in = 3

    def encode(self, elements, mask):
        if mask is not None:
            raise NotImplementedError("no masks yet")
        return elements.amax(1) - elements.mean(1)


def test_what_a_whole_encoder_raises_is_reported():
    report = setfold.check(Unfinished())
    assert "no masks yet" in report["mask"].reason
    assert report["permutation"].verdict == "holds"
    assert report["mini-batch consistency"].verdict == "fails"


def test_a_report_of_a_model_that_diverges_is_json():
    class Diverges(nn.Module):
        def forward(self, elements):
            return elements.sum(1) / 0

    report = setfold.check(Diverges(), dim_in=3)
    json.dumps(report.as_dict(), allow_nan=False)


# ---- what only some elements show ----------------------------------------------------------------


class Compared(Statistic):
    """A maximum whose gradient goes to every chunk that reaches it, so that ties count twice."""

    empty = (-torch.inf,)

    def join(self, left, right):
        return (torch.maximum(left[0], right[0]),)

    def pull(self, grads, joined, piece):
        return (torch.where(piece[0] == joined[0], grads[0], 0),)


class Low(Compared):
    """A maximum that begins with what is small for elements of ordinary size."""

    empty = (0.02,)
    picks = True


class Largest(setfold.StreamingSetEncoder):
    """The largest size of each feature, by one of these statistics."""

    def __init__(self, statistic):
        super().__init__()
        self.dim_in = 3
        self.statistic = statistic
        self.register_buffer("like", torch.empty(0))

    def fields(self, frame):
        return {"largest": Field(self.statistic, (3,))}

    def absorb(self, elements, mask, prepared):
        hidden = elements.new_zeros(elements.shape[:2], dtype=torch.bool) if mask is None else ~mask
        shown = elements.abs().masked_fill(hidden.unsqueeze(-1), -torch.inf)
        return {"largest": (shown.max(1).values,)}

    def finish(self, statistics, count, prepared):
        (value,) = statistics["largest"]
        if isinstance(count, torch.Tensor):
            value = value.masked_fill((count == 0).unsqueeze(1), 0)
        return value.to(self.like.dtype)


def test_a_gradient_that_counts_ties_twice_is_found():
    report = setfold.check(Largest(Compared()), processes=False)
    assert report.broken == ("equal gradients",)


def test_a_statistic_that_begins_with_a_small_number_is_found():
    assert "forward" in setfold.check(Largest(Low()), processes=False).broken
