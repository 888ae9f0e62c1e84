"""The commands encode, merge and readout."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import setfold
from setfold import cli
from tests.files.files import assert_encodes, encode, encoder, interrupt, rows, write


@pytest.fixture
def model(tmp_path):
    setfold.save(encoder(), tmp_path / "model.safetensors")
    return str(tmp_path / "model.safetensors")


def typed(*words):
    result = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_encode(tmp_path, model):
    folder = write(tmp_path / "in", rows())
    out = tmp_path / "out.parquet"
    text = typed("encode", model, folder, "--set", "event", "--out", out)
    assert_encodes(out, encoder(), rows())
    lines = dict(line.split(":", 1) for line in text.splitlines())
    assert lines["elements"].strip() == "600"
    assert lines["out"].strip() == str(out)
    assert lines["skipped"].strip() == "0"
    assert {"sets", "seconds", "bytes read", "spills", "peak memory"} <= lines.keys()


def test_encode_for_machines(tmp_path, model):
    folder = write(tmp_path / "in", rows())
    options = ["--set", "event", "--out", tmp_path / "out.npz", "--json", "--features", "f2,f1,f0"]
    facts = json.loads(typed("encode", model, folder, *options))
    assert (facts["elements"], facts["out"]) == (600, [str(tmp_path / "out.npz")])
    assert facts["elements_per_second"] > 0


def test_a_dry_run_reads_little_and_writes_nothing(tmp_path, model):
    folder = write(tmp_path / "in", rows())
    options = ["--set", "event", "--out", tmp_path / "out.parquet", "--dry-run", "--json"]
    facts = json.loads(typed("encode", model, folder, *options))
    assert (facts["files"], facts["rows"], facts["width"]) == (4, 600, 3)
    assert facts["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert facts["seconds"] >= 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "model.safetensors"]


def test_states_from_day_to_day(tmp_path, model):
    table = rows()
    days = [write(tmp_path / f"day {i}", table[i * 200 :][:200]) for i in range(3)]
    states = [tmp_path / f"{i}.arrow" for i in range(3)]
    for day, path in zip(days, states, strict=True):
        out = path.with_suffix(".npz")
        typed("encode", model, day, "--set", "event", "-o", out, "--states", path)
    typed("merge", *states, "--out", tmp_path / "all.arrow", "--json")
    typed("readout", tmp_path / "all.arrow", "--out", tmp_path / "out.parquet")
    assert_encodes(tmp_path / "out.parquet", encoder(), table)


def test_info_shows_a_state_file(tmp_path, model):
    folder, states = write(tmp_path / "in", rows()), tmp_path / "states.arrow"
    typed("encode", model, folder, "--set", "event", "-o", tmp_path / "o.npz", "--states", states)
    facts = json.loads(typed("info", states, "--json"))
    assert (facts["kind"], facts["named by"], facts["features"]) == ("states", "int64", "f0,f1,f2")
    assert facts["sets"] == len(set(rows()["event"].to_pylist()))
    assert list(facts["inputs"]) == [str(folder / f"part-{i}.parquet") for i in range(4)]
    assert "part-3.parquet" in typed("info", states)


def test_info_shows_encodings_and_interrupted_runs(tmp_path, model, tight, monkeypatch):
    folder = write(tmp_path / "in", rows())
    for name in ("out.parquet", "out.arrow", "out.npz"):
        encode(encoder(), folder, tmp_path / name)
        facts = json.loads(typed("info", tmp_path / name, "--json", "--verify"))
        assert (facts["kind"], facts["sets"], facts["shape"]) == ("encodings", 40, [4, 5])
        assert facts["verified"] == "encodings of 40 sets, each (4, 5)"
        assert "int64" in typed("info", tmp_path / name)
    interrupt(monkeypatch, encoder(), folder, tmp_path / "half.npz")
    facts = json.loads(typed("info", tmp_path / "half.npz.work", "--json", "--verify"))
    assert (facts["kind"], facts["command"]) == ("work folder", "encode")
    assert facts["verified"].startswith("work folder of an interrupted run")


def test_bad_rows_are_skipped_on_request(tmp_path, model):
    folder = write(tmp_path / "in", rows())
    (folder / "part-9.parquet").write_bytes(b"PAR1")
    out = tmp_path / "out.parquet"
    text = typed("encode", model, folder, "--set", "event", "-o", out, "--on-error", "skip")
    assert f"{out}.skipped.jsonl" in text
    assert_encodes(out, encoder(), rows())


def test_errors_are_one_line(tmp_path, model):
    command = [sys.executable, "-m", "setfold.cli", "encode", model, str(tmp_path / "no.parquet")]
    command += ["--set", "event", "--out", str(tmp_path / "out.parquet")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"setfold: {tmp_path}/no.parquet does not exist.")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["encode", "merge", "readout"])
def test_help_shows_examples(command):
    text = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "120"}).output
    assert f"setfold {command} " in text.partition("Example")[2]


def test_the_columns_of_the_output(tmp_path, model):
    folder = write(tmp_path / "in", rows())
    typed("encode", model, folder, "--set", "event", "--out", tmp_path / "out.parquet")
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert [str(field.type) for field in schema] == [
        "int64",
        "int64",
        "fixed_size_list<element: float>[20]",
    ]
