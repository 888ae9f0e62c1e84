from __future__ import annotations

import errno
import os
import re

import pytest

import setfold
from setfold.exporting.folder import MANIFEST, check_replaceable, is_export, write_manifest, writing
from tests.files.disk import Disk
from tests.killed import die_around


def write(folder, text):
    """Write an export of two files."""
    with writing(folder) as temporary:
        (temporary / "one.onnx").write_text(text)
        (temporary / "two.onnx").write_text(text)
        write_manifest(temporary, {"text": text})


def text_of(folder):
    """The text of a complete export; None for anything else."""
    if not is_export(folder) or len(os.listdir(folder)) != 3:
        return None
    texts = {(folder / name).read_text() for name in ("one.onnx", "two.onnx")}
    return texts.pop() if len(texts) == 1 else None


def test_a_folder_has_the_permissions_of_others(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    write(tmp_path / "out", "a")
    for made, usual in (("out", "other"), ("out/one.onnx", "other/file")):
        assert (tmp_path / made).stat().st_mode == (tmp_path / usual).stat().st_mode


@pytest.mark.parametrize("exists", [False, True])
def test_an_error_leaves_everything_as_it_was(tmp_path, exists):
    if exists:
        write(tmp_path / "out", "old")

    def interrupted():
        with writing(tmp_path / "out") as temporary:
            (temporary / "one.onnx").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == ["out"] * exists
    assert text_of(tmp_path / "out") == ("old" if exists else None)


def test_a_full_disk(tmp_path):
    with pytest.raises(setfold.FileError, match="the disk is full"), writing(tmp_path / "out"):
        raise OSError(errno.ENOSPC, "no space")
    assert not os.listdir(tmp_path)


def test_a_rename_that_fails_brings_the_old_folder_back(tmp_path, monkeypatch):
    write(tmp_path / "out", "old")
    rename, calls = os.rename, iter([False, True, False])

    def fail(source, target):
        if next(calls):
            raise PermissionError
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(PermissionError):
        write(tmp_path / "out", "new")
    assert (os.listdir(tmp_path), text_of(tmp_path / "out")) == (["out"], "old")


def test_a_kill_leaves_a_complete_folder(tmp_path):
    """Killed at any moment around a change: never half of a folder, and never none at the end."""
    seen = []
    for moment in range(1, 100):
        root = tmp_path / str(moment)
        root.mkdir()
        write(root / "out", "old")
        process = os.fork()
        if not process:
            die_around(moment, "rename", "mkdtemp", "fsync", "write_text", "rmtree")
            write(root / "out", "new")
            os._exit(0)
        killed = os.waitpid(process, 0)[1] != 0
        seen.append(text_of(root / "out") if (root / "out").exists() else "none")
        if seen[-1] == "none":  # between two renames
            (hidden,) = root.glob(".out.*.old")
            assert text_of(hidden) == "old"
        if not killed:
            break
        write(root / "again", "next")  # what is left over is in nobody's way
    assert list(dict.fromkeys(seen)) == ["old", "none", "new"]


def test_a_power_loss_leaves_a_complete_folder(tmp_path, monkeypatch):
    disk = Disk(str(tmp_path))
    with disk.watched(monkeypatch):
        write(tmp_path / "out", "new")
    disk.close()
    complete = {f"out/{name}" for name in ("one.onnx", "two.onnx", MANIFEST)}
    for state in disk.states.values():
        found = {path: content for path, content in state.items() if path.startswith("out/")}
        assert not found or (complete == found.keys() and all(c[0] for c in found.values()))


@pytest.mark.parametrize(
    ("make", "overwrite", "error", "message"),
    [
        (lambda p: None, False, None, ""),
        (lambda p: p.mkdir(), False, None, ""),
        (lambda p: write(p, "a"), True, None, ""),
        (lambda p: write(p, "a"), False, setfold.InputError, "overwrite=True"),
        (lambda p: p.write_text("a"), True, setfold.InputError, "never replaced"),
        (lambda p: (p / "sub").mkdir(parents=True), True, setfold.InputError, "never replaced"),
        (
            lambda p: (write(p, "a"), (p / "notes.txt").touch()),
            True,
            setfold.InputError,
            "or not only, an export of setfold",
        ),
        (
            lambda p: (p.mkdir(), (p / MANIFEST).write_text("[" * 100_000)),
            True,
            setfold.InputError,
            "never replaced",
        ),
    ],
    ids=["absent", "empty", "replaced", "kept", "file", "folder", "more files", "damaged"],
)
def test_what_is_replaced(tmp_path, make, overwrite, error, message):
    path = tmp_path / "out"
    make(path)
    if error is None:
        check_replaceable(path, overwrite=overwrite)
        write(path, "new")
        assert text_of(path) == "new"
        return
    with pytest.raises(error, match=re.escape(message)):
        check_replaceable(path, overwrite=overwrite)


def test_the_current_folder_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(setfold.InputError, match="the current folder"):
        check_replaceable(tmp_path, overwrite=True)


def test_the_folder_around_it_must_exist(tmp_path):
    with pytest.raises(setfold.FileError, match="Create it first"):
        check_replaceable(tmp_path / "a" / "b", overwrite=False)
