from __future__ import annotations

import io
import json
import os
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from experiments import records, running, training
from experiments.recipe import Run, Size, Training
from experiments.running import Options
from setfold import FileError
from tests.experiments.tiny import Line, quiet, recipe
from tests.torchrun import as_torchrun, finish, fork


def run(out, tiny=None, seeds=None, console=None, size=Size.SMOKE, **options):
    return running.run(
        [tiny or recipe()],
        size,
        seeds,
        options=Options(out, "cpu", **options),
        console=console or quiet(),
    )


def read(out, size=Size.SMOKE):
    return records.read(out / "records" / size, "tiny")


def test_every_run_is_recorded(tmp_path):
    assert run(tmp_path, size=Size.SMALL) == []
    found = read(tmp_path, Size.SMALL)
    assert Counter((record.method, record.seed) for record in found) == {
        (method, seed): count
        for seed in (0, 1)
        for method, count in (("slow", 2), ("quick", 2), ("count", 1))
    }
    one, two = (record for record in found if record.method == "slow" and record.seed == 1)
    assert (one.settings, two.settings) == ({"power": 1}, {"power": 2})
    assert two.metrics["size"] == pytest.approx(one.metrics["size"] ** 2)
    assert one.history["epoch"] == [1.0, 2.0]
    assert one.training["task"]["kind"] == "Line"
    assert (one.training["rate"], one.training["seed"]) == (0.01, 1)
    assert one.parameters == 3
    assert one.cpu_seconds > 0
    assert {record.cpu_seconds for record in found if record.method == "count"} == {None}
    assert one.command == "python -m experiments run tiny --size small --seed 1 --device cpu"
    assert one.machine["threads"] == torch.get_num_threads()
    assert (one.machine["device"], one.machine["precision"]) == ("cpu", "32-true")
    assert len(list((tmp_path / "trainings").iterdir())) == 4  # two points share a training


def test_runs_without_training_draw_from_their_seed(tmp_path):
    run(tmp_path / "a", seeds=[0, 1])
    run(tmp_path / "b", seeds=[1])
    a, b = (
        {record.seed: record.metrics["draws"] for record in read(out) if record.method == "count"}
        for out in (tmp_path / "a", tmp_path / "b")
    )
    assert a[0] != a[1] == b[1]


def counted(tiny, counts):
    """The recipe, with each measurement counted."""

    def runs(size, seed):
        for place, wanted in enumerate(tiny.runs(size, seed)):

            def measure(model, place=place, wanted=wanted):
                counts[place] += 1
                return wanted.measure(model)

            yield replace(wanted, measure=measure)

    return replace(tiny, runs=lambda size, seed: list(runs(size, seed)))


def test_recorded_runs_are_not_run_again(tmp_path):
    counts = Counter()
    tiny = counted(recipe(), counts)
    run(tmp_path, tiny)
    run(tmp_path, tiny)
    assert counts == dict.fromkeys(range(5), 1)
    run(tmp_path, tiny, again=True)
    assert counts == dict.fromkeys(range(5), 2)
    assert len(read(tmp_path)) == 5


def test_other_training_settings_are_run(tmp_path):
    counts = Counter()
    tiny = counted(recipe(), counts)
    run(tmp_path, tiny)

    def longer(size, seed):
        first, *others = tiny.runs(size, seed)
        return [replace(first, training=replace(first.training, epochs=3)), *others]

    run(tmp_path, replace(tiny, runs=longer))
    assert counts == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1}
    assert len(read(tmp_path)) == 5
    assert {record.training["epochs"] for record in read(tmp_path) if record.training} == {2, 3}


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    class Broken(Line):
        def loss(self, model, batch):
            return super().loss(model, batch) * float("inf")

    tiny = recipe()
    bad = Run("bad", Training(Broken(), 1, 8), lambda model: {})
    tiny = replace(tiny, runs=lambda size, seed: [bad, *recipe().runs(size, seed)])
    text = io.StringIO()
    (failure,) = run(tmp_path, tiny, console=Console(file=text))
    assert "tiny: bad, seed 0: the loss is inf at step 0" in failure
    assert "failed: the loss is inf" in text.getvalue()
    assert len(read(tmp_path)) == 5


def test_an_error_that_stops_many_runs_is_printed_once(tmp_path):
    def missing(model):
        raise FileError("the data is missing:\ndownload it.")

    def runs(size, seed):
        whole, *others, last = recipe().runs(size, seed)
        return [whole, *(replace(other, measure=missing) for other in others), last]

    text = io.StringIO()
    failures = run(tmp_path, replace(recipe(), runs=runs), seeds=[0, 1], console=Console(file=text))
    assert failures == [
        "6 runs, first tiny: slow, power 2, seed 0: the data is missing:\ndownload it."
    ]
    assert text.getvalue().count("download it.") == 1
    assert text.getvalue().count("failed: same error as tiny: slow, power 2, seed 0\n") == 5
    assert "[10 of 10] tiny: count, seed 1" in text.getvalue()
    assert len(read(tmp_path)) == 4


