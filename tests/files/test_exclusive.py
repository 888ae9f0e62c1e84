"""Several processes and one output: what reports success is in the file, and nothing else."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

import pytest

import setfold
from setfold.core import persist
from setfold.files import run
from setfold.files.states import read_provenance
from tests.files.files import encode, encoder, fork, interrupt, rows, write
from tests.paused import PROCESSES, Paused


@pytest.fixture
def days(tmp_path):
    return [write(tmp_path / f"day {i}", rows(60, 9, seed=i), files=1) for i in range(7)]


@pytest.fixture
def states(tmp_path, days):
    encode(encoder(), days[0], tmp_path / "o.npz", states=tmp_path / "s.arrow")
    return tmp_path / "s.arrow"


def days_in(states):
    return sorted(int(Path(name).parent.name[-1]) for name in read_provenance(states)[2].inputs)


@pytest.mark.parametrize(
    "place",
    [(Path, "mkdir"), (Path, "open"), (fcntl, "flock"), (persist, "_is_at")],
    ids=lambda place: place[1],
)
def test_an_output_has_one_writer_at_a_time(tmp_path, days, states, place):
    def write_day(number):
        options = {"states": states, "overwrite": True}
        return encode(encoder(), days[number], tmp_path / "o.npz", **options).elements

    second = Paused(lambda: write_day(2), place, (run.Run, "run"))
    if place[1] == "_is_at":  # it holds the lock already
        with pytest.raises(setfold.FileError, match="another process is writing"):
            write_day(1)
    else:
        write_day(1)
    second.go_on()
    with pytest.raises(setfold.FileError, match="another process is writing"):
        write_day(3)
    assert second.result() == 60
    assert days_in(states) == [2]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "o.npz",
        "s.arrow",
    ]
    assert not list(tmp_path.glob("*.work"))


def test_six_processes_at_once(tmp_path, days, states):
    begin, errors = PROCESSES.Barrier(6), PROCESSES.SimpleQueue()

    def write_day(day):
        begin.wait()
        while True:
            try:
                return encode(encoder(), day, tmp_path / "o.npz", states=states, overwrite=True)
            except setfold.FileError as error:
                if "another process is writing" not in str(error):
                    errors.put(repr(error))
                    raise
                time.sleep(0.02)  # leave the processor to the others
            except BaseException as error:
                errors.put(repr(error))
                raise

    processes = [fork(lambda day=day: write_day(day)) for day in days[1:]]
    for process in processes:
        process.join()
    assert errors.empty(), errors.get()
    assert len(days_in(states)) == 1
    assert setfold.readout_states(states, tmp_path / "all.npz").elements == 60
    assert not list(tmp_path.glob("*.work"))


def test_all_outputs_are_locked(tmp_path, days, states):
    def callback(_):
        for attempt in (
            lambda: encode(encoder(), days[1], tmp_path / "2.npz", states=tmp_path / "t.arrow"),
            lambda: encode(encoder(), days[1], tmp_path / "t.arrow"),
            lambda: setfold.merge_states([states], tmp_path / "t.arrow"),
        ):
            with pytest.raises(setfold.FileError, match=r"another process is writing .*t\.arrow"):
                attempt()

    encode(encoder(), days[1], tmp_path / "1.npz", states=tmp_path / "t.arrow", progress=callback)
    assert days_in(tmp_path / "t.arrow") == [1]
    assert not list(tmp_path.glob("*.work"))


def test_outputs_of_an_interrupted_run_are_not_replaced(tmp_path, days, tight, monkeypatch):
    interrupt(monkeypatch, encoder(), days[:2], tmp_path / "s.arrow", after=1)
    with pytest.raises(setfold.InputError, match=r"earlier run for .*s\.arrow was interrupted"):
        encode(encoder(), days[1], tmp_path / "o.npz", states=tmp_path / "s.arrow", overwrite=True)
    assert encode(encoder(), days[:2], tmp_path / "s.arrow", resume=True).elements == 120
