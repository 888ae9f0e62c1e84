"""All sets of a store, some at a time."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
import torch

import setfold
from setfold import live
from setfold.files.tables.arrow import as_tensor
from setfold.live import merging
from setfold.live.scan import scan

DAY = 86400


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("last", [None, "2d"])
def test_sets_in_many_buckets_come_once_and_as_they_are_read(tmp_path, monkeypatch, size, last):
    monkeypatch.setattr(merging, "states_at_once", lambda model: size)
    monkeypatch.setattr("setfold.live.times.now", lambda: 5 * DAY * 1_000_000)
    model = setfold.SlotSetEncoder(dim_in=1, num_slots=2, dim_slot=3, dim_out=4)
    names = [f"user {number}" for number in range(5)]
    with live.create(tmp_path / "live.db", model, bucket="1d", dtype="float64") as sets:
        for day in range(6):
            some = names[day % 3 :]
            same = {"x": [float(day)] * len(some), "t": [day * DAY] * len(some)}
            rows = pa.table({"user": some, **same})
            sets.update(rows, set="user", features="x", time="t", batch=("a", day))
        tables = list(scan(sets, last=last))
        found = pa.concat_tables(tables)
        names = [
            name for name, count in zip(names, sets.count(names, last=last), strict=True) if count
        ]
        counts, encodings = sets.look_up(names, last=last)
    assert found["set"].to_pylist() == names
    assert found["count"].to_pylist() == counts
    assert json.loads(found.schema.metadata[b"shape"]) == [2, 4]
    assert torch.allclose(as_tensor(found["encoding"], (2, 4)), encodings, rtol=1e-12)
    if size == 1:
        assert len(tables) > 1


def test_a_store_without_sets_gives_one_empty_table(tmp_path):
    with live.create(tmp_path / "live.db", setfold.Pool(2, "mean")) as sets:
        (table,) = scan(sets)
    assert table.column_names == ["set", "count", "encoding"]
    assert len(table) == 0


def test_an_id_of_several_columns_has_several_columns(tmp_path):
    rows = pa.table({"run": [2, 1], "event": ["b", "a"], "x": [1.0, 2.0]})
    with live.create(tmp_path / "live.db", setfold.Pool(1, "mean")) as sets:
        sets.update(rows, set=["run", "event"], batch=("a", 1))
        (table,) = scan(sets)
    assert table["set_0"].to_pylist() == [1, 2]
    assert table["set_1"].to_pylist() == ["a", "b"]
