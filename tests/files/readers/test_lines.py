"""JSON lines: inferred types, bad lines and bad values."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import setfold
from setfold.errors import FileError
from setfold.files.inputs import open_reader
from setfold.files.readers import lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.jsonl"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 64)


def read(path: Path, columns: list[str], rows: int = 1000) -> tuple[list[object], dict[int, str]]:
    """All rows, and why some are bad; the place of a line that is no row is taken by None."""
    found: list[object] = []
    reasons: dict[int, str] = {}
    with open_reader(path) as reader:
        for batch in reader.read(columns, rows=rows):
            assert batch.num_rows <= rows
            for bad in reader.take_bad_rows():
                assert bad.row == len(found)
                found.append(None)
                reasons[bad.row] = bad.reason
            first = len(found)
            found += batch.to_pylist()
            for row, reason in reader.take_reasons().items():
                assert first <= row < len(found)
                reasons[row] = reason
    return found, reasons


def test_types(path: Path) -> None:
    path.write_text('{"id": "007", "x": 1, "day": "2026-11-18 00:00:00", "p": [1, 2.5]}\n')
    with open_reader(path) as reader:
        assert reader.num_rows is None
        kinds = {field.name: field.type for field in reader.schema}
    assert kinds == {
        "id": pa.string(),
        "x": pa.int64(),
        "day": pa.string(),
        "p": pa.list_(pa.float64()),
    }


@pytest.mark.usefixtures("small_blocks")
def test_numbers_that_get_wider(path: Path) -> None:
    path.write_text('{"x": 1, "l": [1], "n": null}\n' * 30 + '{"x": 0.5, "l": [0.5], "n": 7}')
    found, reasons = read(path, ["x", "l", "n"])
    assert len(found) == 31
    assert found[-1] == {"x": 0.5, "l": [0.5], "n": 7}
    assert not reasons


@pytest.mark.parametrize("rows", [1, 2, 1000])
@pytest.mark.parametrize("block", [8, 64, 1 << 20])
def test_bad_lines_and_values(
    path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, block: int
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", block)
    path.write_text(
        '{"u": "a", "x": 1.5}\n\n{"u": "b", "x": 2, "y": 7}\nnope\n[1]\n{"u": "c", "x": "bad"}\n'
        '{"u": "d", "x": null}\n{"x": 3.5}\n{"u": 4, "x": 5}\r\n{"u": "e", "x": 1e3}\n{"u": '
    )
    found, reasons = read(path, ["u", "x"], rows)
    assert found == [
        {"u": "a", "x": 1.5},
        {"u": "b", "x": 2.0},
        None,
        None,
        {"u": "c", "x": None},
        {"u": "d", "x": None},
        {"u": None, "x": 3.5},
        {"u": None, "x": 5.0},
        {"u": "e", "x": 1000.0},
        None,
    ]
    assert set(reasons) == {2, 3, 4, 7, 9}
    assert "not valid JSON" in reasons[2]
    assert reasons[3] == "the line is not a JSON object"
    assert reasons[4] == "column 'x': expected double; got \"bad\""
    assert reasons[7] == "column 'u': expected string; got 4"


def test_text_that_is_not_utf8_is_a_bad_line(path: Path) -> None:
    path.write_bytes(b'{"u": "a"}\n{"u": "\xff"}\n')
    found, reasons = read(path, ["u"])
    assert found == [{"u": "a"}, None]
    assert "not valid JSON" in reasons[1]


def test_files_without_rows(path: Path) -> None:
    path.write_text("\n \n")
    with open_reader(path) as reader:
        assert reader.num_rows == 0
        assert not reader.schema.names
    path.write_text("1\n2\n")
    with pytest.raises(FileError, match="expected a JSON object"):
        open_reader(path)


def test_a_line_that_never_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 100)
    monkeypatch.setattr(lines, "BLOCK_BYTES", 10)
    path.write_text('{"x": ' + "1" * 200)
    with pytest.raises(FileError, match="a line of more than 100 bytes"):
        open_reader(path)


def test_truncated_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.ndjson.gz"
    path.write_bytes(gzip.compress(b'{"x": 1}\n' * 1000)[:-10])
    with pytest.raises(FileError, match="truncated"):
        read(path, ["x"])


def test_sets_in_json_lines(path: Path) -> None:
    path.write_text('{"u": "b", "x": 1}\n{"u": "a", "x": 2}\nx\n{"u": "b", "x": 4}\n')
    model = setfold.Pool(1, "mean")
    with pytest.raises(FileError, match=r"a\.jsonl, row 2 .*not valid JSON"):
        setfold.encode_sets(model, path, path.with_name("out.npz"), set="u")
    setfold.encode_sets(
        model, path, path.with_name("out.npz"), set="u", skip_errors=True, restart=True
    )
    found = np.load(path.with_name("out.npz"))
    assert found["set"].tolist() == ["a", "b"]
    assert found["encoding"].tolist() == [[2.0], [2.5]]


def test_an_empty_file_has_no_sets(path: Path) -> None:
    path.write_text('{"u": 7, "x": 1}\n')
    empty, model = path.with_name("b.jsonl"), setfold.Pool(1, "mean")
    empty.write_text("")
    for inputs, wanted in (([empty, path], [7]), (empty, [])):
        out = path.with_name("out.npz")
        setfold.encode_sets(model, inputs, out, set="u", overwrite=True)
        assert np.load(out)["set"].tolist() == wanted


@pytest.mark.parametrize(
    "text", ["null\n", 'null\n{"u": 7, "x": 1}\n', '{"u": 7, "x": 1}\n null\n']
)
def test_a_line_that_is_null(path: Path, text: str) -> None:
    path.write_text(text)  # Arrow ends the process if it is the first one
    out = path.with_name("out.npz")
    with pytest.raises(FileError, match=r"expected a JSON object|is not a JSON object"):
        setfold.encode_sets(setfold.Pool(1, "mean"), path, out, set="u")


def test_set_ids_do_not_become_fractions(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 10)
    path.write_text('{"u": 7, "x": 1}\n{"u": 7.5, "x": 1.5}\n')
    out = path.with_name("out.npz")
    with pytest.raises(FileError, match=r"row 1 .*column 'u': expected int64; got 7\.5"):
        setfold.encode_sets(setfold.Pool(1, "mean"), path, out, set="u")
