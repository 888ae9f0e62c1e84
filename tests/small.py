"""A small encoder, small inputs, and what it means for two states to be the same."""

from __future__ import annotations

import torch
from torch.testing import assert_close

import setfold

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
AGGREGATES = ("sum", "mean", "weighted_mean", "max", "min", ["mean", "max"])


def make(seed=0, **options):
    """A Slot Set Encoder (3 -> 4 slots of 6 -> 5) in float64 and evaluation mode."""
    torch.manual_seed(seed)
    return setfold.SlotSetEncoder(3, 4, 6, 5, **options).double().eval()


class Contextual(setfold.SlotSetEncoder):
    """One that could look at a context."""

    def featurize(self, elements, mask, context):
        return elements


def contextual():
    return Contextual(3, 4, 6, 5).double().eval()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_same_state(found, expected):
    assert found.aggregate == expected.aggregate
    assert found.count.tolist() == expected.count.tolist()
    assert found.statistics.keys() == expected.statistics.keys()
    for name, parts in expected.statistics.items():
        assert_close(found.statistics[name], parts, **TIGHT)
    for slots, wanted in zip(found.frame, expected.frame, strict=True):
        assert torch.equal(slots, wanted)
