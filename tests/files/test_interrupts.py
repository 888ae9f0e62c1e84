"""Ctrl-C and full disks: what is kept, what the message says, and how to continue."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import signal
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import setfold
from setfold import cli
from setfold.cli import files as commands
from setfold.core import persist
from setfold.files import api, journal, outputs, run, work_folder
from setfold.files.outputs import ParquetSink
from setfold.files.tables import store
from tests.files.files import encode, encoder, rows, write


def typed(*words):
    result = CliRunner().invoke(cli.app, [str(word) for word in words], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def at_call(patch, owner, name, number, action, after=False):
    """Do something at the n-th call of a function, before or after it."""
    original, calls = getattr(owner, name), itertools.count(1)

    def wrapped(*arguments, **options):
        now = next(calls) == number
        if now and not after:
            action()
        found = original(*arguments, **options)
        if now and after:
            action()
        return found

    patch.setattr(owner, name, wrapped)


@pytest.fixture(autouse=True)
def interruptible():
    """A process that a shell started in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    os.kill(os.getpid(), signal.SIGINT)  # Python raises KeyboardInterrupt when the call returns


MOMENTS = {
    "loading the model": (commands, "load_model", 1, "Run the same command with --resume"),
    "locking": (work_folder, "hold", 1, "There was no checkpoint yet"),
    "planning": (api, "build_plan", 1, "There was no checkpoint yet"),
    "reading": (store.Store, "add", 1, "There was no checkpoint yet"),
    "the first checkpoint": (journal, "write_atomically", 1, "There was no checkpoint yet"),
    "a later checkpoint": (journal, "write_atomically", 3, "kept in"),
    "merging": (store.Store, "drop_bucket", 2, "kept in"),
    "writing": (ParquetSink, "write", 1, "kept in"),
    "publishing": (work_folder, "_move", 1, "kept in"),
    "removing the checkpoint": (work_folder, "_discard_checkpoint", 1, "The outputs are complete"),
    "cleaning up": (work_folder.shutil, "rmtree", 1, "The outputs are complete"),
    "printing": (commands, "print_facts", 1, "Run the same command with --resume"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_says_what_is_kept(tmp_path, tight, monkeypatch, moment):
    folder, out = write(tmp_path / "in", rows(300, 30), files=2), tmp_path / "o.parquet"
    setfold.save(encoder(), tmp_path / "model")
    words = ["encode", tmp_path / "model", folder, "--set", "event", "--save-every", 0, "-o", out]
    owner, name, number, message = MOMENTS[moment]
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, number, press)
        code, _, errors = typed(*words)
    assert code == 130
    assert errors.startswith("setfold: interrupted. ")
    assert message in errors
    assert "--resume" in errors
    kept = "kept in" in errors or moment == "removing the checkpoint"
    assert (tmp_path / "o.parquet.work" / "journal").exists() == kept
    code, _, errors = typed(*words, "--resume")
    assert code == 0
    assert ("already complete" in errors) == (moment in ("cleaning up", "printing"))
    encode(encoder(), folder, tmp_path / "whole.parquet")
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert not list(tmp_path.glob("*.work"))


@pytest.mark.parametrize("command", ["merge", "readout"])
def test_every_command_explains_an_interrupt(tmp_path, monkeypatch, command):
    folder = write(tmp_path / "in", rows(60, 9), files=1)
    states, out = tmp_path / "s.arrow", tmp_path / "t.arrow"
    encode(encoder(), folder, tmp_path / "o.npz", states=states)
    words = [command, states, "--out", out]
    with monkeypatch.context() as patch:
        at_call(patch, work_folder, "_move", 1, press)
        code, _, errors = typed(*words)
    assert (code, "kept in" in errors) == (130, True)
    for _ in range(2):
        assert typed(*words, "--resume")[0] == 0
    assert out.exists()


def test_python_code_sees_the_note(tmp_path, tight, monkeypatch):
    with monkeypatch.context() as patch:
        at_call(patch, store.Store, "add", 3, press)
        with pytest.raises(KeyboardInterrupt) as caught:
            encode(encoder(), write(tmp_path / "in", rows()), tmp_path / "o.parquet")
    assert "o.parquet.work" in caught.value.__notes__[0]


def test_a_retry_in_the_shell_says_that_nothing_is_left_to_do(tmp_path):
    folder, out = write(tmp_path / "in", rows(60), files=1), tmp_path / "o.npz"
    setfold.save(encoder(), tmp_path / "model")
    words = ["encode", tmp_path / "model", folder, "--set", "event", "--out", out]
    first = typed(*words, "--json")
    again = typed(*words, "--json", "--resume")
    assert (first[0], again[0]) == (0, 0)
    assert again[2] == f"{out} is already complete; nothing was computed.\n"
    assert '"was_complete": true' in again[1]
    with pytest.raises(setfold.InputError, match="--overwrite"):
        typed(*words)
    assert typed(*words, "--overwrite")[0] == 0


# ---- full disks --------------------------------------------------------------------------------


def fill():
    raise OSError(errno.ENOSPC, "No space left on device")


WRITES = [
    (Path, "mkdir"),
    (store, "append"),
    (persist.tempfile, "mkstemp"),
    (run, "write_sorted_run"),
    (pa.ipc, "new_file"),
    (ParquetSink, "write"),
    (ParquetSink, "close"),
    (outputs, "_write_array"),
    (os, "fsync"),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", WRITES, ids=lambda place: place[1])
def test_a_full_disk_loses_nothing(tmp_path, tight, monkeypatch, place, after):
    folder, suffix = write(tmp_path / "in", rows(300, 30), files=2), "parquet"
    (folder / "part-2.parquet").write_bytes(b"PAR1")
    if place[0] is outputs:
        suffix = "npz"

    def attempt(name):
        out, states = tmp_path / name / f"o.{suffix}", tmp_path / name / "s.arrow"
        return encode(encoder(), folder, out, states=states, skip_errors=True, resume=True)

    for name in ("parts", "whole"):
        (tmp_path / name).mkdir()
    errors = []
    for number in (1, 2, 5):
        with monkeypatch.context() as patch:
            at_call(patch, *place, number, fill, after)
            try:
                attempt("parts")
                break  # it writes less often
            except setfold.FileError as error:
                errors.append(error)  # it keeps files open, which must not matter
        assert not (tmp_path / "parts" / f"o.{suffix}").exists()
    assert errors
    for text in map(str, errors):
        assert "is full. Free some space" in text
        assert "--resume" in text
    attempt("parts")
    errors.clear()
    gc.collect()
    attempt("whole")
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "parts" / path.name).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "parts").iterdir())) == 3


