"""Bad rows are refused, or skipped and counted: by all models, or by none."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import setfold
from setfold import live
from setfold.errors import InputError, NonFiniteError
from tests.live.events import assert_holds, events, pool, slots


def spoiled(rows):
    """Rows of which four cannot be used."""
    rows = rows.astype({"x": object})
    rows.loc[3, "user"] = None
    rows.loc[5, "x"] = None
    rows.loc[9, "y"] = float("inf")
    rows.loc[10, "user"] = None
    rows["x"] = rows["x"].astype(float)
    return rows, rows.drop(index=[3, 5, 9, 10])


@pytest.mark.parametrize("small", [True, False])
def test_bad_rows(store_url, small, monkeypatch):
    if not small:
        monkeypatch.setattr("setfold.live.sets.SMALL_ROWS", 6)
    rows, good = spoiled(events(1))
    with live.create(store_url, slots()) as sets:
        with pytest.raises(InputError, match="row "):
            sets.update(rows, set="user", batch=("days", 1))
        assert_holds(sets, slots())
        found = sets.update(rows, set="user", batch=("days", 1), skip_errors=True)
        assert (found.rows, found.skipped) == (16, 4)
        assert_holds(sets, slots(), good)
        again = sets.update(rows, set="user", batch=("days", 1), skip_errors=True)
        assert again.status == "duplicate"


def test_a_row_that_one_model_cannot_use_counts_for_none(store_url):
    class Careful(nn.Module):
        def forward(self, elements):
            return torch.where(elements > 9, torch.inf, elements)

    model = setfold.Composition(features=Careful(), encoder=pool()).eval()
    rows = events(1).assign(x=1.0)
    rows.loc[4, "x"] = 10.0
    with live.create(store_url, model) as sets:
        number = sets.add_model(slots())
        with pytest.raises(InputError, match="row 4"):
            sets.update(rows, set="user", batch=("days", 1))
        assert sets.update(rows, set="user", batch=("days", 1), skip_errors=True).skipped == 1
        sets.switch(number)
        assert_holds(sets, slots(), rows.drop(index=4))


def test_times_that_are_none(store_url, clock):
    rows = events(1).assign(at="2001-09-09T01:00:00Z")
    rows.loc[2, "at"], rows.loc[7, "at"] = "yesterday", None
    with live.create(store_url, slots(), bucket="1h") as sets:
        with pytest.raises(InputError, match=r"row 2 .* is not a time"):
            sets.update(rows, set="user", batch=("days", 1), time="at")
        with pytest.raises(InputError, match=r"row 1 .* is missing"):
            sets.update(rows[6:], set="user", batch=("days", 1), time="at")
        found = sets.update(rows, set="user", batch=("days", 1), time="at", skip_errors=True)
        assert (found.rows, found.skipped) == (18, 2)
        assert_holds(sets, slots(), rows.drop(index=[2, 7]), last="1h")


def test_history_with_bad_rows(store_url):
    rows, good = spoiled(events(1))
    with live.create(store_url, pool()) as sets:
        sets.update(rows, set="user", batch=("days", 1), skip_errors=True)
        number = sets.add_model(slots())
        found = sets.fill(rows, set="user", batch=("days", 1), skip_errors=True)
        assert (found.rows, found.skipped) == (16, 4)
        sets.switch(number)
        assert_holds(sets, slots(), good)


def test_a_set_that_overflows_cannot_be_skipped(store_url):
    model = setfold.Pool(2, "sum").double().eval()
    rows = pd.concat([events(1), events(2, 3, names=["large"]).assign(x=1e308)])
    with live.create(store_url, model) as sets:
        with pytest.raises(NonFiniteError):
            sets.update(rows, set="user", batch=("days", 1), skip_errors=True)
        assert_holds(sets, model, names=["large"])


@pytest.mark.parametrize(
    "at",
    ["2001-09-09", "2001-09-09T01:46:40", "2001-09-09T03:46:40+02:00", 1_000_000_000, 1e9 + 0.5],
)
def test_times_of_every_kind(store_url, clock, at):
    with live.create(store_url, slots(), bucket="1d") as sets:
        sets.update(
            events(1).assign(at=at), set="user", batch=("days", 1), time="at", features="x,y"
        )
        assert_holds(sets, slots(), events(1), last="1d")


@pytest.mark.parametrize(
    "at",
    [
        pa.array([2**31 - 1], pa.date32()),
        pa.array([86_400_000 * 10**11], pa.date64()),
        pa.array([2**60], pa.timestamp("s")),
        pa.array([-(2**62)], pa.timestamp("ms", "UTC")),
        pa.array([2**63 - 1], pa.timestamp("us")),
    ],
    ids=lambda at: str(at.type),
)
def test_times_beyond_those_of_buckets_are_no_times(store_url, at):
    """Converted to microseconds, they would be other times."""
    rows = pa.table({"user": ["ann"], "x": [1.0], "y": [1.0], "at": at})
    options = {"set": "user", "time": "at", "features": "x,y"}
    with live.create(store_url, pool(), bucket="1d") as sets:
        with pytest.raises(InputError, match="is not a time"):
            sets.update(rows, batch=("days", 1), **options)
        assert sets.update(rows, batch=("days", 1), skip_errors=True, **options).skipped == 1


@pytest.mark.parametrize(
    "at", [pa.array([-1], pa.timestamp("ns")), pa.array(["1969-12-31"], pa.string_view())]
)
def test_times_are_rounded_down(store_url, clock, at):
    clock.time = -1
    rows = pa.table({"user": ["ann"], "x": [1.0], "y": [1.0], "at": at})
    with live.create(store_url, pool(), bucket="1d") as sets:
        sets.update(rows, set="user", batch=("days", 1), time="at", features="x,y")
        with sets.database.reading() as view:
            assert view.run("SELECT bucket FROM states") == [(-1,)]
