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
