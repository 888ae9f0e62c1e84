"""For each law an encoder that breaks it, so that no check passes because it cannot fail."""

from __future__ import annotations

import torch
from torch import nn

import setfold
from setfold.core.state import SetState
from setfold.core.statistic import join

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
