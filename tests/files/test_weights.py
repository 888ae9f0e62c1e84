"""Weights of elements in files, compared with the encoder itself on whole sets."""

from __future__ import annotations

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import setfold
from setfold import cli
from setfold.files import weights as module
from setfold.files.inputs import open_reader

MODELS = {
    "attention": lambda: setfold.GatedAttentionPool(2, 4),
    "queries": lambda: setfold.AttentionPool(2, 3, dim_out=4),
    "slots": lambda: setfold.SlotSetEncoder(2, 4, 8, 8),
    "concat": lambda: setfold.Concat(
        {
            "plain": setfold.SummaryStatistics(2),
            "slots": setfold.SlotSetEncoder(2, 4, 8, 8),
            "attention": setfold.Composition(
                setfold.GatedAttentionPool(3, 4), torch.nn.Linear(2, 3)
            ),
        }
    ),
}


def some_rows(sets=7, rows=60):
    random = np.random.default_rng(0)
    return pa.table(
        {
            "user": random.integers(0, sets, rows),
            "x": random.standard_normal(rows),
            "y": random.standard_normal(rows),
            "place": [f"p{i}" for i in range(rows)],
        }
    )


def expected_weights(model, table):
    """The weights of all rows, set by set."""
    users = table["user"].to_numpy()
    elements = torch.tensor(np.stack([table["x"], table["y"]], 1), dtype=torch.float32)
    found = None
    for user in np.unique(users):
        own = elements[users == user].unsqueeze(0)
        state = model.update(model.initial_state(1), own)
        some = model.weights(state, own)[0].detach().numpy()
        found = np.zeros((len(users), some.shape[1])) if found is None else found
        found[users == user] = some
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("limit", [1 << 24, 1])
def test_weights_are_those_of_whole_sets(tmp_path, monkeypatch, name, limit):
    monkeypatch.setattr(module, "STATE_BYTES", limit)
    torch.manual_seed(0)
    model, table = MODELS[name]().eval(), some_rows()
    pq.write_table(table.slice(0, 25), tmp_path / "a.parquet")
    pq.write_table(table.slice(25), tmp_path / "b.parquet")
    out = tmp_path / "heat.parquet"
    inputs = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    summary = setfold.weigh_sets(
        model, inputs, out, set="user", features="x,y", keep=["place", "x"]
    )
    heat, expected = pq.read_table(out), expected_weights(model, table)
    names = [n for n in heat.column_names if n.startswith("weight")]
    assert heat.column_names == ["set", "row", "place", "x", *names]
    assert names == (["weight"] if len(names) == 1 else [f"weight_{i}" for i in range(len(names))])
    found = np.stack([heat[n] for n in names], 1)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert heat["set"].to_pylist() == table["user"].to_pylist()
    assert heat["place"].to_pylist() == table["place"].to_pylist()
    assert heat["row"].to_pylist() == [*range(25), *range(35)]
    assert (summary.elements, summary.sets, summary.vectors) == (60, 7, len(names))
    assert {path.name for path in tmp_path.iterdir()} == {"a.parquet", "b.parquet", out.name}


