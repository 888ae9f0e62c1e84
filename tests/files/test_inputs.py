"""find_inputs: files, folders, glob patterns and key=value folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from setfold.errors import InputError
from setfold.files.inputs import find_inputs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        "events/b.parquet",
        "events/a.parquet",
        "events/notes.txt",
        "events/.hidden.parquet",
        "events/_metadata.parquet",
        "events/_temporary/c.parquet",
        "events/year=2024/day=a%20b/d.PARQUET",
        "events/store.zarr/zarr.json",
        "events/store.zarr/inner.npy",
        "spark.parquet/part-0.parquet",
        "odd/x[1]*.npy",
        "odd/x1a.npy",
        "odd/ünï code.csv.gz",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "empty").mkdir()
    return tmp_path


EVENTS = [
    "events/a.parquet",
    "events/b.parquet",
    "events/store.zarr",
    "events/year=2024/day=a%20b/d.PARQUET",
]


def found(*names: str | Path) -> list[str]:
    return [found.path.as_posix() for found in find_inputs(names)]


def test_folders(folder: Path) -> None:
    assert found("events") == EVENTS
    assert found(Path("events")) == EVENTS
    assert found("spark.parquet") == ["spark.parquet/part-0.parquet"]


def test_patterns(folder: Path) -> None:
    assert found("events/[ab].parquet") == EVENTS[:2]
    assert found("events/**/*.PARQUET") == EVENTS[3:]
    assert found("ev*") == EVENTS
    assert set(found("events/**")) >= set(EVENTS)
    assert not any("inner" in name or "txt" in name for name in found("**"))


def test_order_and_duplicates(folder: Path) -> None:
    names = ["events/b.parquet", "events", folder / "events" / "a.parquet", "./events/b.parquet"]
    assert found(*names) == [EVENTS[1], EVENTS[0], *EVENTS[2:]]


def test_names_that_look_like_patterns(folder: Path) -> None:
    assert found("odd/x[1]*.npy") == ["odd/x[1]*.npy"]
    assert found("odd/x[1]?.npy") == ["odd/x1a.npy"]
    assert found("odd/ünï code.csv.gz") == ["odd/ünï code.csv.gz"]


def test_partitions(folder: Path) -> None:
    expected = {"year": "2024", "day": "a b"}
    assert [found.partition for found in find_inputs(["events"])] == [{}, {}, {}, expected]
    assert find_inputs([EVENTS[3]])[0].partition == expected


def test_links(folder: Path) -> None:
    (folder / "linked").mkdir()
    (folder / "linked/loop").symlink_to(folder / "linked")
    (folder / "linked/data").symlink_to(folder / "spark.parquet")
    assert found("linked") == ["linked/data/part-0.parquet"]


def test_two_names_of_a_file(folder: Path) -> None:
    (folder / "again.parquet").symlink_to(folder / "events/b.parquet")
    (folder / "mirror").symlink_to(folder / "events")
    assert found("again.parquet", "events") == ["again.parquet", EVENTS[0], *EVENTS[2:]]
    assert found("events", "again.parquet", "mirror") == EVENTS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("events/c.parquet", "events/c.parquet does not exist. Did you mean events/"),
        ("nowhere/c.parquet", "The folder nowhere does not exist"),
        ("events/notes.txt", "unknown suffix of events/notes.txt. Expected one of .parquet"),
        ("empty", "folder empty has no file with a known suffix"),
        ("events/*.npy", r"pattern events/*.npy matches no file"),
        ("events/*.txt", "matches no file with a known suffix"),
    ],
)
def test_nothing_there(folder: Path, name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_inputs(["events", name])
    assert message in str(caught.value)
