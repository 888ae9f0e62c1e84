"""Locks exclude other processes, also while the locked file is removed."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import pytest

from setfold.core import persist
from setfold.core.persist import hold
from tests.paused import Paused


class Inside:
    @staticmethod
    def stop():
        """Where a process stops while it holds a lock."""


def contend(path, place, wait):
    """Start a process that stops at a place while it takes a lock, and then while it holds it."""

    def work():
        with hold(path, wait=wait) as locked:
            Inside.stop()
            return locked

    return Paused(work, place, (Inside, "stop"))


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize(
    "place",
    [(Path, "mkdir"), (Path, "open"), (fcntl, "flock")],
    ids=["before it creates the folder", "before it opens the file", "before it locks the file"],
)
def test_a_lock_that_is_removed_meanwhile_is_not_held(tmp_path, place, wait):
    path = tmp_path / "work" / "lock"
    with hold(path, wait=False) as locked:
        assert locked
        other = contend(path, place, wait)
        shutil.rmtree(path.parent)
    other.go_on()
    with hold(path, wait=False) as locked:
        assert not locked
    assert other.result() is True
    with hold(path, wait=False) as locked:
        assert locked


def test_a_lock_that_is_removed_after_an_attempt_is_not_held_by_others(tmp_path):
    path = tmp_path / "work" / "lock"
    with hold(path, wait=False):
        other = contend(path, (persist, "_is_at"), wait=False)  # it could not lock the file
        shutil.rmtree(path.parent)
    other.go_on()
    assert other.result() is True


def test_a_new_lock_at_the_same_place_counts(tmp_path):
    path = tmp_path / "work" / "lock"
    with hold(path, wait=False):
        other = contend(path, (fcntl, "flock"), wait=False)
        shutil.rmtree(path.parent)
    with hold(path, wait=False) as locked:
        assert locked
        other.go_on()
        assert other.result() is False


def test_what_is_no_folder_is_an_error(tmp_path):
    (tmp_path / "work").write_text("a file")
    with pytest.raises(NotADirectoryError), hold(tmp_path / "work" / "lock", wait=False):
        pass
