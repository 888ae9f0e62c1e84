"""An encoder is used, changed, and used again: what it gives then, and states from before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import setfold
from tests.small import draw, moved


class Scale(nn.Module):
    """A module with a parameter, a buffer and a plain setting, used in `prepare` as well."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))
        self.exponent = 1.0

    def forward(self, rows):
        return self.linear(rows).tanh().abs().pow(self.exponent) + self.shift


def built(recipe):
    """A model whose weights are not representable in less than float64."""
    torch.manual_seed(0)
    return moved(recipe())


def slot_set(dim_in=3, **options):
    return setfold.SlotSetEncoder(dim_in, 4, 6, dim_in, **options)  # to_key is square


USED = {
    "slots": lambda: slot_set(aggregate=["mean", "max"]),
    "few outputs": lambda: setfold.SlotSetEncoder(3, 4, 6, 1),
    "learned, cosine": lambda: slot_set(slots="learned", similarity="cosine"),
    "attention": lambda: setfold.AttentionPool(3, 2, 4, 2),
    "gated": lambda: setfold.GatedAttentionPool(3, 4, 2),
    "seeds": lambda: setfold.PMA(3, 2, 1),
    "features": lambda: setfold.Composition(slot_set(), Scale()),
    "hierarchy": lambda: setfold.HierarchicalSlotSetEncoder([slot_set(), slot_set()]),
    "concat": lambda: setfold.Concat([slot_set(), setfold.AttentionPool(3, 2, 4)]),
    "concat of concat": lambda: setfold.Concat({"inner": setfold.Concat([slot_set()])}),
}


def like(encoder, elements):
    return elements.to(next(encoder.parameters()).dtype)


@torch.no_grad()
def everything(encoder):
    """What an encoder makes of a few sets, by every way that may use something that was kept."""
    chunk, more = like(encoder, draw(2, 5, 3)), like(encoder, draw(2, 600, 3, seed=1))
    state = encoder.update(encoder.initial_state(2), chunk)
    merged = encoder.update(state, more).merge(state)
    index = torch.tensor([0, 1, 1, 0, 1])
    ragged = encoder.update(encoder.initial_state(2), chunk[0], index=index)
    return [
        encoder(chunk[:1]),  # one small set
        encoder(chunk),
        encoder(more),
        encoder(chunk, torch.tensor([[True, False, True, True, False]] * 2)),
        encoder(chunk[0], index=index, batch_size=2),
        encoder.readout(state),
        encoder.readout(merged),
        encoder.readout(ragged),
        setfold.fold(encoder, [chunk, more]),
    ]


def assert_stale(encoder, state):
    """A state from before a change raises wherever it meets the encoder or a new state."""
    sets = len(state)
    chunk = like(encoder, draw(sets, 5, 3))
    new = encoder.initial_state(sets)
    for use in (
        lambda: encoder.update(state, chunk),
        lambda: encoder.remove(state, chunk),
        lambda: encoder.readout(state),
        lambda: state.merge(new),
        lambda: new.merge(state),
        lambda: setfold.SetState.stack([state, new]),
    ):
        with pytest.raises(setfold.StateMismatchError):
            use()


def assert_nothing_stale(encoder, change, *, states_stay=False, unused=None):
    """Use an encoder, change it, and compare it with one that was changed before its first use."""
    unused = copy.deepcopy(encoder) if unused is None else unused
    before = everything(encoder)
    with torch.no_grad():
        state = encoder.update(encoder.initial_state(2), like(encoder, draw(2, 5, 3)))
    tracked = encoder.update(encoder.initial_state(2), like(encoder, draw(2, 5, 3)))
    change(encoder)
    change(unused)
    if states_stay is None:  # they may be valid or not
        pass
    elif states_stay:
        assert (
            int(encoder.update(state, like(encoder, draw(2, 5, 3))).merge(tracked).count[0]) == 15
        )
    else:
        assert_stale(encoder, state)
        assert_stale(encoder, tracked)
    for again in (everything(encoder), everything(encoder)):
        for found, expected in zip(again, everything(unused), strict=True):
            assert torch.equal(found, expected)
    return before, again
