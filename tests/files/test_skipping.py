"""Bad rows stop the run or are skipped and listed; invalid arguments raise an error first."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import setfold
from setfold.files import journal, run
from tests.files.files import (
    WIDTH,
    assert_encodes,
    encode,
    encoder,
    interrupt,
    rows,
    stopping,
    write,
)


def spoilt(tmp_path):
    """Write five files, four of which have errors."""
    table = rows(500)
    folder = write(tmp_path / "in", table, files=5)
    column = table["f1"].to_pylist()[:100]
    column[7] = None
    pq.write_table(
        table[:100].set_column(2, "f1", pa.array(column, pa.float32())), folder / "part-0.parquet"
    )
    column = table["f1"].to_numpy()[100:200].copy()
    column[[3, 50]] = np.nan, np.inf
    pq.write_table(table[100:200].set_column(2, "f1", pa.array(column)), folder / "part-1.parquet")
    whole = (folder / "part-2.parquet").read_bytes()
    (folder / "part-2.parquet").write_bytes(whole[: len(whole) // 2])
    pq.write_table(table[300:400].drop_columns("f2"), folder / "part-3.parquet")
    good = np.delete(np.arange(500), [7, 103, 150, *range(200, 400)])
    return folder, table.take(good)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (0, r"part-0\.parquet, row 7 .*column 'f1' is null"),
        (1, r"part-1\.parquet, row 3 .*NaN or infinite"),
        (2, r"cannot open .*part-2\.parquet"),
        (3, r"part-3\.parquet has elements of 2 numbers \('f0', 'f1'\); the model expects 3"),
    ],
)
def test_bad_rows_and_files_stop_the_run(tmp_path, number, message):
    folder, _ = spoilt(tmp_path)
    with pytest.raises(setfold.SetfoldError, match=message):
        encode(encoder(), folder / f"part-{number}.parquet", tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("is_tight", [False, True])
def test_bad_rows_and_files_are_skipped_and_listed(tmp_path, request, is_tight):
    if is_tight:
        request.getfixturevalue("tight")
    (folder, good), model, out = spoilt(tmp_path), encoder(), tmp_path / "out.parquet"
    summary = encode(model, folder, out, skip_errors=True)
    assert_encodes(out, model, good)
    lines = [json.loads(line) for line in Path(summary.report).read_text().splitlines()]
    found = {(line["file"].rpartition("/")[2], line["row"]) for line in lines}
    whole = {("part-2.parquet", None), ("part-3.parquet", None)}
    assert found == {("part-0.parquet", 7), ("part-1.parquet", 3), ("part-1.parquet", 50), *whole}
    assert summary.skipped == len(lines) == 5
    assert summary.report == f"{out}.skipped.jsonl"
    encode(model, folder / "part-4.parquet", out, overwrite=True)
    assert not (tmp_path / "out.parquet.skipped.jsonl").exists()


def test_a_file_that_is_broken_in_the_middle(tmp_path, tight, monkeypatch):
    table, model, out = rows(), encoder(), tmp_path / "out.parquet"
    folder = write(tmp_path / "in", table, files=1, compression="none")
    path = folder / "part-0.parquet"
    content = bytearray(path.read_bytes())
    group = pq.ParquetFile(path).metadata.row_group(1).column(1)
    place = group.dictionary_page_offset or group.data_page_offset
    content[place : place + 40] = b"\xff" * 40
    path.write_bytes(content)
    encode(model, folder, out, skip_errors=True)
    (line,) = (tmp_path / "out.parquet.skipped.jsonl").read_text().splitlines()
    first = json.loads(line)["row"]
    assert f"rows {first} to 299 are skipped" in line
    assert_encodes(out, model, table.take(np.delete(np.arange(600), np.arange(first, 300))))
    for after in range(1, 8):
        out = tmp_path / f"{after}.parquet"
        interrupt(monkeypatch, model, folder, out, after=after, skip_errors=True)
        assert encode(model, folder, out, skip_errors=True, resume=True).skipped == 1


def test_bad_lines_of_a_csv(tmp_path):
    table, model, out = rows(), encoder(), tmp_path / "out.parquet"
    names = [f"{name:03d}" for name in table["event"].to_pylist()]
    columns = [table[f"f{i}"].to_pylist() for i in range(3)]
    lines = [",".join(map(str, line)) for line in zip(names, *columns, strict=True)]
    lines[100], lines[200], lines[400] = "000,1.0", "000,1.0,oops,2.0", "000,1.0,2.0,nan"
    text = "\n".join(["event,f0,f1,f2", *lines, "too,short", "000,1,2,?"]) + "\n"
    (tmp_path / "in.csv").write_text(text)
    with pytest.raises(setfold.FileError, match=r"in\.csv, row 100"):
        encode(model, tmp_path / "in.csv", out)
    summary = encode(model, tmp_path / "in.csv", out, skip_errors=True, restart=True)
    listed = [json.loads(line) for line in Path(summary.report).read_text().splitlines()]
    assert [line["row"] for line in listed] == [100, 200, 400, 600, 601]
    assert listed[1]["reason"] == "column 'f1': expected a number; got 'oops'"
    good = table.set_column(0, "event", pa.array(names)).take(
        np.delete(np.arange(600), [100, 200, 400])
    )
    assert_encodes(out, model, good)


def test_all_elements_of_a_bad_exploded_row_are_skipped(tmp_path):
    lists = {f"f{i}": [[0.1, 0.2], [0.3, 0.4 if i else float("nan")]] for i in range(3)}
    pq.write_table(pa.table({"event": [1, 2], **lists}), tmp_path / "in.parquet")
    options = {"explode": True, "skip_errors": True}
    summary = encode(encoder(), tmp_path / "in.parquet", tmp_path / "out.parquet", **options)
    assert (summary.elements, summary.skipped) == (2, 1)
    assert pq.read_table(tmp_path / "out.parquet")["set"].to_pylist() == [1]


@pytest.mark.parametrize("names", [int, str])
def test_a_set_of_which_all_rows_are_skipped_is_left_out(tmp_path, names):
    table = rows(3000, 10, names=names)  # many rows of few sets, so that states are stored
    ids, numbers = table["event"].to_pylist(), table["f1"].to_numpy().copy()
    ids[100], numbers[100] = names(999), np.nan
    table = table.set_column(0, "event", pa.array(ids)).set_column(2, "f1", pa.array(numbers))
    pq.write_table(table, tmp_path / "in.parquet")
    out = tmp_path / "out.parquet"
    encode(encoder(), tmp_path / "in.parquet", out, skip_errors=True)
    found = pq.read_table(out)
    assert names(999) not in found["set"].to_pylist()
    assert sum(found["count"].to_pylist()) == 2999


def test_the_advice_of_an_error_can_be_followed(tmp_path):
    (folder, good), out = spoilt(tmp_path), tmp_path / "out.parquet"
    with pytest.raises(setfold.FileError, match="--on-error skip --restart"):
        encode(encoder(), [folder / "part-4.parquet", folder / "part-0.parquet"], out)
    encode(encoder(), folder, out, skip_errors=True, restart=True)
    assert_encodes(out, encoder(), good)


@pytest.mark.parametrize("kind", [bytes, str], ids=["bytes", "text"])
@pytest.mark.parametrize(
    ("end", "message"),
    [("\0", "NumPy strips trailing zero bytes"), ("x" * 20_000, r"set id has 20,00\d bytes")],
    ids=["zero", "long"],
)
def test_set_ids_that_numpy_cannot_store_raise_an_error(tmp_path, monkeypatch, kind, end, message):
    """They do so when they are read, not when everything else is done."""
    monkeypatch.setattr(run.Run, "_write", lambda *_: pytest.fail("everything was read"))
    names = [f"set {i}" + end * (i == 7) for i in range(12)]
    table = rows(names=lambda i: names[i].encode() if kind is bytes else names[i], sets=12)
    with pytest.raises(setfold.InputError, match=message):
        encode(encoder(), write(tmp_path / "in", table), tmp_path / "out.npz")


@pytest.mark.parametrize("after", [False, True])
def test_the_list_is_the_same_after_an_accident(tmp_path, tight, monkeypatch, after):
    (folder, good), model = spoilt(tmp_path), encoder()
    encode(model, folder, tmp_path / "whole.parquet", skip_errors=True)
    out = tmp_path / "parts.parquet"
    for call in (5, 4, 3, 2):
        with stopping(monkeypatch, journal.WorkFolder, "log_skipped", call, after):
            encode(model, folder, out, skip_errors=True, resume=True)
    summary = encode(model, folder, out, skip_errors=True, resume=True)
    wanted = (tmp_path / "whole.parquet.skipped.jsonl").read_text()
    assert (tmp_path / "parts.parquet.skipped.jsonl").read_text() == wanted
    assert summary.skipped == 5
    assert_encodes(out, model, good)


@pytest.mark.parametrize("sets", [2, 100], ids=["states", "rows"])
def test_numbers_that_are_too_large_for_the_model_are_skipped(tmp_path, sets):
    table, wide = rows(300, sets=sets), torch.nn.Linear(WIDTH, 8)
    torch.nn.init.constant_(wide.weight, 3.0)
    model = setfold.DeepSets(torch.nn.Sequential(wide, torch.nn.ReLU()), 8).eval()
    column = table["f1"].to_numpy().copy()
    column[[17, 18, 250]], column[40] = 3e38, np.nan
    spoiled = table.set_column(2, "f1", pa.array(column))
    folder, out = write(tmp_path / "in", spoiled, files=1), tmp_path / "out.npz"
    with pytest.raises(setfold.FileError, match=r"part-0\.parquet, row 17 .* too large"):
        encode(model, folder, out)
    summary = encode(model, folder, out, skip_errors=True, restart=True)
    listed = [json.loads(line) for line in Path(summary.report).read_text().splitlines()]
    assert [line["row"] for line in listed] == [17, 18, 40, 250]
    good = table.take(np.delete(np.arange(300), [17, 18, 40, 250]))
    whole = encode(model, write(tmp_path / "good", good), tmp_path / "good.npz")
    assert whole.elements == summary.elements == 296
    with np.load(out) as found, np.load(tmp_path / "good.npz") as wanted:
        np.testing.assert_allclose(found["encoding"], wanted["encoding"], rtol=1e-5)


def test_numbers_of_different_sets_are_not_added_up(tmp_path):
    large = np.full(100, 1e38, np.float32)
    large[5] = np.nan
    table = rows(100).set_column(0, "event", pa.array(range(100)))
    folder = write(tmp_path / "in", table.set_column(1, "f0", pa.array(large)), files=1)
    model, out = encoder(aggregate="sum"), tmp_path / "out.npz"
    summary = encode(model, folder, out, skip_errors=True)
    assert (summary.sets, summary.skipped) == (99, 1)
    with np.load(out) as found:
        assert np.isfinite(found["encoding"]).all()


@pytest.mark.parametrize("also", [1.0, np.nan], ids=["only", "and NaN"])
def test_numbers_that_overflow_together_raise_an_error_with_file_and_rows(tmp_path, also):
    large = np.full(100, 1e38, np.float32)
    large[5] = also
    table = rows(100, sets=2).set_column(1, "f0", pa.array(large))
    folder, skip = write(tmp_path / "in", table, files=1), bool(np.isnan(also))
    summary = encode(encoder(aggregate="sum"), folder, tmp_path / "skip.npz", skip_errors=True)
    assert (summary.sets, summary.skipped) == (0, 2 + skip)
    if not skip:
        with pytest.raises(
            setfold.NonFiniteError, match=r"part-0\.parquet, rows 0 to 99: .* set \d are too large"
        ):
            encode(encoder(aggregate="sum"), folder, tmp_path / "out.parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"set": "evnt"}, "evnt"),
        ({"features": "f0,f1"}, "expects 3"),
        ({"features": "f0,f1,nothing"}, "nothing"),
        ({"memory": "10MB"}, "too little.*Pass at least --memory"),
        ({"memory": "much"}, "cannot parse the size"),
        ({"engine": "steam"}, "'local' or 'ray'"),
        ({"address": "auto"}, "only valid for --engine ray"),
        ({"states": "s.parquet"}, "arrow"),
    ],
)
def test_invalid_arguments_raise_an_error_before_anything_is_written(tmp_path, change, message):
    folder = write(tmp_path / "in", rows())
    with pytest.raises(setfold.InputError, match=message):
        encode(encoder(), folder, tmp_path / "out.parquet", **change)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_unknown_options_raise_an_error(tmp_path):
    folder = write(tmp_path / "in", rows())
    with pytest.raises(TypeError, match=r"unknown option 'memroy'; expected one of .*memory"):
        encode(encoder(), folder, tmp_path / "out.parquet", memroy="1GB")
    with pytest.raises(TypeError, match="unknown option 'engine'"):
        setfold.merge_states([tmp_path / "a.arrow"], tmp_path / "b.arrow", engine="ray")


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("out.txt", "suffix"),
        ("no/out.parquet", "Create it first"),
        ("in.parquet", "it is a folder"),
    ],
)
def test_invalid_outputs_raise_an_error(tmp_path, out, message):
    write(tmp_path / "in.parquet", rows())
    with pytest.raises(setfold.InputError, match=message):
        encode(encoder(), tmp_path / "in.parquet", tmp_path / out)


def test_inputs_are_not_overwritten(tmp_path):
    folder = write(tmp_path / "in", rows())
    before = (folder / "part-0.parquet").read_bytes()
    with pytest.raises(setfold.InputError, match="is an input"):
        encode(encoder(), folder, folder / "part-0.parquet")
    assert (folder / "part-0.parquet").read_bytes() == before
    assert not list(folder.glob("*.work"))


def test_an_output_among_its_inputs_is_no_input_of_the_same_run(tmp_path, tight, monkeypatch):
    folder, model = write(tmp_path / "in", rows()), encoder()
    interrupt(monkeypatch, model, folder, folder / "out.parquet")
    encode(model, folder, folder / "out.parquet", resume=True)
    assert_encodes(folder / "out.parquet", model, rows())


def test_models_that_do_not_fold_are_refused(tmp_path):
    folder = write(tmp_path / "in", rows())
    for model, message in (
        (setfold.FSPool(3), "cannot be folded"),
        (torch.nn.Linear(3, 4), "cannot be folded"),
    ):
        with pytest.raises(setfold.InputError, match=message):
            encode(model, folder, tmp_path / "out.parquet")


def test_names_of_different_types_are_refused(tmp_path):
    write(tmp_path / "in", rows(), name="a{}.parquet")
    write(tmp_path / "in", rows(names=str), name="b{}.parquet")
    with pytest.raises(setfold.InputError, match=r"b0\.parquet are large_string.*int64"):
        encode(encoder(), tmp_path / "in", tmp_path / "out.parquet")


def test_progress_is_reported(tmp_path, tight):
    reports = []
    folder = write(tmp_path / "in", rows(600, 100))
    encode(encoder(), folder, tmp_path / "out.parquet", progress=reports.append)
    assert {progress.phase for progress in reports} == {"reading", "merging", "writing"}
    reading = [progress for progress in reports if progress.phase == "reading"]
    done = [progress.done for progress in reading]
    assert done == sorted(done)
    assert done[-1] == pytest.approx(reading[-1].total)
    assert reading[-1].elements == 600
    assert all(progress.memory > 0 for progress in reports)
