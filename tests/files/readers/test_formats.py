"""Every format: reading returns what was written, for all ranges, or raises an error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from setfold.errors import FileError
from setfold.files.inputs import open_reader
from setfold.files.readers.reader import Reader
from tests.files.readers.written import FORMATS, Format, Table

ROWS = 51
NEVER_EMPTY = (
    "jsonl",
    "ndjson.gz",
    "off",
    "stl",
    "obj",
    "glb",
    "root, ntuple",
)  # their libraries cannot write empty files
# Arrow cannot pass a line that is not UTF-8 to the callback. It warns, and then fails as expected.
NO_TEXT = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
FILES = [name for name, form in FORMATS.items() if form.suffix != ".zarr"]


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


def written(folder: Path, form: Format, rows: int = ROWS) -> tuple[Path, Table]:
    path = folder / f"an événement{form.suffix}"
    return path, form.write(path, rows)


def compare(batches: list[pa.RecordBatch], expected: Table, start: int, stop: int) -> None:
    for name, values in expected.items():
        found = [value for batch in batches for value in batch.column(name).to_pylist()]
        assert found == values[start:stop].tolist()


def read_all(reader: Reader) -> list[pa.RecordBatch]:
    return list(reader.read(reader.schema.names, rows=8))


def attempt(path: Path) -> list[pa.RecordBatch] | None:
    """Read a modified file; return None if that raises FileError."""
    try:
        with open_reader(path) as reader:
            return read_all(reader)
    except FileError as error:
        message = str(error)
    assert str(path) in message
    return None


def test_ranges(tmp_path: Path, form: Format) -> None:
    path, expected = written(tmp_path, form)
    with open_reader(path) as reader:
        assert set(expected) <= set(reader.schema.names)
        assert reader.num_rows in (ROWS, None)
        names = list(reversed(expected))
        for start, stop in [(0, None), (13, 29), (50, 51), (20, 20), (7, 1000), (10, None)]:
            batches = list(reader.read(names, start, stop, rows=8))
            compare(batches, expected, start, ROWS if stop is None else stop)
            assert all(0 < batch.num_rows <= 8 for batch in batches)
            assert all(batch.schema.names == names for batch in batches)
            for batch in batches:
                assert batch.schema.types == [reader.schema.field(name).type for name in names]
            assert reader.take_bad_rows() == []


def test_types(tmp_path: Path, form: Format) -> None:
    path, expected = written(tmp_path, form)
    with open_reader(path) as reader:
        for name, values in expected.items():
            kind = reader.schema.field(name).type
            if values.ndim == 2:
                assert kind.list_size == 3
                kind = kind.value_type
            if values.dtype.kind not in "UO":
                assert kind == pa.from_numpy_dtype(values.dtype)


def test_cuts(tmp_path: Path, form: Format) -> None:
    path, expected = written(tmp_path, form)
    with open_reader(path) as reader:
        for rows in (1, 10, 1000):
            cuts = reader.cuts(rows)
            assert [start for start, _ in cuts] == [0] + [stop for _, stop in cuts[:-1]]
            assert cuts[-1][1] in (ROWS, None)
            parts = [b for s, e in cuts for b in reader.read(list(expected), s, e, rows=8)]
            compare(parts, expected, 0, ROWS)


def test_two_at_once(tmp_path: Path, form: Format) -> None:
    path, expected = written(tmp_path, form)
    with open_reader(path) as reader:
        names = list(expected)
        pairs = list(zip(reader.read(names, rows=8), reader.read(names, rows=8), strict=True))
        compare([left for left, _ in pairs], expected, 0, ROWS)
        compare([right for _, right in pairs], expected, 0, ROWS)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in NEVER_EMPTY])
def test_no_rows(tmp_path: Path, name: str) -> None:
    path, expected = written(tmp_path, FORMATS[name], 0)
    with open_reader(path) as reader:
        assert set(expected) <= set(reader.schema.names)
        assert list(reader.read(list(expected), rows=8)) == []
        assert reader.cuts(10) == ([(0, None)] if reader.num_rows is None else [])


@pytest.mark.parametrize("name", FILES)
def test_cut_off(tmp_path: Path, name: str) -> None:
    """A truncated file is an error, never a shorter file."""
    form = FORMATS[name]
    path, expected = written(tmp_path, form)
    content = path.read_bytes()
    for size in {0, 1, 10, *np.linspace(20, len(content) - 1, 9, dtype=int).tolist()}:
        path.write_bytes(content[:size])
        batches = attempt(path)
        if (
            batches is not None and form.detects_truncation
        ):  # the lost bytes are not part of the rows
            compare(batches, expected, 0, ROWS)


@NO_TEXT
def test_garbage(tmp_path: Path, form: Format) -> None:
    path = tmp_path / f"noise{form.suffix}"
    generator = np.random.default_rng(0)
    for size in (3, 100, 5000):
        path.write_bytes(generator.bytes(size))
        with pytest.raises(FileError, match="noise"), open_reader(path) as reader:
            read_all(reader)


@NO_TEXT
@pytest.mark.parametrize("name", FILES)
def test_damage(tmp_path: Path, name: str) -> None:
    """Changed bytes give a FileError or other values, never a crash or another exception."""
    path, _ = written(tmp_path, FORMATS[name])
    content = path.read_bytes()
    generator = np.random.default_rng(1)
    for place in generator.integers(0, len(content), 12).tolist():
        path.write_bytes(content[:place] + generator.bytes(4) + content[place + 4 :])
        attempt(path)


def test_damaged_store(tmp_path: Path) -> None:
    path, _ = written(tmp_path, FORMATS["zarr"])
    chunk = next(file for file in sorted(path.rglob("*")) if file.is_file() and "/c/" in str(file))
    chunk.write_bytes(chunk.read_bytes()[:-5])
    assert attempt(path) is None
    (path / "zarr.json").write_text("{")
    assert attempt(path) is None
