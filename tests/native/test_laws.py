"""The laws of a fold in float32, with the kernels of each instruction set and without any."""

from __future__ import annotations

import pytest
import torch

import setfold
from setfold.kernels import softmax, sums
from setfold.laws.check import cases
from setfold.laws.laws import LAWS
from setfold.native import library
from tests.laws.test_laws import assert_law

SLOW = ("save and load",)  # files, not kernels


def slots(aggregate, attention="sigmoid"):
    return setfold.SlotSetEncoder(4, 5, 6, 7, aggregate=aggregate, attention=attention)


def placed():
    grid = setfold.Grid([-2.0, -2.0], [2.0, 2.0], [6, 6])
    return setfold.PlacedSlotEncoder(4, grid, aggregate=["density", "variance", "max", "min"])


MODELS = {
    "sums": lambda: slots(["mean", "weighted_mean"]),
    "extrema": lambda: slots(["max", "min"], "softmax"),
    "attention": lambda: setfold.AttentionPool(4, 3, 6),
    "seeds": lambda: setfold.SeedAttention(4, num_seeds=3, num_heads=2),
    "hierarchy": lambda: setfold.HierarchicalSlotSetEncoder(
        [slots("sum"), setfold.SlotSetEncoder(7, 2, 6, 6)]
    ),
    "placed": placed,
}


@pytest.mark.parametrize("isa", [*library.available(), None])
@pytest.mark.parametrize("name", MODELS)
def test_laws_hold(monkeypatch, name, isa):
    monkeypatch.setattr(sums, "PLAIN_ROWS", 0)
    monkeypatch.setattr(softmax, "PLAIN_ROWS", 0)
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    tested = 0
    with library.using(isa), torch.no_grad():
        for law in LAWS:
            if law.once or law.name in SLOW or law.obstacle(model) is not None:
                continue
            for case in [*cases(4, torch.float32, 0)][-1:]:
                assert_law(law, model, case)
                tested += 1
    assert tested > 10
