"""The constants of columns, found in one pass."""

from __future__ import annotations

from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest

import setfold
from setfold.preprocessing import fitting
from setfold.preprocessing.fitting import ColumnFitter


def fitted(table, pieces=3, **options):
    table = pa.table(table)
    fitter = ColumnFitter({field.name: field.type for field in table.schema}, **options)
    for part in np.array_split(np.arange(len(table)), pieces):
        piece = table.slice(part[0], len(part)).combine_chunks() if len(part) else table.slice(0, 0)
        fitter.add({name: piece[name].combine_chunks() for name in piece.column_names})
    return fitter.finish()


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_mean_and_deviation_do_not_depend_on_the_pieces(pieces):
    values = 1e6 + np.random.default_rng(0).standard_normal(1000)
    (column,) = fitted({"x": values}, pieces).columns.all
    assert column.center == pytest.approx(values.mean(), rel=1e-12)
    assert column.scale == pytest.approx(values.std(), rel=1e-6)
    assert not column.missing


def test_the_robust_scale_ignores_outliers():
    values = np.random.default_rng(0).standard_normal(5000)
    values[:50] = 1e6
    (column,) = fitted({"x": values}, robust=True).columns.all
    assert abs(column.center) < 0.1
    assert 0.9 < column.scale < 1.1


def test_a_sample_is_enough_for_quartiles(monkeypatch):
    monkeypatch.setattr(fitting, "SAMPLE", 500)
    values = np.random.default_rng(0).standard_normal(20_000)
    (column,) = fitted({"x": values}, pieces=20, robust=True).columns.all
    assert abs(column.center) < 0.2
    assert 0.8 < column.scale < 1.2


def test_missing_values_and_infinity_do_not_spoil_the_constants():
    (column,) = fitted({"x": [1.0, None, 3.0, float("nan"), float("inf")]}).columns.all
    assert (column.center, column.scale, column.missing) == (2.0, 1.0, True)


def test_counts_of_many_magnitudes_are_logarithmic():
    counts = np.random.default_rng(0).lognormal(3, 2, 1000).astype(int)
    table = {"clicks": counts, "year": np.arange(1000) % 50 + 1970, "spent": counts * 1.5}
    found = {column.name: column.log for column in fitted(table).columns.all}
    assert found == {"clicks": True, "year": False, "spent": False}
    assert fitted({"spent": counts * 1.5}, log=["spent"]).columns.all[0].log


def test_kinds_of_columns():
    at = [datetime(2024, 1, 1 + day % 9) for day in range(90)]
    table = {
        "flag": [bool(i % 2) for i in range(90)],
        "text": [f"k{i % 3}" for i in range(90)],
        "coded": [i % 4 for i in range(90)],
        "vector": [[float(i), 1.0] for i in range(90)],
        "at": pa.array(at, pa.timestamp("s")),
        "dictionary": pa.array([f"d{i % 2}" for i in range(90)]).dictionary_encode(),
    }
    found = {c.name: c for c in fitted(table, categories=["coded"], age=True).columns.all}
    kinds = {name: type(column).__name__ for name, column in found.items()}
    assert kinds == {
        "flag": "NumberColumn",
        "text": "CategoryColumn",
        "coded": "CategoryColumn",
        "vector": "VectorColumn",
        "at": "TimeColumn",
        "dictionary": "CategoryColumn",
    }
    assert found["coded"].values == ["0", "1", "2", "3"]
    assert found["at"].age


def test_columns_without_information_are_left_out():
    table = {
        "x": [1.0, 2.0, 3.0, 4.0],
        "constant": [5.0] * 4,
        "empty": pa.array([None] * 4, pa.float64()),
        "id": ["a", "b", "c", "d"],
        "same": ["a"] * 4,
    }
    found = fitted(table)
    assert found.columns.names == ["x"]
    assert found.left_out == {
        "constant": "all values are equal",
        "empty": "all values are missing",
        "id": "nearly every value occurs once",
        "same": "all values are equal",
    }
    with pytest.raises(setfold.InputError, match="no column can be used"):
        fitted({"same": ["a"] * 4})


def test_rare_categories_share_the_vector_of_unknown_ones():
    (column,) = fitted({"k": ["a", "a", "b", "b", "once"]}).columns.all
    assert column.values == ["a", "b"]


def test_unknown_names_are_refused():
    with pytest.raises(setfold.InputError, match="no column 'y'"):
        fitted({"x": [1.0, 2.0]}, log=["y"])
    with pytest.raises(setfold.InputError, match="must be text or an integer"):
        fitted({"x": [1.0, 2.0]}, categories=["x"])
