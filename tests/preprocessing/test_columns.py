"""Columns of tables: what they parse, and that files, frames and states agree."""

from __future__ import annotations

import csv
from datetime import UTC, date, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import setfold
from setfold.preprocessing.columns import columns_of


def table_model():
    columns = setfold.Columns(
        [
            setfold.NumberColumn("amount", 10.0, 2.0, missing=True),
            setfold.CategoryColumn("kind", ["a", "b"], dim=2),
            setfold.TimeColumn("at", origin=0),
        ]
    )
    features = nn.Sequential(columns, nn.Linear(columns.dim_out, 8), nn.ReLU())
    torch.manual_seed(0)
    return setfold.Composition(setfold.Pool(8, ["mean", "max"]), features).eval()


TABLE = pa.table(
    {
        "user": ["u", "v", "u", "u"],
        "amount": [12.0, None, 8.0, 10.0],
        "kind": ["a", "z", None, "b"],
        "at": pa.array([datetime(2024, 1, day) for day in (1, 2, 3, 4)], pa.timestamp("us")),
    }
)


def test_numbers_are_scaled_in_float64():
    column = setfold.NumberColumn("x", center=6e6, scale=0.5)
    assert column.read(pa.array([6e6 + 0.25])).tolist() == [[0.5]]
    counts = setfold.NumberColumn("n", log=True).read(pa.array([0, 99, -99]))
    np.testing.assert_allclose(counts[:, 0], [0, np.log(100), -np.log(100)])


def test_a_missing_number_is_marked_or_unusable():
    values = pa.array([1.0, None, np.nan])
    marked = setfold.NumberColumn("x", center=1.0, missing=True).read(values)
    assert marked.tolist() == [[0, 0], [0, 1], [0, 1]]
    assert np.isnan(setfold.NumberColumn("x").read(values)[:, 0]).tolist() == [False, True, True]


@pytest.mark.parametrize(
    "values",
    [
        pa.array([7, 8, None, 9]),
        pa.array(["7", "8", None, "9"]),
        pa.array(["7", "8", None, "9"], pa.large_string()),
    ],
    ids=["numbers", "text", "large text"],
)
def test_categories_are_known_by_their_text(values):
    column = setfold.CategoryColumn("k", ["7", "9"])
    assert column.read(values)[:, 0].tolist() == [1, 0, 0, 2]


def test_the_vector_of_unknown_categories_begins_at_zero():
    column = setfold.CategoryColumn("k", ["a"], dim=3)
    assert column(torch.tensor([[0.0]])).tolist() == [[0.0] * 3]


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
def test_times_are_days_and_cycles(zone):
    monday = datetime(2024, 1, 1, 6, tzinfo=UTC)
    values = pa.array([monday, monday + timedelta(days=7, hours=12)], pa.timestamp("ms", "UTC"))
    values = values.cast(pa.timestamp("ms", zone)) if zone else values.cast(pa.timestamp("ms"))
    origin = int(monday.timestamp()) * 10**6
    column = setfold.TimeColumn("t", origin)
    days = torch.tensor(column.read(values))
    assert days.tolist() == [[0, 0], [7, 0.5]]
    cycles = column(days)
    torch.testing.assert_close(cycles[0, :2], torch.tensor([1.0, 0.0]).double(), atol=1e-9, rtol=0)
    turn = 2 * np.pi * 0.25 / 7  # a quarter of Monday has passed
    expected = torch.tensor([np.sin(turn), np.cos(turn)])
    torch.testing.assert_close(cycles[0, 2:], expected, atol=1e-9, rtol=0)


def test_dates_are_times():
    found = setfold.TimeColumn("t").read(pa.array([date(1970, 1, 3), None]))
    assert found[0, 0] == 2
    assert np.isnan(found[1]).all()


def test_values_are_shown_as_they_were():
    columns = columns_of(table_model())
    arrays = {name: TABLE[name].combine_chunks() for name in columns.names}
    shown = [columns.show(row) for row in columns.read(arrays).tolist()]
    assert shown[0] == {"amount": "12", "kind": "a", "at": "2024-01-01T00:00:00"}
    assert shown[1]["amount"] == "missing"
    assert shown[1]["kind"] == "other"


# ---- in files ----------------------------------------------------------------------------------


