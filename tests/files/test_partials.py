"""Other engines: the examples in docs/clusters.md, and packed states."""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import setfold
from setfold.files.partials import pack_partials, unpack_partials
from tests.examples import ROOT, run_examples

PAGE = ROOT / "docs" / "clusters.md"


def assert_encodings(found, names):
    """Compare a table with the encodings of whole sets."""
    rows = pq.read_table("events")
    event, *features = (rows[name].to_numpy() for name in ("event", "x", "y"))
    elements = torch.from_numpy(np.stack(features, 1))
    assert sorted(found["set"].to_pylist()) == list(range(20))
    for row in found.to_pylist():
        own = elements[torch.from_numpy(event == row["set"])]
        assert row["count"] == len(own)
        with torch.no_grad():
            expected = names["encoder"](own[None])
        torch.testing.assert_close(
            torch.tensor(row["encoding"]), expected.flatten(), rtol=1e-5, atol=1e-6
        )


def test_a_loop_makes_the_encodings_of_whole_sets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_examples(PAGE)
    assert_encodings(names["encodings"], names)


@pytest.mark.filterwarnings("ignore:The inplace keyword in DataFrame.reset_index")  # of Dask itself
def test_dask_makes_the_encodings_of_whole_sets(tmp_path, monkeypatch):
    pytest.importorskip("dask.dataframe")
    monkeypatch.chdir(tmp_path)
    names = run_examples(PAGE, "dask")
    assert_encodings(names["from_dask"], names)


# Spark needs Java and the extra `spark`, which `make stress` installs.
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")
def test_spark_makes_the_encodings_of_whole_sets(tmp_path, monkeypatch):
    pytest.importorskip("pyspark")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    names = run_examples(PAGE, "pyspark")
    names["spark"].stop()
    assert_encodings(pq.read_table("encodings"), names)


# ---- packed states -----------------------------------------------------------------------------


def slots(seed=0, **settings):
    torch.manual_seed(seed)
    return setfold.SlotSetEncoder(2, num_slots=4, dim_slot=8, dim_out=8, **settings).eval()


def partials(encoder, names=(7, 8, 7, 9)):
    x = np.random.default_rng(0).standard_normal((2, len(names)), np.float32)
    rows = pa.table({"event": pa.array(names), "x": x[0], "y": x[1]})
    return setfold.partial_states(encoder, rows, set="event")


ENCODERS = {
    "slots": slots(),
    "slots, several aggregates": slots(aggregate=["weighted_mean", "max"]),
    "no slots": setfold.Pool(2, "max"),
    "a softmax": setfold.AttentionPool(2, num_queries=3, dim_out=4),
    "float64": slots().double(),
}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("names", [(7, 8, 7, 9), ("b", "a"), np.array([], np.int64)])
def test_packed_states_are_the_same_again(name, names):
    encoder = ENCODERS[name].eval()
    table = partials(encoder, names)
    packed = pack_partials(table)
    assert packed.schema.names == ["set", "state"]
    assert packed.schema.types == [table["set"].type, pa.binary()]
    assert packed.schema.metadata is None
    assert unpack_partials(encoder, packed).equals(table, check_metadata=True)


def test_packed_states_can_be_sliced_and_given_as_batches():
    encoder = slots()
    table = partials(encoder)
    packed = pack_partials(table)
    (batch,) = packed.to_batches()
    some = [unpack_partials(encoder, part) for part in (batch[2:], packed[:1], batch[1:2])]
    assert setfold.merge_partials(some).equals(setfold.merge_partials([table]))
    apart = pa.concat_tables([packed[2:], packed[:2]])
    assert unpack_partials(encoder, apart)["set"].to_pylist() == [9, 7, 8]
    width = len(packed["state"][0].as_py())
    fixed = packed.set_column(1, "state", packed["state"].cast(pa.binary(width)))
    assert unpack_partials(encoder, fixed[1:2]).equals(table[1:2])


@pytest.mark.parametrize("other", [slots(seed=1), slots(aggregate="max"), setfold.Pool(2, "max")])
def test_packed_states_of_another_model_are_refused(other):
    with pytest.raises(setfold.StateMismatchError, match="another model, or they are corrupt"):
        unpack_partials(other.eval(), pack_partials(partials(slots())))


@pytest.mark.parametrize("state", [b"", b"short", None])
def test_damaged_states_are_refused(state):
    packed = pack_partials(partials(slots()))
    states = [*packed["state"].to_pylist()[1:], state]
    with pytest.raises(setfold.StateMismatchError, match="another model, or they are corrupt"):
        unpack_partials(slots(), packed.set_column(1, "state", pa.array(states, pa.binary())))


def test_only_tables_of_states_are_packed():
    with pytest.raises(setfold.FileError, match="not written by setfold"):
        pack_partials(pa.table({"set": [1]}))
