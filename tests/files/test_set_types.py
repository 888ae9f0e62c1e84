"""Set ids of every type: grouped and stored, or refused before anything is read."""

from __future__ import annotations

import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import setfold
from tests.files.files import encoder

MORNING, EVENING = datetime.time(8), datetime.time(20)
MONTHS = pa.month_day_nano_interval()
TYPES = {
    "int8": pa.array([3, -1], pa.int8()),
    "uint64": pa.array([2**63 + 1, 3], pa.uint64()),
    "bool": pa.array([True, False]),
    "text": pa.array(["b", "a"]),
    "bytes": pa.array([b"b", b"a"]),
    "dictionary": pa.array(["b", "a"]).dictionary_encode(),
    "date": pa.array([datetime.date(2026, 1, 2), datetime.date(2026, 1, 1)]),
    "timestamp": pa.array([2, 1], pa.timestamp("us", "Europe/Berlin")),
    "duration": pa.array([2, 1], pa.duration("s")),
    "decimal": pa.array([Decimal("2.5"), Decimal("1.5")]),
    "time": pa.array([EVENING, MORNING], pa.time64("us")),
}
NOT_IN_NUMPY = ("decimal", "time")
REFUSED = {
    "float": pa.array([2.0, 1.0]),
    "list": pa.array([[2], [1]]),
    "months": pa.array([(2, 1, 1), (1, 1, 1)], MONTHS),
}


def write(path, ids):
    """A hundred rows of two sets, alternating."""
    indices = pa.array(np.arange(100) % 2)
    columns = {f"f{i}": np.linspace(0, 1, 100, dtype=np.float32) for i in range(3)}
    table = pa.table({"id": ids.take(indices), **columns})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    return path


@pytest.mark.parametrize("name", TYPES)
def test_sets_have_ids_of_many_types(tmp_path, name):
    path = write(tmp_path / "a.arrow", TYPES[name])
    setfold.encode_sets(encoder(), path, tmp_path / "out.parquet", set="id")
    found = pq.read_table(tmp_path / "out.parquet")
    assert found["set"].to_pylist() == TYPES[name].to_pylist()[::-1]  # sorted
    assert found["count"].to_pylist() == [50, 50]


@pytest.mark.parametrize("name", TYPES)
def test_ids_are_stored_by_numpy_or_refused_before_anything_is_read(tmp_path, name):
    path, seen = write(tmp_path / "a.arrow", TYPES[name]), []
    options = {"set": "id", "progress": seen.append}
    if name in NOT_IN_NUMPY:
        with pytest.raises(setfold.InputError, match=r"npz cannot store.*\.parquet or \.arrow"):
            setfold.encode_sets(encoder(), path, tmp_path / "out.npz", **options)
        assert not seen
        setfold.encode_sets(
            encoder(), path, tmp_path / "out.arrow", states=tmp_path / "s.arrow", set="id"
        )
        with pytest.raises(setfold.InputError, match="npz cannot store"):
            setfold.readout_states(tmp_path / "s.arrow", tmp_path / "out.npz")
    else:
        setfold.encode_sets(encoder(), path, tmp_path / "out.npz", **options)
        assert len(np.load(tmp_path / "out.npz")["set"]) == 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_an_id_is_refused_before_anything_is_read(tmp_path, name):
    path = write(tmp_path / "a.arrow", REFUSED[name])
    with pytest.raises(
        setfold.InputError, match=r"the set column 'id' is .*expected integers or t"
    ):
        setfold.encode_sets(encoder(), path, tmp_path / "out.parquet", set="id")