def test_records_tell_in_what_circumstances_the_training_was_made(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "commit", lambda: "abc")
    assert as_torchrun(lambda: run(tmp_path)) == [0, 0]
    monkeypatch.setattr(records, "commit", lambda: "def")
    run(tmp_path, again=True)
    found = {
        record.method: (
            record.commit,
            record.machine["processes"],
            record.command.split(" run ")[0],
        )
        for record in read(tmp_path)
    }
    trained = ("abc", 2, "torchrun --nproc-per-node 2 -m experiments")
    assert found == {
        "slow": trained,
        "quick": trained,
        "count": ("def", 1, "python -m experiments"),
    }


def test_interrupted_runs_go_on(tmp_path):
    counts = Counter()
    tiny = counted(recipe(), counts)

    def interrupted(size, seed):
        def interrupt(model):
            raise KeyboardInterrupt

        found = tiny.runs(size, seed)
        found[2] = replace(found[2], measure=interrupt)
        return found

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, replace(tiny, runs=interrupted))
    assert len(read(tmp_path)) == 2
    run(tmp_path, tiny)
    assert counts == dict.fromkeys(range(5), 1)


def test_progress_tells_what_is_run_and_how_long_it_takes(tmp_path):
    text = io.StringIO()
    run(tmp_path, console=Console(file=text))
    lines = text.getvalue().splitlines()
    assert lines[0] == "[1 of 5] tiny: slow, power 1, seed 0"
    assert lines[4].startswith("[5 of 5] tiny: count, seed 0 (about ")


# ---- several processes ---------------------------------------------------------------------


def makers_in(folder):
    """The processes that left a note, by place and process, in a folder."""
    return {note.name.split("-")[1] for note in folder.iterdir()}


def noting(folder, makers=1):
    """A recipe whose measurements leave a note of who made them.

    Each measurement ends when a number of processes have made one: none does all the work before
    another has started.
    """
    tiny = recipe()

    def runs(size, seed):
        for place, wanted in enumerate(tiny.runs(size, seed)):

            def measure(model, place=place, wanted=wanted):
                (folder / f"{place}-{os.getpid()}").touch()
                while len(makers_in(folder)) < makers:
                    time.sleep(0.01)
                return wanted.measure(model)

            yield replace(wanted, measure=measure)

    return replace(tiny, runs=lambda size, seed: list(runs(size, seed)))


@pytest.mark.parametrize("again", [False, True])
def test_processes_share_the_work(tmp_path, monkeypatch, again):
    monkeypatch.setattr(running, "ASK_EVERY", 0.02)
    notes = tmp_path / "notes"
    notes.mkdir()
    out = tmp_path / "out"
    shared = noting(notes, makers=2)
    assert finish([fork(lambda: run(out, shared, again=again)) for _ in range(2)]) == [0, 0]
    places = [note.name.split("-")[0] for note in notes.iterdir()]
    assert sorted(places) == ["0", "1", "2", "3", "4"]  # each once
    assert len(makers_in(notes)) == 2
    assert len(read(out)) == 5


def test_processes_of_torchrun_measure_once(tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    assert as_torchrun(lambda: run(tmp_path, noting(notes))) == [0, 0]
    assert sorted(note.name.split("-")[0] for note in notes.iterdir()) == list("01234")
    assert len(makers_in(notes)) == 1
    assert {record.machine["processes"] for record in read(tmp_path)} == {2}
    lines = (tmp_path / "records" / "smoke" / "tiny.jsonl").read_text().splitlines()
    assert all(json.loads(line) for line in lines)


def test_one_process_waits_for_the_training_of_another(tmp_path, monkeypatch):
    # Another process is at the training of the first two runs: the others come first.
    monkeypatch.setattr(running, "ASK_EVERY", 0.02)
    tiny = recipe()
    wanted = tiny.runs(Size.SMOKE, 0)[0].training
    lock = tmp_path / "trainings" / f"line-{wanted.key}" / "lock"
    order = []
    with training.hold_together(running.launch("cpu").processes, lock) as held:
        assert held
        process = fork(lambda: run(tmp_path, tiny))
        while len(order) < 3 and process.is_alive():
            process.join(0.02)
            order = [record.method for record in read(tmp_path)]
        assert order == ["quick", "quick", "count"]
    assert finish([process]) == [0]
    assert [record.method for record in read(tmp_path)][3:] == ["slow", "slow"]
