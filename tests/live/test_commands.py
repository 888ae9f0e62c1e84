"""The commands `setfold live ...`, as a shell runs them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import setfold
from setfold import cli, live
from setfold.live.sources import kafka
from tests.live.events import NAMES, assert_holds, events, slots


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line: exit code, output and error output."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["setfold", "live", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def facts(run):
    """Run a command that must succeed, and return what it prints as JSON."""

    def facts(*words):
        code, out, error = run(*words, "--json")
        assert code == 0, error
        return json.loads(out)

    return facts


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with models and rows."""
    monkeypatch.chdir(tmp_path)
    setfold.save(slots(), "model.safetensors")
    setfold.save(slots(seed=1), "new.safetensors")
    for day in (1, 2, 3):
        events(day).to_parquet(f"{day}.parquet")
    return tmp_path


@pytest.fixture
def store(run, here, store_url):
    code, out, error = run("create", store_url, "model.safetensors")
    assert (code, out) == (0, f"created {store_url}\n"), error
    return store_url


def check(store, *tables, model=None, **options):
    with live.open(store) as sets:
        assert_holds(sets, model or slots(), *tables, **options)


def test_update_and_get(facts, run, store):
    assert facts("update", store, "1.parquet", "2.parquet", "--set", "user")["batches"] == 2
    found = facts("update", store, "*.parquet", "--set", "user")
    assert (found["batches"], found["duplicates"], found["rows"]) == (1, 2, 20)
    check(store, events(1), events(2), events(3))
    rows = pd.concat(map(events, (1, 2, 3)))
    own = rows[rows["user"] == "user 1"][["x", "y"]].to_numpy()
    expected = slots()(torch.tensor(own).unsqueeze(0))[0].detach()
    (first, nobody) = facts("get", store, "user 1", "nobody")
    assert first["count"] == len(own)
    np.testing.assert_allclose(first["encoding"], expected, rtol=1e-9)
    assert nobody["count"] == 0
    assert run("get", store, "user 1", "nobody", "--count")[1] == f"user 1\t{len(own)}\nnobody\t0\n"
    shown = run("get", store, "user 1")[1].strip().split("\t")
    np.testing.assert_allclose(json.loads(shown[2]), expected, rtol=1e-9)


def test_predictions(run, facts, here, store_url):
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(20, 2).double(), setfold.Classes("kind", ["no", "yes"])]
    model = setfold.Composition(encoder=slots(), head=nn.Sequential(*layers)).eval()
    setfold.save(model, "head.safetensors")
    run("create", store_url, "head.safetensors")
    run("update", store_url, "1.parquet", "--set", "user")
    (found,) = facts("get", store_url, "user 1", "--head")
    assert found["prediction"] in ("no", "yes")
    assert sum(found["encoding"]) == pytest.approx(1)
    assert found["prediction"] in run("get", store_url, "user 1", "--head")[1]


def test_ids_of_several_columns(facts, here, store):
    events(1).assign(run=7).to_parquet("runs.parquet")
    facts("update", store, "runs.parquet", "--set", "run,user", "--features", "x,y")
    own = (events(1)["user"] == "user 1").sum()
    assert facts("get", store, "7,user 1", "--count") == [{"set": "7,user 1", "count": own}]


def test_buckets_and_expiry(run, facts, here, store_url, clock):
    run("create", store_url, "model.safetensors", "--bucket", "1h", "--window", "2h")
    events(1, at=clock.time).to_parquet("1.parquet")
    events(2, at=clock.time - 7 * 3600).to_parquet("2.parquet")
    code, _, error = run("update", store_url, "1.parquet", "--set", "user")
    assert (code, "pass the column with the time" in error) == (2, True)
    facts("update", store_url, "1.parquet", "2.parquet", "--set", "user", "--time", "at")
    (now,) = facts("get", store_url, "user 1", "--last", "1h", "--count")
    assert now["count"] == (events(1)["user"] == "user 1").sum()
    assert facts("expire", store_url)["states"] == len({*events(2)["user"]})
    check(store_url, events(1))


def test_delete_asks_first(run, facts, store, monkeypatch):
    facts("update", store, "1.parquet", "--set", "user")
    own = int((events(1)["user"] == "user 1").sum())
    result = CliRunner().invoke(cli.app, ["live", "delete", store, "user 1"], input="n\n")
    assert result.exit_code == 1
    assert f"Delete 1 sets with {own} elements" in result.output
    check(store, events(1))
    assert facts("delete", store, "user 1", "--yes") == {"sets": 1, "elements": own}
    check(store, events(1)[lambda rows: rows["user"] != "user 1"])


def test_export_and_import(facts, run, here, store, tmp_path):
    facts("update", store, "1.parquet", "--set", "user")
    sets = len({*events(1)["user"]})
    for name in ("out.parquet", "out.csv"):
        assert facts("export", store, name) == {"sets": sets, "elements": 20, "out": name}
    code, _, error = run("export", store, "out.csv")
    assert (code, "--overwrite" in error) == (2, True)
    facts("export", store, "states.arrow", "--states")
    run("create", "other.db", "model.safetensors")
    assert facts("import", "other.db", "states.arrow")["rows"] == 20
    assert facts("import", "other.db", "states.arrow")["duplicates"] == 1
    check("other.db", events(1))
    run("create", "days.db", "model.safetensors", "--bucket", "1d")
    code, _, error = run("import", "days.db", "states.arrow")
    assert (code, "as --at." in " ".join(error.split())) == (2, True)
    assert facts("import", "days.db", "states.arrow", "--at", "2026-07-01")["rows"] == 20


