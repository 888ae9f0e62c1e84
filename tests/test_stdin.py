"""Rows from standard input."""

from __future__ import annotations

import io
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import setfold
from setfold.cli import app

ROWS = b'{"u": "b", "x": 1}\n{"u": "a", "x": 2}\n{"u": "b", "x": 4}\n'


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    setfold.save(setfold.Pool(1, "mean"), "model.safetensors")


def run(*arguments, stdin=ROWS):
    return CliRunner().invoke(app, [*map(str, arguments)], input=stdin)


def encode(*options, stdin=ROWS):
    options = ["--set", "u", "--out", "out.parquet", *options]
    return run("encode", "model.safetensors", "-", *options, stdin=stdin)


def test_encode_and_merge():
    assert encode("--format", "jsonl", "--states", "s.arrow").exit_code == 0
    found = pq.read_table("out.parquet")
    assert found["set"].to_pylist() == ["a", "b"]
    assert found["encoding"].to_pylist() == [[2.0], [2.5]]
    options = ["--format", "csv", "--states", "t.arrow", "--overwrite"]
    assert encode(*options, stdin=b"u,x\nc,7\nc,8\n").exit_code == 0
    setfold.merge_states(["s.arrow", "t.arrow"], "both.arrow")
    setfold.readout_states("both.arrow", "all.parquet")
    assert pq.read_table("all.parquet")["count"].to_pylist() == [1, 2, 2]
    files = ["all.parquet", "both.arrow", "model.safetensors", "out.parquet", "s.arrow", "t.arrow"]
    assert sorted(os.listdir()) == files


def test_formats_that_are_not_text():
    sink = io.BytesIO()
    pq.write_table(pa.table({"u": ["a"], "x": [3.0]}), sink)
    assert encode("--format", "parquet", stdin=sink.getvalue()).exit_code == 0
    assert pq.read_table("out.parquet")["encoding"].to_pylist() == [[3.0]]


def test_train_and_evaluate(monkeypatch):
    lines = [f"{n % 20},{n * (n % 2)},{'odd' if n % 2 else 'even'}\n" for n in range(200)]
    rows = "".join(["u,x,kind\n", *lines]).encode()
    words = ["--set", "u", "--format", "csv"]
    options = [*words, "--target", "kind", "--encoder", "statistics", "--out", "m.safetensors"]
    assert run("train", "-", *options, stdin=rows).exit_code == 0
    done = run("evaluate", "m.safetensors", "-", *words, stdin=rows)
    assert "accuracy:              1.0" in done.stdout
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(setfold.InputError, match="several processes"):
        raise run("evaluate", "m.safetensors", "-", *words, stdin=rows).exception


def test_dry_run():
    assert "set type" in encode("--format", "jsonl", "--dry-run").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-"], "expected the format of standard input .* got none"),
        (["-", "--format", "xls"], "got 'xls'. Pass one of parquet, "),
        (["-", "--format", "zarr"], "got 'zarr'"),
        (["-", "-", "--format", "csv"], "several times"),
        (["-", "--format", "csv", "--resume"], "cannot be read again"),
        (["model.safetensors", "--format", "csv"], "--format is for standard input"),
    ],
)
def test_errors(options, message):
    done = run("encode", "model.safetensors", *options, "--set", "u", "--out", "o.parquet")
    with pytest.raises(setfold.InputError, match=message):
        raise done.exception


def test_a_set_column_is_needed():
    done = run("encode", "model.safetensors", "-", "--format", "csv", "--out", "o.parquet")
    with pytest.raises(setfold.InputError, match="Pass --set"):
        raise done.exception
