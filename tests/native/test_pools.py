"""Totals, maxima and minima of ragged rows, against plain numpy in float64, and who uses them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import setfold
from setfold.kernels.ragged import reduce_groups
from setfold.native import dispatch, library

pytestmark = pytest.mark.usefixtures("isa")
NAMES = ("sum", "max", "min")
REDUCED = {"sum": np.sum, "max": np.max, "min": np.min}
EMPTY = {"sum": 0.0, "max": -np.inf, "min": np.inf}
SETS = 9


def make_rows(rows, width, order="shuffled"):
    draw = torch.Generator().manual_seed(rows + width)
    index = torch.randint(SETS, (rows,), generator=draw)
    index[index == 4] = 5  # an empty set in the middle
    if order == "sorted":
        index = index.sort().values
    return torch.randn(rows, width, generator=draw), index


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("width", [1, 3, 4, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_every_set_is_reduced(rows, width, order):
    elements, index = make_rows(rows, width, order)
    found = reduce_groups(elements, index, SETS, NAMES)
    for name in NAMES:
        assert found[name].shape == (SETS, width)
        for number in range(SETS):
            own = elements[index == number].double().numpy()
            expected = REDUCED[name](own, 0) if len(own) else np.full(width, EMPTY[name])
            np.testing.assert_allclose(
                found[name][number].numpy(), expected, rtol=1e-14, atol=1e-14
            )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 16, 20])
def test_bad_numbers_stay(bad, place):
    elements, index = make_rows(50, 21)
    elements[7, place] = bad
    found = reduce_groups(elements, index, SETS, NAMES)
    for name in NAMES:
        shown = elements[index == index[7], place].double().numpy()
        np.testing.assert_equal(found[name][index[7], place].item(), REDUCED[name](shown))
        assert np.isnan(found[name].numpy()).sum() == np.isnan(bad)


def test_totals_are_added_in_double():
    elements = torch.full((100_000, 16), 0.1)
    found = dispatch.ragged_totals(elements, torch.zeros(100_000, dtype=torch.long), 1)
    assert_close(found[0], elements[0].double() * 100_000, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [SETS, -1, 1 << 62, -(1 << 63)])
def test_indices_out_of_range(bad):
    elements, index = make_rows(6, 3)
    index[3] = bad
    assert reduce_groups(elements, index, SETS, ["sum"]) is None
    assert reduce_groups(elements, index, SETS, ["max"]) is None


def test_what_the_kernels_cannot_read():
    elements, index = make_rows(6, 3)
    turned = elements.T.contiguous().T
    for rows, sets in [(elements.double(), index), (elements, index[:4]), (turned, index)]:
        assert reduce_groups(rows, sets, SETS, NAMES) is None
    assert reduce_groups(elements, index.float(), SETS, NAMES) is None
    expected = reduce_groups(elements, index, SETS, NAMES)
    for name, found in reduce_groups(elements, index.int(), SETS, NAMES).items():
        assert torch.equal(found, expected[name])


def encoders():
    layers = [nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 7)]
    whole = setfold.Pool(5, ["mean", "max", "min", "sum"])
    deep = setfold.DeepSets(nn.Sequential(*layers), 7, head=nn.Linear(7, 3))
    slots = setfold.SlotSetEncoder(5, 3, 8, 6, slots="learned")
    return {
        "pool": whole,
        "features": setfold.DeepSets(nn.Sequential(*layers[:2]), 4, ["sum", "max"]),
        "a last layer after the sum": deep,
        "side by side": setfold.Concat([whole, slots]),
    }


@pytest.mark.parametrize("name", encoders())
def test_encoders_find_what_they_find_without_kernels(name, monkeypatch):
    torch.manual_seed(0)
    encoder = encoders()[name].eval()
    elements, index = make_rows(300, 5)
    used = []
    monkeypatch.setattr(dispatch, "ragged_totals", recorded(dispatch.ragged_totals, used))
    with torch.no_grad():
        found = encoder(elements, index=index, batch_size=SETS)
        state = encoder.update(encoder.initial_state(SETS), elements[:100], index=index[:100])
        state = encoder.update(state, elements[100:], index=index[100:])
        assert used
        with library.using(None):
            expected = encoder(elements, index=index, batch_size=SETS)
    assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_close(encoder.readout(state), expected, rtol=1e-5, atol=1e-5)


def test_parts_that_cannot_take_all_sets_at_once():
    torch.manual_seed(0)
    encoder = setfold.Concat([setfold.Pool(5, "max"), setfold.AttentionPool(5, 2, 4)]).eval()
    elements, index = make_rows(300, 5)
    with torch.no_grad():
        found = encoder(elements, index=index, batch_size=SETS)
        for number in range(SETS):
            alone = encoder(elements[index == number].unsqueeze(0))
            assert_close(found[number], alone[0], rtol=1e-5, atol=1e-5)


def recorded(function, calls):
    def call(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return call
