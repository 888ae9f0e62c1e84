"""Files of elements: their space on disk is taken before they are mapped."""

from __future__ import annotations

import errno
import os

import pytest

import setfold
from setfold.learning import dataset

SHAPE = (5, 3)


@pytest.fixture
def full_disk(monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)


def test_a_full_disk_is_an_error_and_no_signal(tmp_path, full_disk):
    for make in (
        lambda: dataset._temporary(tmp_path, SHAPE),
        lambda: dataset._mapped(tmp_path / "elements", "w+", SHAPE),
    ):
        with pytest.raises(setfold.FileError, match=r"No space left on device\. Free some space"):
            make()


def test_what_one_process_writes_another_reads(tmp_path):
    written = dataset._mapped(tmp_path / "elements", "w+", SHAPE)
    written[:] = 7
    assert (tmp_path / "elements").stat().st_size == 4 * 5 * 3
    assert dataset._mapped(tmp_path / "elements", "c", SHAPE).min() == 7
