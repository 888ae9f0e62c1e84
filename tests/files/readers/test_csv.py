"""CSV and TSV: inferred types, bad lines and bad cells."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from setfold.errors import FileError
from setfold.files.inputs import open_reader
from setfold.files.readers import text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.csv"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BLOCK_BYTES", 64)


def values(path: Path, name: str, text: str | None = None) -> list[object]:
    with open_reader(path, () if text is None else [text]) as reader:
        return [v for b in reader.read([name], rows=1000) for v in b.column(name).to_pylist()]


def test_numbers_that_get_wider(tmp_path: Path) -> None:
    """Types are inferred from the first megabytes of text; a fraction may come later."""
    path = tmp_path / "a.csv"
    rows = 700_000
    path.write_text("late,id,void\n" + "0,1234567,\n" * rows + "0.5,7,3\n")
    found = values(path, "late")
    assert len(found) == rows + 1
    assert found[-1] == 0.5
    assert values(path, "id")[-1] == 7
    assert values(path, "void")[-2:] == [None, 3]


def test_ids_as_they_are_written(path: Path) -> None:
    path.write_text('id,x\n007,1\n7,2\n,3\n"",4\nNA,5\n1e3,6\n')
    assert values(path, "id", "id") == ["007", "7", None, None, "NA", "1e3"]
    assert values(path, "x", "id") == [1, 2, 3, 4, 5, 6]
    assert values(path, "x", "elsewhere") == [1, 2, 3, 4, 5, 6]
    with open_reader(path, ["id"]) as reader:
        assert reader.schema.field("id").type == pa.large_string()


@pytest.mark.usefixtures("small_blocks")
def test_ids_that_turn_into_text(path: Path) -> None:
    path.write_text("id,x\n" + "1,1\n" * 50 + "bob,1\n")
    assert values(path, "id", "id") == ["1"] * 50 + ["bob"]


@pytest.mark.parametrize("header", ["1,2", "0.5,-2e3", "7,nan"])
def test_no_header(path: Path, header: str) -> None:
    path.write_text(f"{header}\n3,4\n")
    with pytest.raises(
        FileError, match=r"a\.csv has no header.*only numbers.*line of column names"
    ):
        open_reader(path)
    path.write_text(f"{header},x\n3,4,5\n")
    assert values(path, "x") == [5]


def numbered(
    path: Path, start: int = 0, stop: int | None = None, columns: tuple[str, ...] = ("id", "x")
) -> tuple[dict, dict]:
    """Return the good rows of a file by row number, and the reasons for the bad ones."""
    rows, bad, row = {}, {}, start
    with open_reader(path, ["id"]) as reader:
        for batch in reader.read(columns, start, stop, rows=7):
            unread = reader.take_bad_rows()
            assert [number for number, _ in unread] == list(range(row, row + len(unread)))
            row += len(unread)
            bad.update(unread)
            reasons = reader.take_reasons()
            assert set(reasons) <= set(range(row, row + batch.num_rows))
            bad.update(reasons)
            cells = enumerate(batch.to_pylist(), row)
            rows.update({number: line for number, line in cells if number not in reasons})
            row += batch.num_rows
        assert reader.take_bad_rows() == []
    return rows, bad


LINES = {
    "none": [],
    "one": [20],
    "first": [0],
    "last": [99],
    "runs": [0, 1, 2, 30, 31, *range(50, 90), 98, 99],
    "all": range(100),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("suffix", [".csv", ".csv.gz"])
@pytest.mark.parametrize("wrong", LINES.values(), ids=LINES)
def test_bad_lines(tmp_path: Path, wrong: list[int], suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    lines = [f"{i:03}" if i in wrong else f"{i:03},{i}" for i in range(100)]
    text = "\n".join(["id,x", *lines, ""]).encode()
    path.write_bytes(gzip.compress(text) if suffix == ".csv.gz" else text)
    for start, stop in [(0, None), (1, 99), (31, 60), (20, 21)]:
        rows, bad = numbered(path, start, stop)
        wanted = range(100)[start:stop]
        assert rows == {i: {"id": f"{i:03}", "x": i} for i in wanted if i not in wrong}
        assert set(bad) == {i for i in wanted if i in wrong}
        assert all(reason == "the line has 1 cells; expected 2" for reason in bad.values())


@pytest.mark.usefixtures("small_blocks")
def test_bad_lines_before_numbers_get_wider(path: Path) -> None:
    lines = [f"{i},{i}" if i < 60 else f"{i},{i}.5" for i in range(100)]
    for i in (5, 59, 60, 61, 80):
        lines[i] += ",1"
    path.write_text("\n".join(["id,x", *lines, ""]))
    rows, bad = numbered(path)
    assert {i: row["x"] for i, row in rows.items()} == {
        i: i + (0.5 if i >= 60 else 0) for i in range(100) if i not in bad
    }
    assert bad == dict.fromkeys([5, 59, 60, 61, 80], "the line has 3 cells; expected 2")


def test_missing_quote(path: Path) -> None:
    path.write_text('id,x\na,1\n"b,2\nc,3\nd,4\n')
    rows, bad = numbered(path)
    assert rows == {0: {"id": "a", "x": 1}}
    assert "spans 3 lines of text, so a quote may be missing" in bad[1]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("cell", ["oops", "", "NA", "1,5", "+-1", "1e", "\\xb0"])
@pytest.mark.parametrize("wrong", list(LINES.values())[:-1], ids=list(LINES)[:-1])
def test_cells_that_are_not_numbers(
    path: Path, wrong: list[int], cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "NUMERIC_SHARE", 0.5)  # the first block is small
    lines = [f'{i:03},"{cell}"' if i in wrong else f"{i:03},{i}" for i in range(100)]
    lines.insert(40, "a,b,c")
    content = "\n".join(["id,x", *lines, ""]).encode()
    path.write_bytes(content.replace(b"\\xb0", b"\xb0"))  # not UTF-8
    expected = {i + (i >= 40): i for i in range(100)}
    for start, stop in [(0, None), (1, 100), (31, 60), (20, 21), (40, 41)]:
        rows, bad = numbered(path, start, stop)
        found = {row: cells["x"] for row, cells in rows.items() if cells["x"] is not None}
        wanted = range(101)[start:stop]
        assert found == {row: x for row, x in expected.items() if row in wanted and x not in wrong}
        nulls = {row for row, cells in rows.items() if cells["x"] is None}
        assert nulls | set(bad) == set(wanted) - set(found)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("row", range(12, 30))
@pytest.mark.parametrize("line", ["7,oops,0", "7"])
def test_a_bad_row_is_reported_once_at_any_block_boundary(path: Path, row: int, line: str) -> None:
    lines = [f"{i},{i},{i}" for i in range(60)]
    lines[row], lines[row + 1] = (
        line,
        f"{row + 1},1,0.5",
    )  # wider numbers make the reader start again
    path.write_text("\n".join(["id,x,y", *lines, ""]))
    rows, bad = numbered(path, columns=("x", "y"))
    assert list(bad) == [row]
    assert list(rows) == [i for i in range(60) if i != row]
    assert rows[row + 1] == {"x": 1, "y": 0.5}


def test_a_bad_cell_is_reported_with_its_column(path: Path) -> None:
    path.write_text("id,x,y\n" + "a,1,2\n" * 5 + "a,oops,\n" + "a,1,2\n" * 5)
    with open_reader(path, ["id"]) as reader:
        assert reader.schema.types == [pa.large_string(), pa.float64(), pa.int64()]
    _, bad = numbered(path)
    assert bad == {5: "column 'x': expected a number; got 'oops'"}


def test_columns_of_mostly_numbers_are_numeric(path: Path) -> None:
    cells = {"ticket": ["7"] * 8 + ["PC 7"] * 2, "x": ["7"] * 4 + ["NA", ""] * 3, "y": range(10)}
    cells["z"] = [*range(9), "oops"]
    lines = [",".join(map(str, line)) for line in zip(*cells.values(), strict=True)]
    path.write_text("\n".join([",".join(cells), *lines, ""]))
    with open_reader(path) as reader:
        assert reader.schema.types == [pa.string(), pa.int64(), pa.int64(), pa.float64()]
    with open_reader(path, ["z"], ["ticket", "z"]) as reader:
        assert reader.schema.types == [pa.float64(), pa.int64(), pa.int64(), pa.large_string()]


@pytest.mark.usefixtures("small_blocks")
def test_cells_of_another_kind(path: Path) -> None:
    path.write_text("day,x\n" + "2026-01-01,1\n" * 20 + "never,1\n")
    with pytest.raises(FileError, match=r"column 'day' of row 20 .* date32.*'never'") as caught:
        values(path, "day")
    assert str(path) in str(caught.value)
    assert "With --on-error skip, all rows from" in str(caught.value)
