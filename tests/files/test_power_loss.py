"""A power loss at any moment: outputs are old or new, and a resumed run ends with the same bytes."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from setfold.core.persist import write_atomically
from setfold.files import plan
from setfold.files.budget import Budget
from setfold.files.tables import spill
from tests.files.disk import Disk, restore
from tests.files.files import encode, encoder, interrupt, rows, write

FSYNC = os.fsync


def states_after_power_loss(monkeypatch, root, run):
    """Run something, and return the states in which a power loss could leave a folder."""
    disk = Disk(root)
    with disk.watched(monkeypatch):
        run()
    disk.close()
    monkeypatch.setattr(os, "fsync", lambda _: None)  # from now on, it takes time for nothing
    return [*disk.states.values()], disk.survivor()


def contents_of(folder, *names):
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


@pytest.fixture
def durable(tight, monkeypatch):
    """The same as `tight`, but files are synced."""
    monkeypatch.setattr(os, "fsync", FSYNC)


@pytest.fixture
def tighter(durable, monkeypatch):
    """So little memory that almost everything is spilled, into few buckets."""
    monkeypatch.setattr(plan, "split_memory", lambda *_: Budget(batch_rows=64, store_bytes=7000))
    monkeypatch.setattr(spill, "BUCKETS", 2)


def check(monkeypatch, root, run, *outputs):
    """Let the power fail at any moment of a run."""
    before = contents_of(root, *outputs)
    states, survivor = states_after_power_loss(monkeypatch, root, run)
    after = contents_of(root, *outputs)
    assert {name: survivor[name][0] for name in outputs if name in survivor} == after
    assert not [path for path in survivor if path.endswith("/journal")]
    for state in states:
        shutil.rmtree(root)
        root.mkdir()
        restore(root, state)
        left = contents_of(root, *outputs)
        for name in outputs:
            assert left.get(name) in (before.get(name), after.get(name))
        run()
        assert contents_of(root, *outputs) == after
        assert not list(root.glob("*.work"))


def test_encoding(tmp_path, tighter, monkeypatch):
    folder, root = write(tmp_path / "in", rows(130, 12), files=1), tmp_path / "disk"
    (folder / "part-2.parquet").write_bytes(b"PAR1")
    root.mkdir()
    spills = []

    def run():
        options = {"states": root / "s.arrow", "skip_errors": True, "resume": True}
        spills.append(encode(encoder(), folder, root / "o.parquet", **options).spills)

    check(monkeypatch, root, run, "o.parquet", "s.arrow", "o.parquet.skipped.jsonl")
    assert spills[0] == 2  # the second time, files grow that a checkpoint knows


def test_replacing_outputs(tmp_path, durable, monkeypatch):
    folder, root = write(tmp_path / "in", rows(100, 9), files=1), tmp_path / "disk"
    root.mkdir()
    (root / "o.npz.skipped.jsonl").write_text("the list of an earlier run")
    encode(encoder(), folder / "part-0.parquet", root / "o.npz", features="f2,f1,f0")

    def run():
        encode(encoder(), folder, root / "o.npz", resume=True, overwrite=True)

    check(monkeypatch, root, run, "o.npz", "o.npz.skipped.jsonl")
    assert not (root / "o.npz.skipped.jsonl").exists()


def test_outputs_on_different_disks(tmp_path, durable, monkeypatch):
    folder, root = write(tmp_path / "in", rows(100, 9), files=1), tmp_path / "disk"
    (root / "other").mkdir(parents=True)
    original = Path.replace

    def replace(path, target):
        if Path(target).parent != path.parent and Path(target).parent.name == "other":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return original(path, target)

    monkeypatch.setattr(Path, "replace", replace)

    def run():
        encode(encoder(), folder, root / "o.npz", states=root / "other/s.arrow", resume=True)

    check(monkeypatch, root, run, "o.npz", "other/s.arrow")


def test_writing_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")
    states, survivor = states_after_power_loss(
        monkeypatch, tmp_path, lambda: write_atomically(tmp_path / "file", b"new")
    )
    assert {state["file"][0] for state in states} == {b"old", b"new"}
    assert survivor["file"][0] == b"new"


def test_checkpoints_survive(tmp_path, durable, monkeypatch):
    folder, root = write(tmp_path / "in", rows(300, 60), files=1), tmp_path / "disk"
    root.mkdir()
    _, survivor = states_after_power_loss(
        monkeypatch,
        root,
        lambda: interrupt(monkeypatch, encoder(), folder, root / "o.parquet", after=4),
    )
    shutil.rmtree(root)
    root.mkdir()
    restore(root, survivor)
    reports = []
    encode(encoder(), folder, root / "o.parquet", resume=True, progress=reports.append)
    assert reports[0].resumed_at > 0
