"""For each law an encoder that breaks it, so that no check passes because it cannot fail."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import setfold
from setfold.core.state import SetState
from setfold.core.statistic import Field, Statistic, join
from setfold.errors import SetfoldError
from setfold.laws.laws import LAWS

BROKEN = {}


def breaks(law):
    """Name the law that a model must be found to break."""

    def register(make):
        BROKEN[law] = make
        return make

    return register


def encoder(**changes):
    settings = {"dim_in": 3, "num_slots": 4, "dim_slot": 5, "dim_out": 6} | changes
    torch.manual_seed(0)
    return setfold.SlotSetEncoder(**settings).eval()


class Sabotaged(setfold.SlotSetEncoder):
    """Does something with each state it hands out."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(dim_in=3, num_slots=4, dim_slot=5, dim_out=6)
        self.eval()


def with_sums(state, change):
    (sums,) = state.statistics["sum"]
    return state.with_statistics({"sum": (change(sums),)}, state.count)


@breaks("identity")
class BeginsWithSomething(Sabotaged):
    def initial_state(self, *args, **kwargs):
        return with_sums(super().initial_state(*args, **kwargs), lambda sums: sums + 1)


def remade(kind, state, frame=None):
    """The same state as one of another class, or with other slots."""
    return kind(
        state.fields,
        state.statistics,
        state.count,
        frame=state.frame if frame is None else frame,
        context=state.context,
        weights=state.weights,
    )


class AveragingState(SetState):
    """Merges by averaging totals: a mean of chunk sums is no mean."""

    def merge(self, other):
        return remade(AveragingState, with_sums(super().merge(other), lambda sums: sums / 2))


class OneSidedState(SetState):
    """Remembers only the left side of a merge in full."""

    def merge(self, other):
        merged, half = super().merge(other), other.statistics["sum"][0] / 2
        return remade(OneSidedState, with_sums(merged, lambda sums: sums - half))


@breaks("associativity")
class Averages(Sabotaged):
    def initial_state(self, *args, **kwargs):
        return remade(AveragingState, super().initial_state(*args, **kwargs))

    def update(self, state, elements, **kwargs):
        return remade(AveragingState, super().update(state, elements, **kwargs))


@breaks("commutativity")
class PrefersTheLeft(Sabotaged):
    def update(self, state, elements, **kwargs):
        return remade(OneSidedState, super().update(state, elements, **kwargs))


@breaks("any partition")
class RedrawsSlots(Sabotaged):
    """As published: new slots for every chunk."""

    def update(self, state, elements, **kwargs):
        fresh = remade(SetState, state, frame=(torch.randn_like(state.frame[0]),))
        seen = super().update(fresh, elements, **kwargs)
        return state.with_statistics(seen.statistics, seen.count)


@breaks("forward")
class ForwardsHalf(Sabotaged):
    def forward(self, elements, mask=None, **kwargs):
        return super().forward(elements, mask, **kwargs) / 2


@breaks("permutation")
class WeighsByPosition(Sabotaged):
    def update(self, state, elements, **kwargs):
        if elements.dim() == 3:
            elements = elements * torch.arange(1.0, elements.shape[1] + 1).to(elements)[:, None]
        return super().update(state, elements, **kwargs)


@breaks("slot equivariance")
class FavoursASlot(Sabotaged):
    def readout(self, state):
        return super().readout(state) * torch.arange(1.0, 5.0).to(state.frame[0])[:, None]


@breaks("mask")
class IgnoresTheMask(Sabotaged):
    def update(self, state, elements, *, mask=None, index=None):
        return super().update(state, elements.nan_to_num(), index=index)


@breaks("ragged")
class SortsTheIndex(Sabotaged):
    def update(self, state, elements, *, mask=None, index=None):
        index = None if index is None else index.sort().values
        return super().update(state, elements, mask=mask, index=index)


@breaks("removal")
class ForgetsHalf(Sabotaged):
    def remove(self, state, elements, **kwargs):
        return super().remove(state, elements[:, ::2], **kwargs)


