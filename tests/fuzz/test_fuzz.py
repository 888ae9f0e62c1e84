"""A few mutations of every kind of file; many with: make stress."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.examples import ROOT
from tests.files.readers.written import FORMATS
from tests.fuzz.inputs import INPUTS
from tests.fuzz.kinds import KINDS

FEW, MANY = 12, 10_000


def run(*words):
    command = [sys.executable, "-m", "tests.fuzz", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_damaged_files_are_refused_or_right():
    report = run("--count", str(FEW), "--at-once", "1")
    assert all(f"{name}:" in report for name in KINDS)


def test_every_format_is_fuzzed():
    suffixes = {form.suffix.lower() for kind in INPUTS for form in kind.forms}
    same = {".pq": ".parquet", ".h5": ".hdf5", ".pth": ".pt"}  # names of one format
    assert {same.get(form.suffix.lower(), form.suffix) for form in FORMATS.values()} <= suffixes | {
        *same.values()
    }


@pytest.mark.skipif(
    not os.environ.get("SETFOLD_STRESS"), reason="takes minutes; set SETFOLD_STRESS=1 to run"
)
@pytest.mark.parametrize("name", KINDS)
def test_many_damaged_files_are_refused_or_right(name):
    run(name, "--count", str(MANY))