def test_a_slide_in_hdf5(tmp_path):
    model = setfold.GatedAttentionPool(8, 4).eval()
    features = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    with h5py.File(tmp_path / "slide.h5", "w") as file:
        file["features"] = features
        file["coords"] = np.arange(100).reshape(50, 2)
    setfold.save(model, tmp_path / "model.safetensors")
    words = ["weights", tmp_path / "model.safetensors", tmp_path / "slide.h5", "--features"]
    words += ["features", "--keep", "coords", "--out", tmp_path / "heat.parquet"]
    result = CliRunner().invoke(cli.app, [str(w) for w in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    heat = pq.read_table(tmp_path / "heat.parquet")
    places = np.stack([heat["x"], heat["y"]], 1)
    assert places.tolist() == np.arange(100).reshape(50, 2).tolist()
    elements = torch.from_numpy(features).unsqueeze(0)
    state = model.update(model.initial_state(1), elements)
    np.testing.assert_allclose(
        heat["weight"], model.weights(state, elements)[0, :, 0].detach(), rtol=1e-5
    )


def test_lists_and_several_id_columns(tmp_path):
    model = setfold.GatedAttentionPool(1, 4).eval()
    table = pa.table(
        {
            "run": [1, 1, 2],
            "event": ["a", "b", "a"],
            "x": [[1.0, 2.0], [], [3.0]],
            "at": [[10, 20], [], [30]],
            "day": [5, 6, 7],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    setfold.weigh_sets(
        model,
        tmp_path / "rows.parquet",
        tmp_path / "w.csv",
        set="run,event",
        features="x",
        explode=True,
        keep=["at", "day"],
    )
    found = pacsv.read_csv(tmp_path / "w.csv")
    assert found.column_names == ["run", "event", "row", "at", "day", "weight"]
    assert found["at"].to_pylist() == [10, 20, 30]
    assert found["day"].to_pylist() == [5, 5, 7]
    assert found["weight"].to_pylist()[2] == 1.0


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (setfold.Pool(2), {}, "has no weights"),
        (setfold.GatedAttentionPool(2, 4), {"keep": ["z"]}, "no column 'z' to keep"),
        (setfold.GatedAttentionPool(2, 4), {"keep": ["row"]}, "no column 'row'"),
        (setfold.GatedAttentionPool(2, 4), {"skip_errors": True}, "for all rows"),
    ],
    ids=str,
)
def test_what_is_not_possible(tmp_path, model, options, message):
    pq.write_table(some_rows(), tmp_path / "rows.parquet")
    with pytest.raises(setfold.InputError, match=message):
        setfold.weigh_sets(
            model,
            tmp_path / "rows.parquet",
            tmp_path / "w.parquet",
            set="user",
            features="x,y",
            **options,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


def test_nothing_is_replaced(tmp_path):
    model, rows = setfold.GatedAttentionPool(2, 4), tmp_path / "rows.parquet"
    pq.write_table(some_rows(), rows)
    with pytest.raises(setfold.InputError, match="exists"):
        setfold.weigh_sets(model, rows, rows, set="user", features="x,y")
    with pytest.raises(setfold.InputError, match="is an input"):
        setfold.weigh_sets(model, rows, rows, set="user", features="x,y", overwrite=True)
    assert pq.read_table(rows).num_rows == 60


def weigh(tmp_path, tables, name="w.parquet", **options):
    """Write tables, and return the weights of their elements as a dictionary."""
    paths = [tmp_path / f"{number}.parquet" for number in range(len(tables))]
    for path, columns in zip(paths, tables, strict=True):
        pq.write_table(pa.table(columns), path, row_group_size=2)
    model = setfold.GatedAttentionPool(1, 4).eval()
    chosen = {"set": "user", "features": "v"} | options
    try:
        setfold.weigh_sets(model, paths, tmp_path / name, **chosen)
    finally:
        assert {path.name for path in tmp_path.iterdir()} - {name} == {path.name for path in paths}
    with open_reader(tmp_path / name) as reader:
        return pa.Table.from_batches(reader.read(reader.schema.names, rows=1 << 16)).to_pydict()


ROWS = {"user": [1, 1, 2], "v": [1.0, 2.0, 3.0]}
LISTS = {"user": [1, 2], "v": [[1.0, 2.0], [3.0]]}


@pytest.mark.parametrize("other", [[[1], [2, 3]], [[1, 2], None]], ids=["lengths", "null"])
def test_lists_of_other_lengths_are_not_kept(tmp_path, other):
    with pytest.raises(setfold.InputError, match="the lists to keep differ in length"):
        weigh(tmp_path, [LISTS | {"other": other}], explode=True, keep=["other"])
    assert not (tmp_path / "w.parquet").exists()


@pytest.mark.parametrize("keep", [["fixed"], ["jagged"], ["fixed", "jagged"]], ids=str)
def test_lists_beside_lists_of_fixed_length(tmp_path, keep):
    pairs = [[1, 2], [3, 4]]
    fixed = pa.array(pairs, pa.list_(pa.int64(), 2))
    table = {"user": [1, 2], "v": fixed.cast(pa.list_(pa.float32(), 2))}
    found = weigh(tmp_path, [table | {"fixed": fixed, "jagged": pairs}], explode=True, keep=keep)
    assert all(found[name] == [1, 2, 3, 4] for name in keep)


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv"])
def test_kept_values_in_other_types(tmp_path, suffix):
    """Dictionaries differ from file to file, views cannot be taken from, and numbers are wider."""
    tables = [
        ROWS
        | {
            "kind": pa.array([f"a{number}", "b", None]).dictionary_encode(),
            "view": pa.array(["x", "y", f"{number}"], pa.string_view()),
            "size": pa.array([1, 2, number], pa.int32() if number else pa.int64()),
        }
        for number in range(2)
    ]
    found = weigh(tmp_path, tables, f"w.{suffix}", keep=["kind", "view", "size"])
    missing = "" if suffix == "csv" else None
    assert [one or missing for one in found["kind"]] == ["a0", "b", missing, "a1", "b", missing]
    assert found["view"] == ["x", "y", "0", "x", "y", "1"]
    assert found["size"] == [1, 2, 0, 1, 2, 1]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ([{"k": [1, 2, 3]}, {"k": ["1", "2", "3"]}], {}, "is string; in earlier inputs it is int"),
        ([{"k": [2**53 + 1] * 3}, {"k": [0.5] * 3}], {}, "is double in some inputs"),
        ([{"k": [[1], [2], [3]]}], {"name": "w.csv"}, "CSV files cannot store the column 'k'"),
        ([{"k": [b"\xff"] * 3}], {"name": "w.csv"}, "CSV files cannot store the column 'k'"),
        ([{"weight_0": [1, 2, 3]}], {"keep": ["weight_0"]}, "has a column 'weight_0' already"),
        ([{"k": [1, 2, 3]}], {"set": "user,k", "keep": ["k"]}, "has a column 'k' already"),
        ([{"row": [7, 8, 9]}], {"set": "user,row", "keep": []}, "cannot be named 'row'"),
        ([{"weight": [7, 8, 9]}], {"set": "user,weight", "keep": []}, "cannot be named 'weight'"),
    ],
    ids=["text", "digits", "lists", "bytes", "weights", "id", "row", "weight"],
)
def test_what_the_output_cannot_hold(tmp_path, columns, options, message):
    tables = [ROWS | more for more in columns]
    with pytest.raises(setfold.InputError, match=message):
        weigh(tmp_path, tables, **{"keep": ["k"]} | options)
