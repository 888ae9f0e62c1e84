from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import replace

import pytest
import torch

from experiments import records
from experiments.records import Record
from setfold import FileError
from tests.torchrun import finish, fork

RECORD = Record(
    recipe="tiny",
    size="small",
    method="SSE",
    settings={"points": 100, "rate": 0.1},
    seed=0,
    metrics={"accuracy": 0.1 + 0.2, "curve": [1.0, 2.5]},
    history={"epoch": [1.0], "loss": [0.5]},
    training={"kind": "Training", "task": {"kind": "Line"}},
    parameters=12,
    command="python -m experiments run tiny --size small --seed 0",
    commit="abc",
    versions={"python": "3.11"},
    machine={"cpu": "a cpu", "cores": 2},
    seconds=1.5,
    finished="2024-01-01T00:00:00+00:00",
)


def test_records_come_back_as_they_were(tmp_path):
    bare = replace(RECORD, training=None, parameters=None, history={}, settings={}, seed=3)
    for record in (RECORD, bare):
        records.write(record, tmp_path / "deep" / "folder")
    assert records.read(tmp_path / "deep" / "folder", "tiny") == [RECORD, bare]


def test_the_file_is_json_lines(tmp_path):
    records.write(RECORD, tmp_path)
    (line,) = (tmp_path / "tiny.jsonl").read_text().splitlines()
    assert json.loads(line)["metrics"] == {"accuracy": 0.1 + 0.2, "curve": [1.0, 2.5]}


def test_without_a_file_there_are_no_records(tmp_path):
    assert records.read(tmp_path, "tiny") == []


@pytest.mark.parametrize(
    "changes",
    [{"size": "smoke"}, {"method": "DS"}, {"settings": {"points": 200}}, {"seed": 1}],
    ids=str,
)
def test_records_of_other_runs_stay(tmp_path, changes):
    other = replace(RECORD, **changes)
    for record in (RECORD, other):
        records.write(record, tmp_path)
    assert records.read(tmp_path, "tiny") == [RECORD, other]


def test_the_newest_record_of_a_run_wins_and_keeps_its_place(tmp_path):
    other = replace(RECORD, seed=1)
    settings = dict(reversed(RECORD.settings.items()))  # the same, in another order
    newer = replace(RECORD, settings=settings, metrics={"accuracy": 0.9}, commit="def")
    for record in (RECORD, other, newer):
        records.write(record, tmp_path)
    assert records.read(tmp_path, "tiny") == [newer, other]


def test_recipes_have_files_of_their_own(tmp_path):
    records.write(RECORD, tmp_path)
    records.write(replace(RECORD, recipe="other"), tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["other.jsonl", "tiny.jsonl"]
    assert len(records.read(tmp_path, "other")) == 1


@pytest.mark.parametrize("line", ["nonsense", "{}", '{"recipe": "tiny"}', "3"])
def test_a_damaged_line_is_named(tmp_path, line):
    records.write(RECORD, tmp_path)
    with (tmp_path / "tiny.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(FileError, match=r"tiny\.jsonl, line 2"):
        records.read(tmp_path, "tiny")


def test_processes_write_at_the_same_time(tmp_path):
    def write(first):
        for seed in range(first, first + 10):
            records.write(replace(RECORD, seed=seed), tmp_path)

    assert finish([fork(write, 10 * i) for i in range(3)]) == [0, 0, 0]
    assert sorted(record.seed for record in records.read(tmp_path, "tiny")) == list(range(30))
    assert not list(tmp_path.glob("*.part"))


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit; gives a function that runs git in it."""
    monkeypatch.setattr(records, "ROOT", tmp_path)
    records.commit.cache_clear()

    def git(*arguments):
        names = {
            f"GIT_{who}_{what}": "x"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        }
        return subprocess.run(
            ["git", "-C", tmp_path, *arguments],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | names,
        ).stdout.strip()

    git("init")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    yield git
    records.commit.cache_clear()


def test_the_commit_is_gits(repository, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "new.png").write_text("2")
    (tmp_path / "RESULTS.md").write_text("2")
    assert records.commit() == repository("rev-parse", "HEAD")


def test_changed_code_is_marked(repository, tmp_path):
    (tmp_path / "code.py").write_text("2")
    assert records.commit() == repository("rev-parse", "HEAD") + "+"
    (tmp_path / "code.py").write_text("1")
    assert records.commit().endswith("+")  # the code that runs is that of the beginning


def test_without_git_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tmp_path / "nowhere")
    records.commit.cache_clear()
    assert records.commit() == "unknown"
    records.commit.cache_clear()


def test_versions_and_processor():
    versions = records.versions()
    assert versions["torch"] == torch.__version__
    assert versions["python"] == platform.python_version()
    assert set(versions) == {"python", "setfold", "torch", "numpy"}
    assert records.cpu()["cores"] == os.cpu_count()
    assert records.cpu()["cpu"]