def test_the_disk_that_is_full_may_be_another_one(tmp_path, monkeypatch):
    folder, out = write(tmp_path / "in", rows(60), files=1), tmp_path / "o.npz"
    (tmp_path / "other").mkdir()
    states, original = tmp_path / "other" / "s.arrow", Path.replace

    def replace(path, target):
        if Path(target) == states and path.parent != states.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return original(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    with monkeypatch.context() as patch:
        at_call(patch, work_folder.shutil, "copyfile", 1, fill, after=True)
        with pytest.raises(setfold.FileError, match=r"disk of .*s\.arrow is full.*--resume"):
            encode(encoder(), folder, out, states=states)
    assert not list((tmp_path / "other").iterdir())
    assert encode(encoder(), folder, out, states=states, resume=True).elements == 60
    assert not list(tmp_path.rglob("*.work"))


def test_a_full_disk_while_a_model_is_saved(tmp_path, monkeypatch):
    setfold.save(encoder(), tmp_path / "model")
    before = (tmp_path / "model").read_bytes()
    for place in ((persist.tempfile, "mkstemp"), (os, "fsync")):
        with monkeypatch.context() as patch:
            at_call(patch, *place, 1, fill)
            with pytest.raises(setfold.FileError, match=r"model: the disk is full\. Free some"):
                setfold.save(encoder(slots="learned"), tmp_path / "model")
    assert (tmp_path / "model").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
