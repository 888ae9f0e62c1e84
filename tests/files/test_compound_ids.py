"""Set ids of several columns: in every output, in states, spilled, updated and merged."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import setfold
from setfold.files import plan
from setfold.files.budget import Budget
from setfold.files.ids import TEXT, pack, unpack
from tests.files.files import encoder

VALUES = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    TEXT: st.text(alphabet=st.characters(exclude_categories=["Cs"])) | st.text("\0\1a", max_size=4),
    pa.bool_(): st.booleans(),
    pa.date32(): st.dates(),
}


@given(st.data())
def test_bytes_compare_as_the_values_do(data):
    types = data.draw(st.lists(st.sampled_from(list(VALUES)), min_size=1, max_size=3))
    rows = data.draw(st.lists(st.tuples(*(VALUES[kind] for kind in types)), min_size=1, max_size=8))
    columns = [pa.array([row[n] for row in rows], kind) for n, kind in enumerate(types)]
    keys = pack(columns)
    assert [column.to_pylist() for column in unpack(keys, types)] == [
        column.to_pylist() for column in columns
    ]
    texts = [
        tuple(value.encode() if isinstance(value, str) else value for value in row) for row in rows
    ]
    order = sorted(range(len(rows)), key=texts.__getitem__)
    assert order == sorted(range(len(rows)), key=keys.to_pylist().__getitem__)


@pytest.mark.parametrize("key", [b"", b"\0" * 7, b"\0" * 9])
def test_bytes_that_are_no_id(key):
    with pytest.raises(ValueError, match="set id"):
        unpack(pa.array([key], pa.large_binary()), [pa.int64()])


def rows(seed=0, count=300):
    generator = np.random.default_rng(seed)
    run, event = generator.integers(-2, 2, count), generator.integers(0, 12, count)
    numbers = generator.standard_normal((3, count), dtype=np.float32)
    return pa.table(
        {"run": run.astype("i4"), "event": [f"e{n}" for n in event]}
        | {f"f{n}": numbers[n] for n in range(3)}
    )


def expected(table):
    """Count and encoding by (run, event), as rows that are sorted."""
    columns = (table[name].to_pylist() for name in ("run", "event"))
    ids = [f"{run + 10:02d}/{event}" for run, event in zip(*columns, strict=True)]
    plain = table.drop_columns(["run", "event"]).append_column("id", [ids])
    found = setfold.encode_frame(encoder(), plain, set="id").to_pylist()
    return [
        (int(row["id"].split("/")[0]) - 10, row["id"].split("/")[1], row["count"], row["encoding"])
        for row in found
    ]


def assert_expected(found, table):
    assert found.column_names == ["run", "event", "count", "encoding"]
    wanted = expected(table)
    for name, values in zip(("run", "event", "count"), zip(*wanted, strict=True), strict=False):
        assert found[name].to_pylist() == list(values)
    encodings = [row[3] for row in wanted]
    np.testing.assert_allclose(found["encoding"].to_pylist(), encodings, rtol=1e-5, atol=1e-6)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(rows(0), "a.parquet")
    pq.write_table(rows(1), "b.parquet")
    return tmp_path


@pytest.mark.parametrize("name", ["run,event", ["run", "event"]])
@pytest.mark.parametrize("budget", [None, Budget(batch_rows=16, store_bytes=3000)])
@pytest.mark.usefixtures("folder")
def test_files(name, budget, monkeypatch):
    if budget is not None:
        monkeypatch.setattr(plan, "split_memory", lambda *_: budget)
    found = setfold.encode_sets(encoder(), "*.parquet", "out.arrow", set=name, states="s.arrow")
    assert (found.spills > 0) == (budget is not None)
    both = pa.concat_tables([rows(0), rows(1)])
    assert_expected(pa.ipc.open_file("out.arrow").read_all(), both)
    setfold.readout_states("s.arrow", "again.parquet")
    assert_expected(pq.read_table("again.parquet"), both)
    for file in ("out.arrow", "again.parquet", "s.arrow"):
        setfold.verify(file)


@pytest.mark.usefixtures("folder")
def test_merge():
    for file in ("a", "b"):
        setfold.encode_sets(
            encoder(), f"{file}.parquet", f"{file}.npz", set="run,event", states=f"{file}.arrow"
        )
    setfold.merge_states(["a.arrow", "b.arrow"], "both.arrow")
    setfold.readout_states("both.arrow", "both.parquet")
    assert_expected(pq.read_table("both.parquet"), pa.concat_tables([rows(0), rows(1)]))


@pytest.mark.usefixtures("folder")
def test_archives_and_csv():
    for name in ("out.npz", "out.csv"):
        setfold.encode_sets(encoder(), "a.parquet", name, set="run,event")
    wanted = expected(rows(0))
    setfold.verify("out.npz")
    found = np.load("out.npz")
    assert found.files == ["run", "event", "count", "encoding"]
    frame = pd.read_csv("out.csv")
    for name, values in zip(("run", "event", "count"), zip(*wanted, strict=True), strict=False):
        assert found[name].tolist() == frame[name].tolist() == list(values)


@pytest.mark.usefixtures("folder")
def test_ids_that_numpy_cannot_store_are_refused():
    pq.write_table(pa.table({"run": [1], "event": ["a\0"], "f": [1.0]}), "zero.parquet")
    with pytest.raises(setfold.InputError, match="strips trailing zero bytes"):
        setfold.encode_sets(setfold.Pool(1), "zero.parquet", "zero.npz", set="run,event")
    setfold.encode_sets(setfold.Pool(1), "zero.parquet", "out.parquet", set="run,event")
    assert pq.read_table("out.parquet")["event"].to_pylist() == ["a\0"]


@pytest.mark.usefixtures("folder")
def test_an_interrupted_run_is_resumed(monkeypatch):
    monkeypatch.setattr(plan, "split_memory", lambda *_: Budget(batch_rows=16, store_bytes=3000))

    def stop(progress):
        if progress.elements > 200:
            raise KeyboardInterrupt

    options = {"set": "run,event", "save_every": 0}
    with pytest.raises(KeyboardInterrupt):
        setfold.encode_sets(encoder(), "*.parquet", "out.parquet", progress=stop, **options)
    setfold.encode_sets(encoder(), "*.parquet", "out.parquet", resume=True, **options)
    assert_expected(pq.read_table("out.parquet"), pa.concat_tables([rows(0), rows(1)]))
    assert setfold.encode_sets(
        encoder(), "*.parquet", "out.parquet", resume=True, **options
    ).was_complete


def test_a_column_that_is_also_a_folder_is_ambiguous(tmp_path):
    (tmp_path / "user=7").mkdir()
    (tmp_path / "user=7" / "a.csv").write_text("user,x,y\n8,1,a\n")
    for name in ("user", "user,y"):
        with pytest.raises(setfold.InputError, match="several columns 'user'"):
            setfold.encode_sets(
                setfold.Pool(1), tmp_path, tmp_path / "o.npz", set=name, features="x"
            )


def test_folders_and_text(tmp_path):
    for day in ("mon", "tue"):
        (tmp_path / f"day={day}").mkdir()
        (tmp_path / f"day={day}" / "a.csv").write_text("user,x\n007,1\n7,2\n007,4\n")
    out = tmp_path / "out.parquet"
    setfold.encode_sets(setfold.Pool(1, "mean"), tmp_path, out, set="day,user")
    found = pq.read_table(out)
    assert found["day"].to_pylist() == ["mon", "mon", "tue", "tue"]
    assert found["user"].to_pylist() == ["007", "7", "007", "7"]
    assert found["encoding"].to_pylist() == [[2.5], [2.0]] * 2


@pytest.mark.parametrize(
    "make", [lambda table: table, lambda table: table.to_pandas()], ids=["arrow", "pandas"]
)
def test_frames(make):
    frame = make(rows(0))
    found = setfold.encode_frame(encoder(), frame, set="run,event")
    if isinstance(found, pd.DataFrame):
        assert found["run"].dtype == np.int32
        assert len(frame.merge(found, on=["run", "event"])) == len(frame)
        found = pa.table({**found, "encoding": [np.ravel(each) for each in found["encoding"]]})
    assert_expected(found, rows(0))


def test_dates_and_booleans():
    day = datetime.date(2026, 11, 18)
    table = pa.table({"day": [day, None], "flag": [True, False], "x": [1.0, 2.0]})
    model = setfold.Pool(1, "mean")
    found = setfold.encode_frame(model, table[:1], set="day,flag").to_pylist()
    assert found == [{"day": day, "flag": True, "count": 1, "encoding": [1.0]}]
    assert len(setfold.encode_frame(model, table[:0], set="day,flag")) == 0
    with pytest.raises(setfold.InputError, match=r"row 1 .* column 'day' is null"):
        setfold.encode_frame(model, table, set="day,flag")


@pytest.mark.usefixtures("folder")
def test_sets_are_named_in_messages():
    table = pa.table({"run": [3, 3, 4], "event": ["x"] * 3, "f": [1e308, 1e308, 1.0]})
    pq.write_table(table, "large.parquet")
    model, options = setfold.Pool(1, "sum").double(), {"set": "run,event"}
    with pytest.raises(setfold.NonFiniteError, match="set run=3, event=x"):
        setfold.encode_sets(model, "large.parquet", "o.parquet", **options)
    setfold.encode_sets(
        model, "large.parquet", "o.parquet", skip_errors=True, restart=True, **options
    )
    (line,) = Path("o.parquet.skipped.jsonl").read_text().splitlines()
    assert json.loads(line)["set"] == "run=3, event=x"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run,run", "expected the columns of the set id, each once"),
        ("", "expected the columns of the set id"),
        ("run,", "expected the columns of the set id"),
        ("`run", "expected the columns of the set id"),
        ("run,evnt", "Did you mean 'event'"),
        ("run,f0", "'f0' is float"),
        ("run,count", "cannot be named 'count'"),
        ([], "expected the columns of the set id"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_errors(name, message):
    with pytest.raises(setfold.InputError, match=message):
        setfold.encode_sets(encoder(), "a.parquet", "out.parquet", set=name)


@pytest.mark.usefixtures("folder")
def test_types_must_agree():
    table = rows(1)
    pq.write_table(table.set_column(0, "run", pa.array(["1"] * len(table))), "b.parquet")
    with pytest.raises(setfold.InputError, match="Convert them to one type"):
        setfold.encode_sets(encoder(), "*.parquet", "out.parquet", set="run,event")
    for name in "ab":
        setfold.encode_sets(
            encoder(), f"{name}.parquet", f"{name}.npz", set="run,event", states=f"{name}.arrow"
        )
    with pytest.raises(setfold.InputError, match="Convert them to one type"):
        setfold.merge_states(["a.arrow", "b.arrow"], "both.arrow")


# ---- each row is a set -------------------------------------------------------------------------


def test_exploded_rows_keep_their_order(tmp_path):
    lists = [[float(n)] * (n % 3) for n in range(25)]
    for name in ("b", "a"):
        pq.write_table(pa.table({"x": lists}), tmp_path / f"{name}.parquet", row_group_size=7)
    out, options = tmp_path / "out.arrow", {"explode": True, "root": tmp_path}
    inputs = [tmp_path / "b.parquet", tmp_path / "a.parquet"]
    setfold.encode_sets(setfold.Pool(1, "mean"), inputs, out, **options)
    found = pa.ipc.open_file(out).read_all()
    assert found.column_names == ["file", "row", "count", "encoding"]
    assert found["file"].to_pylist() == ["a.parquet"] * 25 + ["b.parquet"] * 25
    assert found["row"].to_pylist() == [*range(25)] * 2
    assert found["count"].to_pylist() == [n % 3 for n in range(25)] * 2
