"""Encodings as CSV: the same numbers, and what a file without a seal still guarantees."""

from __future__ import annotations

import csv
import io

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import setfold
from setfold.files import run
from tests.files.files import assert_encodes, encode, encoder, rows, stopping, write


def test_the_numbers_are_those_of_parquet(tmp_path):
    table = rows(names=lambda number: f'a,"{number}"\n')
    folder = write(tmp_path / "in", table)
    for name in ("out.csv", "out.parquet"):
        encode(encoder(), folder, tmp_path / name, states=tmp_path / "s.arrow", overwrite=True)
    assert_encodes(tmp_path / "out.parquet", encoder(), table)
    wanted = pq.read_table(tmp_path / "out.parquet")
    frame = pd.read_csv(tmp_path / "out.csv", dtype={"set": str})
    assert list(frame.columns) == ["set", "count", *(f"encoding_{n}" for n in range(20))]
    assert frame["set"].tolist() == wanted["set"].to_pylist()
    assert frame["count"].tolist() == wanted["count"].to_pylist()
    found = frame.iloc[:, 2:].to_numpy(np.float32)
    np.testing.assert_array_equal(found, np.array(wanted["encoding"].to_pylist(), np.float32))
    setfold.readout_states(tmp_path / "s.arrow", tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "out.csv").read_bytes()


def test_no_sets(tmp_path):
    folder = write(tmp_path / "in", rows()[:0], 1)
    encode(encoder(), folder, tmp_path / "out.csv")
    (header,) = csv.reader(io.StringIO((tmp_path / "out.csv").read_text()))
    assert len(header) == 22


@pytest.mark.parametrize("after", [True, False])
def test_a_run_that_was_interrupted_when_it_was_complete(tmp_path, monkeypatch, after):
    folder, out = write(tmp_path / "in", rows()), tmp_path / "out.csv"
    encode(encoder(), folder, tmp_path / "wanted.csv")
    with stopping(monkeypatch, run, "publish_outputs", 1, after):
        encode(encoder(), folder, out)
    assert out.exists() == after
    encode(encoder(), folder, out, resume=True)
    assert out.read_bytes() == (tmp_path / "wanted.csv").read_bytes()
    assert not (tmp_path / "out.csv.work").exists()


def test_damage_of_a_complete_output_is_noticed(tmp_path, monkeypatch):
    folder, out = write(tmp_path / "in", rows()), tmp_path / "out.csv"
    with stopping(monkeypatch, run, "publish_outputs", 1, False):
        encode(encoder(), folder, out)
    path = tmp_path / "out.csv.work" / "output-0"
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(setfold.FileError, match="damaged"):
        encode(encoder(), folder, out, resume=True)


def test_a_complete_file_is_not_replaced(tmp_path):
    folder, out = write(tmp_path / "in", rows()), tmp_path / "out.csv"
    encode(encoder(), folder, out)
    for resume in (True, False):
        with pytest.raises(setfold.InputError, match=r"exists.*--overwrite"):
            encode(encoder(), folder, out, resume=resume)
    encode(encoder(), folder, out, overwrite=True)


def test_ids_that_are_no_text_are_refused(tmp_path):
    table = rows().set_column(0, "event", pa.array([b"\xff"] * 600))
    folder = write(tmp_path / "in", table)
    with pytest.raises(setfold.InputError, match=r"out\.csv cannot store"):
        encode(encoder(), folder, tmp_path / "out.csv")
