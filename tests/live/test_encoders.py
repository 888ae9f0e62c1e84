"""What a store returns equals the encodings of all rows at once, for every kind of state."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import setfold
from setfold import live
from setfold.files.tables.table import StateTable
from setfold.live.states import StateCodec, join_key
from tests.live.rows import DIM, NAMES, assert_holds, encodings, make_model, random_rows


def many_slots():
    """Slots at places, most of which no element of a set touches: states have any length."""
    grid = setfold.Grid((-3, -3), (3, 3), (40, 40))
    return setfold.PlacedSlotEncoder(DIM, grid, aggregate=["mean", "max"])


ENCODERS = {
    "mean": lambda: setfold.Pool(DIM, "mean"),
    "max": lambda: setfold.Pool(DIM, ["max", "min"]),
    "slots": make_model,
    "slots, softmax": lambda: setfold.SlotSetEncoder(
        DIM, 4, 8, 8, aggregate="weighted_mean", attention="softmax"
    ),
    "attention": lambda: setfold.AttentionPool(DIM, 2, 8),
    "features": lambda: setfold.Composition(
        setfold.Pool(8, "mean"), nn.Sequential(nn.Linear(DIM, 8), nn.Tanh())
    ),
    "several": lambda: setfold.Concat(
        [setfold.Pool(DIM, ["mean", "max"]), setfold.AttentionPool(DIM, 2, 8), many_slots()]
    ),
    "covariance": lambda: setfold.Covariance(DIM),
    "many slots": many_slots,
    "hierarchy": lambda: setfold.HierarchicalSlotSetEncoder(
        [setfold.SlotSetEncoder(DIM, 4, 8, 8), setfold.SlotSetEncoder(8, 2, 8, 8)]
    ),
}


@pytest.mark.parametrize("kind", ENCODERS)
def test_encodings_equal_those_of_all_rows(url, kind):
    torch.manual_seed(0)
    model = ENCODERS[kind]().double().eval()
    rows = [random_rows(seed, count, NAMES[:7]) for seed, count in enumerate((30, 1, 25, 3))]
    with live.create(url, model) as sets:
        for number, some in enumerate(rows):
            sets.update(some, set="user", batch=("orders", number))
        assert_holds(sets, model, pa.concat_tables(rows))
    with live.open(url) as sets:
        assert_holds(sets, model, pa.concat_tables(rows), [NAMES[3], NAMES[7], NAMES[3]])


@pytest.mark.parametrize("kind", ENCODERS)
def test_rows_of_states_and_back(kind):
    """For no sets, for one, and for several."""
    codec = StateCodec(ENCODERS[kind]().double().eval())
    for names in ([], ["a"], ["a", "b", "a"]):
        keys = pa.array([join_key(name.encode(), 0) for name in names], pa.large_binary())
        elements = torch.randn(len(names), DIM, dtype=torch.float64)
        rows = codec.to_rows(StateTable.of(codec.encoder, keys, elements))
        assert codec.to_rows(codec.to_table(rows)) == rows
        assert sum(row.count for row in rows) == len(names)


def test_a_model_that_reads_its_own_columns(url):
    columns = setfold.Columns(
        [
            setfold.NumberColumn("amount", 10.0, 2.0, missing=True),
            setfold.CategoryColumn("kind", ["a", "b"], dim=2),
            setfold.TimeColumn("at", origin=0),
        ]
    )
    features = nn.Sequential(columns, nn.Linear(columns.dim_out, 8), nn.ReLU())
    model = setfold.Composition(setfold.Pool(8, ["mean", "max"]), features).double().eval()
    generator, start = np.random.default_rng(0), datetime.datetime(2024, 1, 1)
    days = generator.integers(0, 90, 60).tolist()
    amounts = generator.normal(10, 5, 60).tolist()
    rows = pa.table(
        {
            "user": generator.choice(NAMES, 60),
            "amount": [None if number % 7 == 3 else amounts[number] for number in range(60)],
            "kind": generator.choice(["a", "b", "c"], 60),
            "at": pa.array([start + datetime.timedelta(days=day) for day in days]),
            "unused": ["x"] * 60,
        }
    )
    with live.create(url, model, bucket="7d") as sets:
        for number in range(3):
            some = rows[20 * number : 20 * number + 20]
            sets.update(some, set="user", batch=("orders", number), time="at")
        other = rows[:20].set_column(4, "unused", pa.array(["y"] * 20))
        again = sets.update(other, set="user", batch=("orders", 0), time="at")
        assert again.status == "duplicate"  # what no model reads is not part of a batch
        assert_holds(sets, model, rows)


def test_a_head_is_applied_on_demand(url):
    torch.manual_seed(0)
    body, head = setfold.Pool(DIM, "mean"), nn.Linear(DIM, 2)
    model = setfold.Composition(body, head=head).double().eval()
    rows = random_rows(1)
    with live.create(url, model) as sets:
        sets.update(rows, set="user", batch=("orders", 1))
        plain, predicted = sets.encode(NAMES), sets.encode(NAMES, head=True)
    torch.testing.assert_close(plain, encodings(body.double(), rows, NAMES), rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(predicted, head(plain), rtol=1e-12, atol=1e-12)
