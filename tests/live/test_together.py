"""Many small batches at once give what they give one by one."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import setfold
from setfold import live
from setfold.errors import BatchConflictError, InputError, StoreError
from setfold.live.contents import ContentDigest, digests_of
from setfold.live.together import Bundle

DAY = 86400


def rows_of(names, values, **more):
    return pa.record_batch({"user": pa.array(names, pa.string()), "x": pa.array(values), **more})


@pytest.fixture
def sets(tmp_path):
    with live.create(tmp_path / "live.db", setfold.Pool(1, "mean"), dtype="float64") as made:
        yield made


@pytest.fixture
def dated(tmp_path):
    model = setfold.Pool(1, "sum")
    with live.create(tmp_path / "dated.db", model, bucket="1d", window="2d") as made:
        yield made


COLUMNS = {
    "integers": st.integers(-(2**40), 2**40),
    "floats": st.floats(width=64),
    "texts": st.text(max_size=5),
    "flags": st.booleans(),
    "lists": st.lists(st.integers(0, 9), max_size=3),
}


@given(st.data(), st.lists(st.integers(0, 4), min_size=1, max_size=6), st.booleans())
def test_digests_of_slices_are_those_of_the_batches_alone(data, lengths, missing):
    total = sum(lengths)
    kinds = data.draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=4))
    columns = []
    for kind in kinds:
        one = st.none() | COLUMNS[kind] if missing else COLUMNS[kind]
        values = data.draw(st.lists(one, min_size=total, max_size=total))
        columns.append(pa.array(values, None if total else pa.float64()))
    rows = pa.record_batch(columns, [str(place) for place in range(len(columns))])
    start, expected = 0, []
    for length in lengths:
        alone = ContentDigest(rows.schema)
        alone.add(rows.slice(start, length))
        expected.append(alone.result())
        start += length
    assert digests_of(rows, lengths) == expected


def test_a_bundle_is_what_its_batches_are(sets, tmp_path):
    names, values = ["ann", "bob", "ann", "eve", "bob"], [1.0, 2.0, 3.0, 4.0, 6.0]
    bundle = Bundle(rows_of(names, values), [2, 1, 2], [("a", 1), ("a", 2), ("b", 1)], "user")
    (found,) = sets.update_many([bundle])
    with live.create(tmp_path / "other.db", setfold.Pool(1, "mean"), dtype="float64") as other:
        alone = [other.update(one.rows, set="user", batch=one.batches[0]) for one in bundle.split()]
        assert found == alone
        assert sets.count(["ann", "bob", "eve"]) == other.count(["ann", "bob", "eve"]) == [2, 2, 1]
        assert torch.equal(sets.encode(["ann", "bob"]), other.encode(["ann", "bob"]))
        # The digests are the same, so a batch of one store is a duplicate in the other.
        assert {one.status for one in other.update_many([bundle])[0]} == {"duplicate"}


def test_a_batch_counts_once_even_within_a_bundle(sets):
    rows = rows_of(["ann", "ann", "ann"], [1.0, 1.0, 2.0])
    (found,) = sets.update_many([Bundle(rows, [1, 1, 1], [("a", 1)] * 3, "user")])
    assert [one.status for one in found[:2]] == ["applied", "duplicate"]
    assert isinstance(found[2], BatchConflictError)
    assert sets.count(["ann"]) == [1]


@pytest.mark.parametrize("bad", [0, 3, 6])
def test_a_bad_batch_does_not_affect_the_others(sets, bad):
    values = [float(number) for number in range(7)]
    values[bad] = float("nan")
    names = [f"user {number}" for number in range(7)]
    keys = [("a", number) for number in range(7)]
    (found,) = sets.update_many([Bundle(rows_of(names, values), [1] * 7, keys, "user")])
    assert [isinstance(one, InputError) for one in found] == [n == bad for n in range(7)]
    assert "row 0" in str(found[bad])  # of its own rows
    assert sets.count(names) == [int(number != bad) for number in range(7)]


def test_bundles_with_other_columns_share_the_transaction(sets):
    first = Bundle(rows_of(["ann"], [1.0]), [1], [("a", 1)], "user")
    second = Bundle(rows_of(["ann"], [3]), [1], [("a", 2)], "user")
    wrong = Bundle(pa.record_batch({"user": ["ann"], "y": ["text"]}), [1], [("a", 3)], "user")
    found = sets.update_many([first, wrong, second])
    assert [one.status for (one,) in (found[0], found[2])] == ["applied", "applied"]
    assert isinstance(found[1][0], InputError)
    assert sets.encode(["ann"]).item() == 2.0


def test_late_and_deleted_rows_are_counted_for_their_batch(dated, monkeypatch):
    monkeypatch.setattr("setfold.live.times.now", lambda: 10 * DAY * 1_000_000)
    dated.update(
        rows_of(["ann", "bob"], [1.0, 1.0], at=[9 * DAY, 10 * DAY]),
        set="user",
        features="x",
        time="at",
        batch=("a", 0),
    )
    dated.expire()
    dated.delete(["bob"])
    rows = rows_of(
        ["ann", "ann", "bob", "bob", "eve"],
        [1.0, 2.0, 4.0, 8.0, 16.0],
        at=[8 * DAY, 9 * DAY, 9 * DAY, 10 * DAY, 8 * DAY],
    )
    keys = [("b", 1), ("b", 2), ("b", 3)]
    (found,) = dated.update_many([Bundle(rows, [2, 2, 1], keys, "user", "x", "at")])
    assert found == [
        live.Applied("applied", 1, 1, late=1),
        live.Applied("applied", 1, 1, deleted=1),
        live.Applied("applied", 0, 0, late=1),
    ]
    assert dated.encode(["ann", "bob", "eve"]).flatten().tolist() == [3.0, 8.0, 0.0]


def test_a_bad_time_is_an_error_of_its_batch(dated):
    rows = rows_of(["ann", "bob"], [1.0, 1.0], at=pa.array([0.0, float("nan")]))
    (found,) = dated.update_many([Bundle(rows, [1, 1], [("a", 1), ("a", 2)], "user", "x", "at")])
    assert found[0].status == "applied"
    assert isinstance(found[1], InputError)


def test_if_the_store_fails_halfway_each_batch_says_what_became_of_it(sets, monkeypatch):
    """A bad row splits the group; if the disk is full then, the part before it is applied."""
    real, calls = sets.database.writing, []

    def writing(**options):
        calls.append(options)
        if len(calls) > 1:  # the first one is that of the good half
            raise StoreError("the disk is full")
        return real(**options)

    monkeypatch.setattr(sets.database, "writing", writing)
    rows = rows_of(["ann", "bob", "eve", "joe"], [1.0, 1.0, 1.0, float("nan")])
    keys = [("a", number) for number in range(4)]
    (found,) = sets.update_many([Bundle(rows, [1] * 4, keys, "user")])
    assert [one.status for one in found[:2]] == ["applied", "applied"]
    assert isinstance(found[2], StoreError)
    assert isinstance(found[3], InputError)
    assert sets.count(["ann", "bob", "eve", "joe"]) == [1, 1, 0, 0]


def test_count_and_encoding_of_a_read_are_of_one_moment(sets):
    sets.update(rows_of(["ann", "ann"], [1.0, 3.0]), set="user", batch=("a", 1))
    counts, encodings = sets.look_up(["bob", "ann"])
    assert counts == [0, 2]
    assert torch.equal(encodings, sets.encode(["bob", "ann"]))
