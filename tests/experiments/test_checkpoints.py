from __future__ import annotations

import itertools
import random
import signal
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from experiments import records, training
from experiments.recipe import Training
from setfold.core import persist as files
from setfold.learning import checkpoints, loop
from tests.experiments.tiny import Line, Noise, checkpoint, fit, interrupt_at
from tests.killed import calls_of, die_at
from tests.torchrun import as_torchrun, fork


def content(folder):
    """All that a finished training leaves, but for how long it took and with how many threads."""
    _, tensors, description = files.read(checkpoint(folder))
    for name in ("seconds", "cpu_seconds"):
        description["standing"].pop(name)
    description["circumstances"]["machine"].pop("threads")
    texts = [(folder / name).read_text() for name in ("settings.json", "history.csv")]
    return {name: tensor.tolist() for name, tensor in tensors.items()}, description, *texts


def test_killed_at_any_moment_it_ends_with_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(loop, "LOOK_EVERY", 0.0)
    wanted = Training(Noise(), 12, 8, validations=4, clip=1.0)
    whole = fit(wanted, tmp_path / "whole")  # imports what it needs, too
    calls = calls_of(lambda: fit(wanted, tmp_path / "again"))

    def run_until(call):
        die_at(call)
        fit(wanted, tmp_path / "parts")

    codes, steps, generator = [], 0, random.Random(0)
    while len(codes) < 5 and 0 not in codes:
        process = fork(run_until, generator.randrange(calls // 2))
        process.join()
        codes.append(process.exitcode)
        found = list(tmp_path.glob("parts/trainings/*/" + training.NAME))
        if found:
            reached = files.read(found[0])[2]["standing"]["step"]
            assert reached >= steps
            steps = reached
    assert codes[0] == -signal.SIGKILL
    assert set(codes) <= {0, -signal.SIGKILL}
    assert steps > 0
    parts = fit(wanted, tmp_path / "parts")
    assert content(parts.folder) == content(whole.folder)
    assert parts.history == whole.history
    for mine, theirs in zip(
        parts.model.state_dict().values(), whole.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("step", [1, 6, 7, 13])
def test_interrupted_at_a_step_it_ends_with_the_same_bits(tmp_path, monkeypatch, step):
    wanted = Training(Noise(), 2, 8, validations=2)
    whole = fit(wanted, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            fit(wanted, tmp_path / "parts")
    parts = fit(wanted, tmp_path / "parts")
    assert content(parts.folder) == content(whole.folder)


@pytest.mark.parametrize("step", [1, 7])
def test_cpu_time_before_a_resume_counts(tmp_path, monkeypatch, step):
    ticks = itertools.count()  # every save reads the clock once, and so does every start
    monkeypatch.setattr(loop.time, "process_time", lambda: float(next(ticks)))
    monkeypatch.setattr(loop, "SAVE_EVERY", 0.0)
    monkeypatch.setattr(loop, "LOOK_EVERY", 0.0)
    wanted = Training(Noise(), 2, 8, validations=2)
    whole = fit(wanted, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_at(patch, step)
        with pytest.raises(KeyboardInterrupt):
            fit(wanted, tmp_path / "parts")
    assert fit(wanted, tmp_path / "parts").cpu_seconds == whole.cpu_seconds > step


@pytest.mark.parametrize("saves", [1, 2, 3])
@pytest.mark.parametrize("written", [False, True])
def test_stopped_just_before_or_after_a_checkpoint(tmp_path, monkeypatch, saves, written):
    wanted = Training(Noise(), 3, 8, validations=3)
    whole = fit(wanted, tmp_path / "whole")
    write, calls = checkpoints.write, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) < saves or written:
            write(*arguments)
        if len(calls) == saves:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(wanted, tmp_path / "parts")
    parts = fit(wanted, tmp_path / "parts")
    assert content(parts.folder) == content(whole.folder)


def test_another_seed_is_another_training(tmp_path):
    first, second = (fit(Training(Noise(), 1, 8, seed=seed), tmp_path) for seed in (0, 1))
    assert first.folder != second.folder
    assert content(first.folder)[0] != content(second.folder)[0]


def test_finished_trainings_are_found(tmp_path, monkeypatch):
    wanted = Training(Line(), 3, 8, validations=3)
    first = fit(wanted, tmp_path)
    monkeypatch.setattr(Line, "loss", None)
    again = fit(wanted, tmp_path)
    assert torch.equal(first.model.weight, again.model.weight)
    assert (first.history, first.seconds) == (again.history, again.seconds)
    assert not again.model.training
    assert first.folder.name == f"line-{wanted.key}"
    assert first.folder.parent == tmp_path / "trainings"


def test_checkpoints_of_finished_trainings_are_small(tmp_path):
    folder = fit(Training(Line(), 3, 8), tmp_path).folder
    assert set(files.read(checkpoint(folder))[1]) == {"best/weight"}


# ---- in what circumstances -----------------------------------------------------------------


def by_commit(monkeypatch, commit):
    """Let the code be that of a commit."""
    monkeypatch.setattr(records, "commit", lambda: commit)


def test_checkpoints_tell_in_what_circumstances_they_came_about(tmp_path, monkeypatch):
    by_commit(monkeypatch, "abc")
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/liballocator.so")  # for processes that start later
    trained = fit(Training(Line(), 1, 8), tmp_path, precision="bf16-mixed")
    description = files.read(checkpoint(trained.folder))[2]
    assert set(description) == {"settings", "circumstances", "standing"}
    assert description["circumstances"] == {
        "commit": "abc",
        "versions": records.versions(),
        "machine": {
            **records.cpu(),
            "device": "cpu",
            "precision": "bf16-mixed",
            "threads": torch.get_num_threads(),
            "processes": 1,
            "preloaded": "liballocator.so",
        },
    }
    assert asdict(trained.circumstances) == description["circumstances"]


def test_finished_trainings_keep_their_circumstances(tmp_path, monkeypatch):
    wanted = Training(Line(), 1, 8)
    by_commit(monkeypatch, "abc")
    assert as_torchrun(fit, wanted, tmp_path) == [0, 0]
    by_commit(monkeypatch, "def")
    found = fit(wanted, tmp_path).circumstances
    assert (found.commit, found.machine["processes"]) == ("abc", 2)


def test_trainings_name_all_code_that_was_at_them(tmp_path, monkeypatch):
    wanted = Training(Line(), 1, 8)
    for commit, step in (("abc", 1), ("abc", 1), ("def", 2), ("ghi", 2)):
        with monkeypatch.context() as patch:
            by_commit(patch, commit)
            interrupt_at(patch, step)
            with pytest.raises(KeyboardInterrupt):
                fit(wanted, tmp_path)
    by_commit(monkeypatch, "abc")  # "ghi" did not do a step
    assert fit(wanted, tmp_path).circumstances.commit == "abc, def"
    by_commit(monkeypatch, "jkl")
    tuned = replace(wanted, start=wanted)
    assert fit(tuned, tmp_path).circumstances.commit == "abc, def, jkl"


def test_checkpoints_of_other_versions_are_renamed(tmp_path):
    wanted = Training(Line(), 1, 8)
    path = checkpoint(fit(wanted, tmp_path).folder)
    kind, tensors, description = files.read(path)
    del description["circumstances"]
    files.write(path, kind, tensors, description)
    with pytest.warns(UserWarning, match="another version of this code"):
        fit(wanted, tmp_path)


# ---- damaged -------------------------------------------------------------------------------


def damage_truncated(path, other):
    path.write_bytes(path.read_bytes()[:-5])


def damage_bit(path, other):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage_foreign(path, other):
    path.write_bytes(checkpoint(other).read_bytes())


def damage_nonsense(path, other):
    path.write_bytes(b"nonsense")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_truncated, "truncated"),
        (damage_bit, "checksum"),
        (damage_foreign, "different settings"),
        (damage_nonsense, "safetensors"),
    ],
)
def test_damaged_checkpoints_are_renamed(tmp_path, damage, reason):
    wanted = Training(Line(), 3, 8)
    good = fit(wanted, tmp_path)
    other = fit(replace(wanted, seed=1), tmp_path).folder
    damage(checkpoint(good.folder), other)
    bad = checkpoint(good.folder).read_bytes()
    with pytest.warns(UserWarning, match=rf"{reason}[\s\S]*starts from scratch"):
        again = fit(wanted, tmp_path)
    assert torch.equal(good.model.weight, again.model.weight)
    assert [aside.read_bytes() for aside in good.folder.glob("*.aside-*")] == [bad]


def test_weights_of_a_model_that_has_changed_are_renamed(tmp_path, monkeypatch):
    wanted = Training(Line(), 1, 8)
    fit(wanted, tmp_path)
    monkeypatch.setattr(Line, "build", lambda self: nn.Linear(3, 1, bias=True))
    with pytest.warns(UserWarning, match="do not match the model"):
        assert fit(wanted, tmp_path).model.bias is not None
