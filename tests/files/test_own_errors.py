"""Errors that a model raises: they name the row, which can be skipped, or stop the run at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import setfold
from setfold import cli
from tests.files.files import encode

KNOWN = 5  # categories that the model has seen
UNSEEN = [17, 18, 140]


class Categories(nn.Module):
    """A feature network for a category and a number; it raises for categories it has not seen."""

    def __init__(self, known):
        super().__init__()
        self.known = known
        self.table = nn.Embedding(known, 3)

    def forward(self, elements):
        return self.table(elements[:, 0].long()) * elements[:, 1:]


class Crowded(nn.Module):
    """It raises for several rows, whatever they are."""

    def forward(self, elements):
        if len(elements) > 1:
            raise RuntimeError("too many\nrows")
        return elements


class Exhausted(nn.Module):
    def forward(self, elements):
        if (elements > 0).any():
            raise MemoryError("no memory left")
        return elements


@pytest.fixture
def model():
    torch.manual_seed(0)
    return setfold.DeepSets(Categories(KNOWN), 3).eval()


def table(sets):
    """Rows of which three have an unseen category."""
    generator = np.random.default_rng(0)
    category = generator.integers(0, KNOWN, 200).astype(np.float32)
    category[UNSEEN] = KNOWN, -1, 99
    event = np.arange(200) if sets is None else generator.integers(0, sets, 200)
    return pa.table({"event": event, "category": category, "x": generator.random(200, np.float32)})


@pytest.mark.parametrize("sets", [2, None], ids=["as states", "as rows"])
def test_a_row_that_makes_the_model_raise_is_named(tmp_path, model, sets):
    pq.write_table(table(sets), tmp_path / "a.parquet")
    message = r"a\.parquet, row 17 .*the model raises IndexError: index out of range.*--on-error"
    with pytest.raises(setfold.FileError, match=message) as raised:
        encode(model, tmp_path / "a.parquet", tmp_path / "out.parquet")
    assert isinstance(raised.value.__cause__, IndexError)
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("sets", [2, None], ids=["as states", "as rows"])
def test_a_row_that_makes_the_model_raise_is_skipped(tmp_path, model, sets):
    rows = table(sets)
    pq.write_table(rows, tmp_path / "a.parquet")
    pq.write_table(rows.take(np.delete(np.arange(200), UNSEEN)), tmp_path / "good.parquet")
    summary = encode(model, tmp_path / "a.parquet", tmp_path / "out.parquet", skip_errors=True)
    encode(model, tmp_path / "good.parquet", tmp_path / "wanted.parquet")
    found, wanted = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("out", "wanted"))
    assert found.equals(wanted)
    assert summary.skipped == len(UNSEEN)
    lines = [json.loads(line) for line in Path(summary.report).read_text().splitlines()]
    assert [line["row"] for line in lines] == UNSEEN
    assert all("the model raises IndexError" in line["reason"] for line in lines)


def test_the_command_line_names_the_row_in_one_line(tmp_path, model):
    pq.write_table(table(2), tmp_path / "a.parquet")
    setfold.save(model, tmp_path / "model")
    command = ["encode", tmp_path / "model", tmp_path / "a.parquet", "--set", "event"]
    command += ["--out", tmp_path / "out.parquet", "--allow", f"{__name__}.Categories"]
    result = CliRunner().invoke(cli.app, list(map(str, command)))
    assert isinstance(result.exception, setfold.FileError)
    assert "row 17" in str(result.exception)
    assert "\n" not in str(result.exception)


def test_all_rows_of_a_file_may_be_bad(tmp_path, model):
    rows = table(2).set_column(1, "category", pa.array(np.full(200, 7, np.float32)))
    pq.write_table(rows, tmp_path / "a.parquet")
    summary = encode(model, tmp_path / "a.parquet", tmp_path / "out.parquet", skip_errors=True)
    assert (summary.skipped, summary.elements) == (200, 0)


@pytest.mark.parametrize("skip", [False, True])
def test_a_model_for_other_elements_is_refused_before_anything_is_read(tmp_path, skip):
    np.save(tmp_path / "a.npy", np.ones((1000, 4), np.float32))
    model = setfold.DeepSets(nn.Linear(3, 2), 2)
    seen = []
    with pytest.raises(setfold.InputError, match=r"elements of 4 numbers the model raises Runtime"):
        setfold.encode_sets(
            model,
            tmp_path / "a.npy",
            tmp_path / "out.npz",
            skip_errors=skip,
            progress=seen.append,
        )
    assert not seen


def test_a_model_with_nan_is_refused_before_anything_is_read(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((1000, 3), np.float32))
    model = setfold.SlotSetEncoder(3, 4, 6, 5)
    nn.init.constant_(model.to_key.weight, torch.nan)
    with pytest.raises(setfold.InputError, match="NaN or infinity even for zeros"):
        setfold.encode_sets(model, tmp_path / "a.npy", tmp_path / "out.npz", skip_errors=True)


@pytest.mark.parametrize("skip", [False, True])
def test_an_error_that_no_row_causes_stops_the_run(tmp_path, skip):
    np.save(tmp_path / "a.npy", np.ones((10, 3), np.float32))
    model = setfold.DeepSets(Crowded(), 3)
    message = r"a\.npy, rows 0 to 9: the model raises RuntimeError: too many rows, but not for any"
    with pytest.raises(setfold.InputError, match=message):
        setfold.encode_sets(model, tmp_path / "a.npy", tmp_path / "out.npz", skip_errors=skip)


def test_a_lack_of_memory_is_not_the_fault_of_a_row(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((10, 3), np.float32))
    with pytest.raises(MemoryError, match="no memory left"):
        setfold.encode_sets(
            setfold.DeepSets(Exhausted(), 3),
            tmp_path / "a.npy",
            tmp_path / "out.npz",
            skip_errors=True,
        )


class Picky(nn.Module):
    """A head that raises for some sets."""

    def forward(self, encoding):
        if (encoding > 90).any():
            raise ValueError("a set is\ntoo far away")
        return encoding


def far_sets(path, far):
    """Rows of 200 sets, of which some have elements that the head refuses."""
    event = np.arange(600) % 200
    x = np.where(np.isin(event, far), 100, 1).astype(np.float32)
    pq.write_table(pa.table({"event": event, "x": x}), path)
    return path


@pytest.mark.parametrize("far", [[7, 8, 199], range(200)], ids=["some", "all"])
def test_a_set_that_makes_the_head_raise_is_named_or_left_out(tmp_path, far):
    model = setfold.Composition(setfold.Pool(1), head=Picky())
    path, out = far_sets(tmp_path / "a.parquet", far), tmp_path / "out.parquet"
    message = rf"the set {far[0]} cannot be written: the model raises ValueError: a set is too far"
    with pytest.raises(setfold.InputError, match=message):
        encode(model, path, out, head=True)
    summary = encode(model, path, out, head=True, skip_errors=True, restart=True)
    left = [event for event in range(200) if event not in far]
    assert pq.read_table(out)["set"].to_pylist() == left
    assert (summary.sets, summary.skipped) == (len(left), len(far))
    lines = [json.loads(line) for line in Path(summary.report).read_text().splitlines()]
    assert [line["set"] for line in lines] == [str(event) for event in far]


def test_a_head_that_never_works_is_refused_before_anything_is_read(tmp_path):
    path, seen = far_sets(tmp_path / "a.parquet", []), []
    model = setfold.Composition(setfold.Pool(1), head=nn.Linear(2, 3))
    with pytest.raises(setfold.InputError, match="cannot be read out: the model raises Runtime"):
        encode(
            model,
            path,
            tmp_path / "out.parquet",
            head=True,
            progress=seen.append,
            skip_errors=True,
        )
    assert not seen