def test_upgrade(facts, run, here, store):
    facts("update", store, "1.parquet", "2.parquet", "--set", "user")
    assert "added model 2" in run("upgrade", "add", store, "new.safetensors")[1]
    facts("update", store, "3.parquet", "--set", "user")
    found = facts("upgrade", "fill", store, "*.parquet", "--set", "user")
    assert (found["batches"], found["duplicates"], found["rows"]) == (2, 1, 40)
    assert run("upgrade", "switch", store, "2")[:2] == (0, "model 2 is active\n")
    check(store, events(1), events(2), events(3), model=slots(seed=1))
    assert run("upgrade", "drop", store, "1")[:2] == (0, "dropped model 1\n")
    assert run("upgrade", "drop", store, "2")[0] == 2


def test_info_and_verify(facts, run, store):
    facts("update", store, "1.parquet", "--set", "user")
    found = facts("info", store)
    assert found["ids"] == {"user": "large_string"}
    assert found["models"][0]["elements"] == 20
    with live.open(store) as sets:
        rows = events(2)
        sets.update(rows, set="user", batch=live.Offsets("clicks", {0: (0, 1234)}))
    shown = run("info", store)[1]
    assert "source clicks:         0 at 1,234" in shown
    assert "model:                 1 (SlotSetEncoder)" in shown
    assert run("verify", store)[:2] == (0, f"{len(NAMES)} states, 0 problems\n")
    with live.open(store) as sets, sets.database.writing() as transaction:
        transaction.run("UPDATE states SET count = 7 WHERE name = (SELECT MAX(name) FROM states)")
    code, out, _ = run("verify", store)
    assert (code, "the state of the set user 6" in out) == (1, True)


def test_bad_rows(facts, run, here, store):
    rows = events(4)
    rows.loc[2, "x"] = np.nan
    rows.to_parquet("bad.parquet")
    (here / "worse.parquet").write_bytes(b"PAR1")
    words = ["update", store, "bad.parquet", "worse.parquet", "--set", "user"]
    code, _, error = run(*words)
    assert (code, "bad.parquet, row 2" in error) == (2, True)
    found = facts(*words, "--on-error", "skip")
    assert (found["rows"], found["skipped"], found["unreadable_files"]) == (19, 1, 1)
    check(store, rows.drop(index=2))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-", "1.parquet", "--source", "a"], "must be the only input"),
        (["kafka://here/clicks", "1.parquet"], "must be the only input"),
        (["-", "--source", "a", "--watch", "1"], "--watch is for files"),
        (["-"], "Pass --source"),
        (["1.parquet", "--watch", "inf"], "less than or equal to 86400"),
        (["nothing.parquet"], "does not exist"),
        (["1.parquet", "--features", "z"], "has no column 'z'"),
        (["1.parquet", "--time", "x"], "has no buckets"),
    ],
)
def test_arguments_that_do_not_go_together(run, store, words, message):
    code, _, error = run("update", store, *words, "--set", "user")
    assert (code, message in error) == (2, True), error


def test_stores_that_are_not_there(run, here):
    code, _, error = run("info", "nothing.db")
    assert (code, "Create one with setfold live create" in error) == (2, True)
    (here / "notes.db").write_text("not a database, but some text that is long enough" * 10)
    assert run("info", "notes.db")[0] == 2


def test_standard_input(store):
    text = events(1).to_json(orient="records", lines=True, double_precision=15)
    words = ["live", "update", store, "-", "--set", "user", "--source", "pipe", "--json"]
    for rows in (20, 0):
        result = CliRunner().invoke(cli.app, words, input=text.encode())
        assert json.loads(result.stdout)["rows"] == rows
    check(store, events(1))


def test_a_topic(facts, store, monkeypatch):
    seen = []

    class Source:
        def __init__(self, intake, topic, source, note):
            seen.append((topic.name, topic.settings["bootstrap.servers"], source))

        def run(self, stop):
            seen.append(stop.is_set())

    monkeypatch.setattr(kafka, "TopicSource", Source)
    assert facts("update", store, "kafka://here:9092/clicks", "--set", "user")["rows"] == 0
    assert seen == [("clicks", "here:9092", None), False]


def test_ctrl_c_says_what_is_kept(run, store, monkeypatch):
    from setfold.live.sources.files import FileSource

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(FileSource, "apply_file", interrupt)
    code, _, error = run("update", store, "1.parquet", "--set", "user")
    assert code == 130
    assert "nothing counts twice" in error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_watch_ends_gracefully(here, store, number):
    """A signal arrives while a file is applied: that file is complete, and the exit code is 0."""
    inbox, reading = here / "inbox", multiprocessing.get_context("fork").Event()
    inbox.mkdir()

    def work():
        from setfold.live.sources import files

        original, wait = files.FileSource.apply_file, threading.Event()
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def slow(*words):
            reading.set()
            wait.wait(0.3)  # the signal arrives here
            original(*words)

        files.FileSource.apply_file = slow
        sys.argv = ["setfold", "live", "update", store, str(inbox), "--set", "user"]
        sys.argv += ["--watch", "0.01"]
        cli.main()

    for day in (1, 2):
        events(day).to_parquet(inbox / f"{day}.parquet")
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    reading.wait()
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == 0
    check(store, events(1))