@breaks("inputs unchanged")
class WritesIntoItsInput(Sabotaged):
    def update(self, state, elements, **kwargs):
        after = super().update(state, elements, **kwargs)
        elements.mul_(2)
        return after


@breaks("readout repeatable")
class ReadsOnce(Sabotaged):
    def readout(self, state):
        encoding = super().readout(state)
        state.statistics["sum"][0].mul_(0.5)
        return encoding


class FrozenState(SetState):
    """A merged state that lost its slots."""

    def merge(self, other):
        merged = super().merge(other)
        lost = tuple(torch.zeros_like(slots) for slots in merged.frame)
        return remade(SetState, merged, frame=lost)


@breaks("update after merge")
class LosesSlotsInMerge(Sabotaged):
    def update(self, state, elements, **kwargs):
        return remade(FrozenState, super().update(state, elements, **kwargs))


class ForgetfulState(SetState):
    """Writes less than it holds."""

    def save(self, path):
        with_sums(self, lambda sums: sums.float().double().round(decimals=2)).save(path)

    @staticmethod
    def load(path):
        return SetState.load(path)


@breaks("save and load")
class SavesRoughly(Sabotaged):
    def update(self, state, elements, **kwargs):
        return remade(ForgetfulState, super().update(state, elements, **kwargs))


class DiffersElsewhere(nn.Module):
    """Features that depend on the process they run in."""

    def forward(self, rows):
        import __main__

        return rows * (2 if "elsewhere" in str(getattr(__main__, "__file__", "")) else 1)


@breaks("two processes")
def differs_elsewhere():
    return setfold.Composition(encoder(), features=DiffersElsewhere()).eval()


@breaks("equal gradients")
class DetachesLaterChunks(Sabotaged):
    def update(self, state, elements, **kwargs):
        if bool((state.count > 0).any()):
            elements = elements.detach()
        return super().update(state, elements, **kwargs)


@breaks("empty set")
class EmptyIsNaN(Sabotaged):
    def readout(self, state):
        (sums,) = state.statistics["sum"]
        return sums[..., :-1] / state.count[:, None, None]


class WaitingState(SetState):
    """Keeps chunks, and absorbs them with the weights of the moment in which it is used."""

    encoder: Sabotaged
    waiting: tuple[torch.Tensor, ...] = ()

    def absorbed(self):
        state = remade(SetState, self)
        for chunk in self.waiting:
            found = self.encoder.absorb(chunk, None, self.encoder.prepare(state.frame))
            joined = join(state.fields, state.statistics, found)
            state = state.with_statistics(joined, state.count + chunk.shape[1])
        return state

    def merge(self, other):
        return remade(WaitingState, self.absorbed().merge(absorbed(other)))

    def save(self, path):
        self.absorbed().save(path)

    @staticmethod
    def load(path):
        return remade(WaitingState, SetState.load(path))


def absorbed(state):
    return state.absorbed() if isinstance(state, WaitingState) else state


@breaks("weights change later")
class AbsorbsLater(Sabotaged):
    """Puts chunks aside, as an optimization of many small updates might do."""

    def initial_state(self, *args, **kwargs):
        return remade(WaitingState, super().initial_state(*args, **kwargs))

    def update(self, state, elements, *, mask=None, index=None):
        if mask is not None or index is not None:
            state = super().update(absorbed(state), elements, mask=mask, index=index)
            return remade(WaitingState, state)
        super().update(remade(SetState, state), elements)  # for its errors
        later = remade(WaitingState, state)
        later.encoder = self
        later.waiting = (*getattr(state, "waiting", ()), elements.clone())
        return later

    def remove(self, state, elements, **kwargs):
        return super().remove(absorbed(state), elements, **kwargs)

    def readout(self, state):
        return super().readout(absorbed(state))


@breaks("NaN and infinity")
class ReplacesNaN(Sabotaged):
    def update(self, state, elements, **kwargs):
        return super().update(state, elements.nan_to_num(), **kwargs)


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


def test_what_a_whole_encoder_raises_is_told():
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
