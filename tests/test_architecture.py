"""ARCHITECTURE.md says how many files each flow passes through; this measures it."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import setfold
from setfold.cli import app
from setfold.native.library import choice

PACKAGE = Path(setfold.__file__).parent
TEXT = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
compiled = pytest.mark.skipif(
    not choice.kernels, reason="the numbers are those of compiled kernels"
)


def files_of(flow):
    """The files of setfold whose functions run, once everything is warm."""
    flow()
    seen = set()

    def note(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(PACKAGE)):
            seen.add(Path(name).relative_to(PACKAGE).as_posix())

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        flow()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return sorted(seen)


def encoder():
    return setfold.SlotSetEncoder(3, 4, 8, 8).eval()


@torch.no_grad()
def forward(model, sets):
    model(torch.ones(sets, 50, 3))


@torch.no_grad()
def update_merge_readout(model, sets):
    empty, elements = model.initial_state(sets), torch.ones(sets, 50, 3)
    left, right = model.update(empty, elements), model.update(empty, elements)
    model.readout(left.merge(right))


def exact_fold(model):
    setfold.fold(model, [torch.ones(1, 50, 3) for _ in range(3)]).sum().backward()


def said(pattern):
    (found,) = re.findall(pattern, TEXT)
    return [int(number) for number in (found if isinstance(found, tuple) else (found,))]


@compiled
def test_forward():
    model = encoder()
    numbers = [len(files_of(lambda sets=sets: forward(model, sets))) for sets in (2, 1)]
    assert numbers == said(r"batch passes through (\d+) files, one small set through (\d+)")


@compiled
def test_update_merge_readout():
    model = encoder()
    numbers = [
        len(files_of(lambda sets=sets: update_merge_readout(model, sets))) for sets in (2, 1)
    ]
    assert numbers == said(r"They pass through (\d+) files, for one small chunk through (\d+)")


@compiled
def test_exact_fold():
    model = encoder()
    assert [len(files_of(lambda: exact_fold(model)))] == said(r"This passes through (\d+) files:")


@compiled
def test_encode(tmp_path, capsys):
    model, rows, count = tmp_path / "model", tmp_path / "rows.parquet", iter(range(9))
    setfold.save(encoder(), model)
    columns = {name: np.linspace(0, 1, 100) for name in "abc"}
    pq.write_table(pa.table({"set": np.arange(100) % 7, **columns}), rows)

    def encode():
        out = tmp_path / f"{next(count)}.parquet"
        app(
            ["encode", str(model), str(rows), "--set", "set", "--out", str(out)],
            "setfold",
            None,
            False,
        )

    assert [len(files_of(encode))] == said(r"This passes through (\d+) files\.")


@compiled
def test_live_update(tmp_path):
    columns = {name: np.linspace(0, 1, 100) for name in "abc"}
    rows, count = pa.table({"set": np.arange(100) % 7, **columns}), iter(range(9))
    with setfold.live.create(tmp_path / "live.db", encoder()) as sets:
        files = files_of(lambda: sets.update(rows, set="set", batch=("orders", next(count))))
    assert [len(files)] == said(r"A small batch passes through (\d+) files")


@pytest.mark.parametrize(
    "path",
    re.findall(
        r"`((?:core|files|laws|live|folding|encoders|kernels|experiments)/[\w/]+\.py)`", TEXT
    ),
)
def test_named_files_exist(path):
    assert (PACKAGE / path).is_file() or (PACKAGE.parent / path).is_file()
