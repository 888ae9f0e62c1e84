"""Data frames of several libraries: the same encodings as files, in and out in kind."""

from __future__ import annotations

import datetime
import subprocess
import sys

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

import setfold
from setfold.files import frames
from setfold.files.engines import frames as engine
from tests.files.files import encoder, expected, rows

KINDS = {
    "table": lambda table: table,
    "chunks": lambda table: pa.concat_tables([table[:7], table[7:200], table[200:]]),
    "batch": lambda table: table.combine_chunks().to_batches()[0],
    "reader": lambda table: table.to_reader(max_chunksize=50),
    "pandas": lambda table: table.to_pandas(),
    "polars": pl.DataFrame,
    "duckdb": lambda table: duckdb.connect().from_arrow(table),
    "capsule": lambda table: Capsule(table),
}


class Capsule:
    """An object of another library, which has the Arrow PyCapsule interface and nothing else."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def as_arrow(frame):
    """A result of any kind as an Arrow table."""
    if isinstance(frame, pd.DataFrame):
        flat = [np.ravel(each) for each in frame["encoding"]]
        return pa.table({**frame.drop(columns="encoding"), "encoding": flat})
    return frame if isinstance(frame, pa.Table) else pa.table(frame)


def assert_expected(found, model, table):
    wanted = expected(model, table)
    assert found.column_names == ["event", "count", "encoding"]
    assert found["event"].to_pylist() == sorted(wanted)
    for row in found.to_pylist():
        count, encoding = wanted[row["event"]]
        assert row["count"] == count
        np.testing.assert_allclose(row["encoding"], encoding.ravel(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [int, str])
def test_every_kind_of_frame(kind, names, monkeypatch):
    monkeypatch.setattr(engine, "MAX_BATCH_ROWS", 64)  # many batches
    model, table = encoder(), rows(names=names)
    frame = KINDS[kind](table)
    found = setfold.encode_frame(model, frame, set="event")
    in_kind = kind in ("table", "pandas", "polars", "duckdb")
    assert isinstance(found, type(frame) if in_kind else pa.Table)
    assert_expected(as_arrow(found), model, table)


def test_the_result_is_that_of_files(tmp_path):
    model, table = encoder(), rows()
    pq.write_table(table, tmp_path / "rows.parquet")
    setfold.encode_sets(model, tmp_path / "rows.parquet", tmp_path / "out.parquet", set="event")
    found = setfold.encode_frame(model, table, set="event")
    of_files = pq.read_table(tmp_path / "out.parquet").rename_columns(found.column_names)
    assert found.equals(of_files)


@pytest.mark.parametrize("store", [1, 1 << 30])
def test_states_that_do_not_fit_are_spilled(store, monkeypatch):
    monkeypatch.setattr(engine, "MAX_BATCH_ROWS", 64)
    monkeypatch.setattr(frames, "STORE_BYTES", store)
    table = rows()
    assert_expected(setfold.encode_frame(encoder(), table, set="event"), encoder(), table)


def test_a_reader_is_read_batch_by_batch(monkeypatch):
    monkeypatch.setattr(engine, "MAX_BATCH_ROWS", 100)
    table, steps = rows(), []

    def batches():
        for batch in table.to_batches(max_chunksize=100):
            steps.append("read")
            yield batch

    step = engine.FrameTask.step
    monkeypatch.setattr(
        engine.FrameTask, "step", lambda *given: steps.append("absorbed") or step(*given)
    )
    reader = pa.RecordBatchReader.from_batches(table.schema, batches())
    assert_expected(setfold.encode_frame(encoder(), reader, set="event"), encoder(), table)
    assert steps == ["read", "absorbed"] * 6


@pytest.mark.parametrize("kind", ["table", "pandas", "polars", "duckdb"])
def test_an_empty_frame_has_no_sets(kind):
    found = setfold.encode_frame(encoder(), KINDS[kind](rows()[:0]), set="event")
    assert len(as_arrow(found)) == 0
    assert as_arrow(found).column_names == ["event", "count", "encoding"]


# ---- pandas ------------------------------------------------------------------------------------


def test_pandas_encodings_are_arrays_and_the_index_is_ignored():
    table = rows()
    frame = table.to_pandas()
    frame.index = np.random.default_rng(0).permutation(len(frame))
    found = setfold.encode_frame(encoder(), frame, set="event")
    assert found["encoding"].iloc[0].shape == (4, 5)
    assert np.stack(found["encoding"]).dtype == np.float32
    assert list(found.index) == list(range(len(found)))
    assert_expected(as_arrow(found), encoder(), table)


@pytest.mark.parametrize(
    "dtypes",
    [
        {"event": "Int32", "f0": "Float32", "f1": "Float64", "f2": "float32"},
        {"event": "int64[pyarrow]", "f0": "double[pyarrow]", "f1": "float[pyarrow]"},
        {"event": "int16", "f0": "float64", "f1": "float16"},
    ],
)
def test_pandas_dtypes(dtypes):
    table = rows()
    frame = table.to_pandas().round(1).astype(dtypes)
    found = setfold.encode_frame(encoder(), frame, set="event")
    assert found["event"].dtype == frame["event"].dtype
    rounded = pa.table({name: frame[name].astype("float32").to_numpy() for name in frame})
    rounded = rounded.set_column(0, "event", table["event"])
    assert_expected(as_arrow(found), encoder(), rounded)


def test_pandas_categories_and_objects():
    table = rows(names=str)
    frame = table.to_pandas()
    for dtype in ("category", object):
        frame["event"] = frame["event"].astype(dtype)
        found = setfold.encode_frame(encoder(), frame, set="event")
        assert found["event"].dtype == frame["event"].dtype
        assert_expected(as_arrow(found), encoder(), table)
        assert len(frame.merge(found, on="event")) == len(frame)


def test_pandas_columns_that_are_not_used_may_hold_anything():
    frame = rows().to_pandas()
    frame["extra"] = [object()] * len(frame)
    frame[7] = "text"
    assert_expected(
        as_arrow(setfold.encode_frame(encoder(), frame, set="event")), encoder(), rows()
    )
    with pytest.raises(setfold.InputError, match="'extra' of the frame is"):
        setfold.encode_frame(encoder(), frame, set="event", features="f0,f1,extra")
    with pytest.raises(setfold.InputError, match="set column 'extra' is"):
        setfold.encode_frame(encoder(), frame, set="extra", features="f0,f1,f2")


def test_pandas_objects_of_two_types():
    frame = rows().to_pandas()
    frame["event"] = frame["event"].astype(object)
    frame.loc[5, "event"] = "five"
    with pytest.raises(setfold.InputError, match="column 'event'"):
        setfold.encode_frame(encoder(), frame, set="event")


def test_pandas_columns_in_the_index_are_not_found():
    frame = rows().to_pandas().set_index(["event", "f2"])
    for function in (setfold.encode_frame, setfold.partial_states):
        with pytest.raises(setfold.InputError, match=r"'event' is in the index.*reset_index\(\)"):
            function(encoder(), frame, set="event")
    with pytest.raises(setfold.InputError, match="'f2' is in the index"):
        setfold.encode_frame(
            encoder(), frame.reset_index("event"), set="event", features="f0,f1,f2"
        )


# ---- other libraries ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [pl.Int16, pl.UInt64, pl.String, pl.Categorical, pl.Date])
def test_polars_results_can_be_joined(dtype):
    table = rows()
    frame = pl.DataFrame(table)
    days = pl.lit(datetime.date(2026, 1, 1)) + pl.duration(days="event")
    names = pl.col("event").cast(pl.String).cast(dtype) if dtype == pl.Categorical else None
    ids = days if dtype == pl.Date else pl.col("event").cast(dtype) if names is None else names
    frame = frame.with_columns(event=ids)
    found = setfold.encode_frame(encoder(), frame, set="event")
    assert found.schema["event"] == frame.schema["event"]
    assert isinstance(found.schema["encoding"], pl.Array)
    assert len(frame.join(found, on="event")) == len(frame)


def test_a_duckdb_result_belongs_to_the_same_connection():
    connection = duckdb.connect()
    connection.register("events", rows())
    found = setfold.encode_frame(encoder(), connection.table("events"), set="event")
    assert found.aggregate("sum(count)").fetchall() == [(600,)]
    found.create("encodings")
    assert connection.sql("SELECT count(*) FROM encodings").fetchall() == [(40,)]


def test_no_library_is_needed():
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('pandas', 'polars', 'duckdb'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import pyarrow as pa, setfold\n"
        "rows = pa.table({'user': [1], 'x': [1.0]})\n"
        "print(setfold.encode_frame(setfold.Pool(1, 'mean'), rows, set='user').num_rows)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


# ---- options and errors ------------------------------------------------------------------------


def test_lists_are_exploded():
    table = pa.table({"user": ["b", "a", "b"], "x": [[1.0, 3.0], [], [5.0]]})
    model = setfold.Pool(1, "mean")
    found = setfold.encode_frame(model, table, set="user", explode=True).to_pylist()
    assert found == [
        {"user": "a", "count": 0, "encoding": [0.0]},
        {"user": "b", "count": 3, "encoding": [3.0]},
    ]
    found = setfold.encode_frame(model, table.select(["x"]), explode=True).to_pylist()
    assert [(row["row"], row["count"]) for row in found] == [(0, 2), (1, 0), (2, 1)]


def test_features_and_dtype():
    frame = pd.DataFrame({"user": [1, 1], "x": [1.0, 2.0], "y": [4.0, 5.0]})
    model = setfold.Pool(1, "mean")
    found = setfold.encode_frame(model, frame, set="user", features="y*2", dtype="float64")
    assert found["encoding"][0].tolist() == [9.0]
    assert found["encoding"][0].dtype == np.float64


@pytest.mark.parametrize("kind", ["table", "pandas", "polars", "duckdb"])
def test_bad_rows_are_named(kind, monkeypatch):
    monkeypatch.setattr(engine, "MAX_BATCH_ROWS", 64)
    table = rows()
    for value, reason in ((None, "is (null|NaN or infinite)"), (np.inf, "is NaN or infinite")):
        column = table["f1"].to_pylist()
        column[333] = value
        frame = KINDS[kind](table.set_column(2, "f1", pa.array(column, pa.float32())))
        for function in (setfold.encode_frame, setfold.partial_states):
            with pytest.raises(setfold.InputError, match=f"row 333 .* column 'f1' {reason}"):
                function(encoder(), frame, set="event")


def test_null_set_ids_are_named():
    frame = rows(names=str).to_pandas()
    frame.loc[4, "event"] = None
    with pytest.raises(setfold.InputError, match=r"row 4 .* column 'event' is null"):
        setfold.encode_frame(encoder(), frame, set="event")


def test_sets_that_overflow_are_named():
    frame = pa.table({"user": ["a", "b", "b"], "x": [1.0, 1e308, 1e308]})
    with pytest.raises(setfold.NonFiniteError, match="set b"):
        setfold.encode_frame(setfold.Pool(1, "sum").double(), frame, set="user")


@pytest.mark.parametrize(
    ("frame", "options", "message"),
    [
        (rows(), {}, "needs the column"),
        (rows(), {"set": "evnt"}, "Did you mean 'event'"),
        (rows(), {"set": "event", "features": "f0"}, "elements of 1 numbers"),
        (rows().rename_columns(["count", "f0", "f1", "f2"]), {"set": "count"}, "be named 'count'"),
        (pl.LazyFrame({"event": [1]}), {"set": "event"}, "got LazyFrame. Collect it first"),
        ({"event": [1]}, {"set": "event"}, "got dict"),
        (pl.Series([1]), {"set": "event"}, "cannot read this Series as a table"),
        (pl.DataFrame({"event": [1]}, {"event": pl.Int128}), {"set": "event"}, "types of Arrow"),
        (None, {"set": "event"}, "got NoneType"),
    ],
)
def test_errors(frame, options, message):
    with pytest.raises(setfold.InputError, match=message):
        setfold.encode_frame(encoder(), frame, **options)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "reader"])
def test_a_model_of_several_passes_reads_the_frame_again(kind, monkeypatch):
    monkeypatch.setattr(engine, "MAX_BATCH_ROWS", 64)
    torch.manual_seed(0)
    model, table = setfold.SetTransformer(3, 4, 2, 2).eval(), rows(names=str)
    found = as_arrow(setfold.encode_frame(model, KINDS[kind](table), set="event")).to_pylist()
    assert [row["event"] for row in found] == sorted(set(table["event"].to_pylist()))
    for row in found:
        own = table.filter(pc.equal(table["event"], row["event"])).drop_columns("event")
        elements = torch.from_numpy(np.stack([column.to_numpy() for column in own.columns], 1))
        whole = model(elements[None])[0].detach().numpy()
        np.testing.assert_allclose(row["encoding"], whole.ravel(), rtol=2e-5, atol=2e-6)


class Changing:
    """A stream with other rows each time it is opened."""

    def __init__(self, *tables):
        self._tables = iter(tables)

    def __arrow_c_stream__(self, requested_schema=None):
        return next(self._tables).__arrow_c_stream__(requested_schema)


def test_a_frame_that_changes_between_passes_is_an_error():
    table, model = rows(), setfold.EquivariantDeepSets(3, [4])
    others = rows(names=lambda number: 1000 + int(number))
    changing = [Changing(table, later) for later in (table[:0], table[1:], others)]
    for frame in (*changing, table.to_reader()):
        with pytest.raises(setfold.InputError, match="Pass a table"):
            setfold.encode_frame(model, frame, set="event")


@pytest.mark.parametrize("kind", ["table", "pandas", "polars", "duckdb"])
def test_encode_sets_says_what_to_call_for_a_frame(kind):
    with pytest.raises(setfold.InputError, match=r"setfold\.encode_frame"):
        setfold.encode_sets(encoder(), KINDS[kind](rows()), set="event")


@pytest.mark.parametrize("kind", KINDS)
def test_partial_states_takes_the_same_frames(kind, monkeypatch):
    monkeypatch.setattr(engine, "MAX_BATCH_ROWS", 64)
    model, table = encoder(), rows()
    halves = [
        setfold.partial_states(model, KINDS[kind](part), set="event")
        for part in (table[:300], table[300:])
    ]
    found = setfold.read_partials(model, setfold.merge_partials(halves))
    assert_expected(found.rename_columns(["event", "count", "encoding"]), model, table)


def test_training_mode_is_switched_off():
    model = setfold.DeepSets(torch.nn.Dropout(0.5), 3, head=None).train()
    found = setfold.encode_frame(model, rows(), set="event")
    assert found.equals(setfold.encode_frame(model, rows(), set="event"))


def test_bfloat16_is_an_error():
    model = encoder().bfloat16()
    for function in (setfold.encode_frame, setfold.partial_states):
        with pytest.raises(setfold.InputError, match="bfloat16"):
            function(model, rows(), set="event")
    assert len(setfold.encode_frame(model, rows(), set="event", dtype="float32")) == 40
