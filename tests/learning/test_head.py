"""Encodings or predictions: whether the head of a model is applied."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import setfold
from setfold import cli
from setfold.files.encodings import verify_encodings

ROWS = pa.table({"user": [1, 2, 1], "x": [1.0, 2.0, 3.0], "y": [0.5, 0.0, -1.0]})


def model(last):
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(2, 2 if isinstance(last, setfold.Classes) else 1), last)
    return setfold.Composition(setfold.Pool(2, "mean"), None, head).eval()


LAST = {
    "classes": setfold.Classes("kind", ["a", "b"]),
    "quantity": setfold.Quantity("age", 40.0, 10.0),
    "other": nn.ReLU(),
}


@pytest.mark.parametrize("last", LAST)
def test_the_head_is_applied_on_request(tmp_path, last):
    encoder, path = model(LAST[last]), tmp_path / "rows.parquet"
    pq.write_table(ROWS, path)
    means = np.array([[2.0, -0.25], [2.0, 0.0]])
    expected = encoder.head(torch.tensor(means, dtype=torch.float32)).detach()
    if last == "classes":
        expected = expected.softmax(1)
    states = tmp_path / "states.arrow"
    setfold.encode_sets(encoder, path, tmp_path / "plain.npz", set="user", states=states)
    setfold.encode_sets(encoder, path, tmp_path / "head.npz", set="user", head=True)
    setfold.readout_states(states, tmp_path / "read.npz", head=True)
    setfold.readout_states(states, tmp_path / "readout.npz")
    found = {p.stem: np.load(p)["encoding"] for p in tmp_path.glob("*.npz")}
    for name in ("plain", "readout"):
        np.testing.assert_allclose(found[name], means)
    for name in ("head", "read"):
        np.testing.assert_allclose(found[name], expected, rtol=1e-6)
    frame = setfold.encode_frame(encoder, ROWS, set="user", head=True)
    np.testing.assert_allclose(frame["encoding"].to_pylist(), expected, rtol=1e-6)
    labels = {
        "classes": ["ab"[place] for place in expected.argmax(1).tolist()],
        "quantity": expected[:, 0].tolist(),
    }
    if last in labels:
        for found in (np.load(tmp_path / "head.npz"), np.load(tmp_path / "read.npz"), frame):
            assert np.array(found["prediction"]).tolist() == labels[last]
    frame = setfold.encode_frame(encoder, ROWS, set="user")
    assert frame.column_names == ["user", "count", "encoding"]
    np.testing.assert_allclose(frame["encoding"].to_pylist(), means)
    assert isinstance(encoder.head, nn.Sequential)


def test_the_command_line(tmp_path):
    pq.write_table(ROWS, tmp_path / "rows.parquet")
    setfold.save(model(LAST["classes"]), tmp_path / "model")
    words = ["encode", tmp_path / "model", tmp_path / "rows.parquet", "--set", "user", "--head"]
    words += ["--out", tmp_path / "p.parquet"]
    result = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0
    table = pq.read_table(tmp_path / "p.parquet")
    found = np.array(table["encoding"].to_pylist())
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-6)
    assert table["prediction"].to_pylist() == ["ab"[place] for place in found.argmax(1)]
    words[-1] = tmp_path / "p.csv"
    result = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    lines = (tmp_path / "p.csv").read_text().splitlines()
    assert lines[0] == '"set","count","prediction","probability_a","probability_b"'


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "npz"])
@pytest.mark.parametrize("ids", ["user", "user,day"])
def test_predictions_are_verified_and_described(tmp_path, suffix, ids):
    path, out = tmp_path / "rows.parquet", tmp_path / f"out.{suffix}"
    pq.write_table(ROWS.append_column("day", pa.array([1, 1, 2])), path)
    features = "x,y"
    encoder = model(LAST["classes"])
    setfold.encode_sets(encoder, path, out, set=ids, features=features, head=True)
    assert verify_encodings(out).sets == (2 if ids == "user" else 3)