def encoded(model, path, tmp_path, **options):
    out = tmp_path / "out.parquet"
    setfold.encode_sets(model, path, out, set="user", overwrite=True, **options)
    table = pq.read_table(out)
    return dict(zip(table["set"].to_pylist(), table["encoding"].to_pylist(), strict=True))


def test_files_and_batches_agree_with_the_model_itself(tmp_path):
    model = table_model()
    columns = columns_of(model)
    arrays = {name: TABLE[name].combine_chunks() for name in columns.names}
    elements = torch.tensor(columns.read(arrays), dtype=torch.float32)
    index = torch.tensor([0, 1, 0, 0])
    expected = model(elements, index=index).detach().numpy()
    pq.write_table(TABLE, tmp_path / "rows.parquet")
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, TABLE.column_names)
        rows.writeheader()
        rows.writerows(TABLE.to_pylist())
    for name in ("rows.parquet", "rows.csv"):
        found = encoded(model, tmp_path / name, tmp_path)
        np.testing.assert_allclose([found["u"], found["v"]], expected, rtol=1e-6, atol=1e-6)
    partial = setfold.partial_states(model, TABLE, set="user")
    found = setfold.read_partials(model, setfold.merge_partials([partial]))
    np.testing.assert_allclose(found["encoding"].to_pylist(), expected, rtol=1e-6, atol=1e-6)


def test_a_saved_model_reads_its_columns_and_states_can_be_merged(tmp_path):
    setfold.save(table_model(), tmp_path / "model")
    model, states = setfold.load(tmp_path / "model"), tmp_path / "states.arrow"
    halves = [TABLE.slice(0, 2), TABLE.slice(2)]
    for number, half in enumerate(halves):
        pq.write_table(half, tmp_path / f"{number}.parquet")
    pq.write_table(TABLE, tmp_path / "all.parquet")
    parts = [tmp_path / f"{number}.arrow" for number in range(2)]
    for number, part in enumerate(parts):
        encoded(model, tmp_path / f"{number}.parquet", tmp_path, states=part)
    setfold.merge_states(parts, states)
    setfold.readout_states(states, tmp_path / "read.parquet")
    whole = encoded(model, tmp_path / "all.parquet", tmp_path)
    read = pq.read_table(tmp_path / "read.parquet")
    np.testing.assert_allclose(read["encoding"].to_pylist(), [whole["u"], whole["v"]], rtol=1e-6)


def test_what_does_not_fit_the_columns_is_explained(tmp_path):
    model = table_model()
    wrong = {
        "kind": TABLE.drop_columns(["kind"]),
        "timestamps": TABLE.set_column(3, "at", pa.array([1.0] * 4)),
        "numbers": TABLE.set_column(1, "amount", pa.array(["x"] * 4)),
        "is null": TABLE.set_column(3, "at", pa.array([None] * 4, pa.timestamp("us"))),
    }
    for message, table in wrong.items():
        pq.write_table(table, tmp_path / "rows.parquet")
        with pytest.raises(setfold.SetfoldError, match=message):
            encoded(model, tmp_path / "rows.parquet", tmp_path)
    pq.write_table(TABLE, tmp_path / "rows.parquet")
    with pytest.raises(setfold.InputError, match="Omit --features"):
        encoded(model, tmp_path / "rows.parquet", tmp_path, features="amount")


@pytest.mark.parametrize("chunks", [1, 2])
def test_ages_keep_seconds_however_old_the_set_is(chunks):
    latest = np.datetime64("2025-06-01T12:00:00", "us")
    seconds = np.array([0, 1, 7, 60, 86_401, 3 * 10**8])
    origin = int(np.datetime64("2060-01-01", "us").astype(int))
    column = setfold.TimeColumn("t", origin, age=True)
    numbers = column.read(pa.array(latest - seconds.astype("timedelta64[s]")))
    elements = torch.tensor(numbers, dtype=torch.float32)
    layer = setfold.RelativeLayer(6, latest=[0])
    model = setfold.LayeredSetEncoder([layer], setfold.Pool(6, "sum"), column)
    for number, age in enumerate(seconds):
        pair = elements[[number, 0]].unsqueeze(0)  # beside the latest one, whose age is 0
        found = torch.expm1(setfold.fold(model, pair.split(2 // chunks, 1))[0, 0]) * 3600
        assert found.item() == pytest.approx(age, rel=1e-4, abs=0.02)
