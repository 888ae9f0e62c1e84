"""SQLite alone: what is left in the file, foreign and damaged files, a full disk."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess

import pyarrow as pa
import pytest

from setfold import live
from setfold.errors import StoreError
from setfold.live import sqlite
from tests.live.rows import NAMES, assert_holds, make_model, random_rows


@pytest.fixture
def path(tmp_path):
    return tmp_path / "live.db"


def contents(path):
    return b"".join(file.read_bytes() for file in path.parent.iterdir())


def test_nothing_is_left_of_a_deleted_set(path):
    model = make_model()
    rows = [random_rows(seed) for seed in range(6)]
    with live.create(path, model) as sets, live.open(path) as other:
        versions = {name: set() for name in NAMES}
        for number, some in enumerate(rows):
            writer = (sets, other)[number % 2]
            writer.update(some, set="user", batch=("orders", number))
            with sets.database.reading() as view:
                for name, key in zip(NAMES, sets._pack(view, NAMES), strict=True):
                    versions[name] |= {row.state for row in view.of_sets(1, [key], None)}
        before = contents(path)
        assert all(state in before for state in list(versions[NAMES[0]])[-1:])
        sets.delete(NAMES[:4])
        after = contents(path)
        for name in NAMES[:4]:
            for state in versions[name]:
                pieces = (state[start : start + 32] for start in range(0, len(state) - 32, 32))
                assert not any(piece in after for piece in pieces)
        kept = pa.concat_tables(rows)
        kept = kept.filter(pa.array([name not in NAMES[:4] for name in kept["user"].to_pylist()]))
        assert_holds(sets, model, kept)


def test_a_reader_delays_the_erasing(path, monkeypatch):
    monkeypatch.setattr(sqlite, "ERASE_WAIT", 0.1)
    model, rows = make_model(), random_rows(1)
    with live.create(path, model) as sets, live.open(path) as other:
        sets.update(rows, set="user", batch=("orders", 1))
        with other.database.reading() as view:
            assert view.totals(1)[2] == 30
            with pytest.raises(StoreError, match="rows are deleted, but"):
                sets.delete(NAMES)
            assert sets.count(NAMES) == [0] * 8
            assert view.totals(1)[2] == 30
        assert sets.delete(NAMES) == 0


def test_files_of_other_programs(tmp_path):
    model, theirs = make_model(), tmp_path / "theirs.db"
    with sqlite3.connect(theirs) as connection:
        connection.execute("CREATE TABLE settings (name, value)")
    connection.close()
    (tmp_path / "text.db").write_text("hello " * 1000)
    (tmp_path / "empty.db").touch()
    (tmp_path / "folder").mkdir()
    before = theirs.read_bytes()
    for call in (live.open, lambda path: live.create(path, model)):
        with pytest.raises(StoreError, match="database of another program"):
            call(theirs)
    assert theirs.read_bytes() == before  # not even its journal is another one
    assert [*tmp_path.glob("theirs.db-*")] == []
    for call in (live.open, lambda path: live.create(path, model)):
        with pytest.raises(StoreError, match="not a store"):
            call(tmp_path / "text.db")
        with pytest.raises(StoreError, match="cannot be opened"):
            call(tmp_path / "folder")
    with pytest.raises(StoreError, match="there is no store"):
        live.open(tmp_path / "empty.db")
    live.create(tmp_path / "empty.db", model).close()
    with pytest.raises(StoreError, match="does not exist"):
        live.create(tmp_path / "missing" / "live.db", model)


def test_damaged_pages_are_noticed(path):
    rows = random_rows(1, 400, [f"user {number}" for number in range(40)])
    with live.create(path, make_model()) as sets:
        sets.update(rows, set="user", batch=("orders", 1))
        assert sets.database.check() == []
    whole = path.read_bytes()
    for start in range(500, len(whole), 3000):
        path.write_bytes(whole[:start] + b"\x5a" * 64 + whole[start + 64 :])
        try:
            with live.open(path) as sets:
                found = sets.database.check()
                counts = sets.count(sorted({*rows["user"].to_pylist()}))
                sets.encode(sorted({*rows["user"].to_pylist()}))
                assert found or sum(counts) == 400
        except StoreError:
            pass


def test_a_disk_that_is_full(tmp_path):
    small, model = tmp_path / "small", make_model()
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        rows = [random_rows(seed, 400, [f"{seed} {n}" for n in range(400)]) for seed in range(20)]
        done = []

        def write():
            for number, some in enumerate(rows):
                sets.update(some, set="user", batch=("orders", number))
                done.append(some)

        with live.create(small / "live.db", model) as sets:
            with pytest.raises(StoreError, match="disk is full"):
                write()
            held = pa.concat_tables(done)
            names = sorted({*held["user"].to_pylist(), *rows[len(done)]["user"].to_pylist()})
            assert_holds(sets, model, held, names)
            subprocess.run(["mount", "-o", "remount,size=50m", small], check=True)
            for number, some in enumerate(rows):
                found = sets.update(some, set="user", batch=("orders", number))
                assert found.status == ("duplicate" if number < len(done) else "applied")
            held = pa.concat_tables(rows)
            assert_holds(sets, model, held, sorted({*held["user"].to_pylist()}))
            assert sets.database.check() == []
        shutil.rmtree(small, ignore_errors=True)
    finally:
        subprocess.run(["umount", small], check=True)
