"""What becomes of batches, rows, sets and times, in each database."""

from __future__ import annotations

import datetime

import numpy as np
import pyarrow as pa
import pytest
import torch

import setfold
from setfold import live
from setfold.errors import BatchConflictError, InputError
from setfold.live.absorb import admit
from setfold.live.batches import Layout
from setfold.live.sets import make_columns
from tests.live.rows import (
    HOUR,
    NAMES,
    assert_holds,
    encodings,
    make_model,
    random_rows,
    timed_rows,
)

# ---- batches ------------------------------------------------------------------------------------


def test_a_batch_counts_once(url):
    model, rows = make_model(), random_rows(1)
    with live.create(url, model) as sets:
        first = sets.update(rows, set="user", batch=("orders", 1))
        assert first == live.Applied("applied", 30, len({*rows["user"].to_pylist()}))
        for again in (rows, pa.concat_tables([rows[:7], rows[7:]]), rows.to_pandas()):
            assert sets.update(again, set="user", batch=("orders", 1)).status == "duplicate"
        assert_holds(sets, model, rows)
        assert sets.update(rows, set="user", batch=("orders", 2)).status == "applied"
        assert sets.update(rows, set="user", batch=("clicks", 1)).status == "applied"
        assert_holds(sets, model, pa.concat_tables([rows] * 3))


def test_a_batch_with_other_rows_is_refused(url):
    model, rows = make_model(), random_rows(1)
    with live.create(url, model) as sets:
        sets.update(rows, set="user", batch=("orders", 1))
        for other in (random_rows(2), rows[:-1], rows.take([1, 0, *range(2, 30)])):
            with pytest.raises(BatchConflictError, match="1 of orders was applied before"):
                sets.update(other, set="user", batch=("orders", 1))
        assert_holds(sets, model, rows)


NO_IDENTITIES = ["orders", (), ("orders",), ("", 1), (1, 2), ("orders", 1.5), ("orders", True)]
NO_TEXTS = [("orders", ""), ("orders", "a\0b"), ("a\0", 1), ("orders", "\ud800")]
TOO_LONG = [("orders", 2**64), ("orders", 10**5000), ("orders", "x" * 1001), [10**5000]]


def str_or_type(batch):
    try:
        return ascii(batch)[:30]
    except ValueError:  # thousands of digits
        return "digits"


@pytest.mark.parametrize("batch", [*NO_IDENTITIES, *NO_TEXTS, *TOO_LONG], ids=str_or_type)
def test_an_identity_must_be_texts_and_integers(url, batch):
    with live.create(url, make_model()) as sets, pytest.raises(InputError, match="batch"):
        sets.update(random_rows(1), set="user", batch=batch)


def test_identities_that_look_alike_differ(url):
    batches = [("a", "1:2"), ("a", 1, 2), ("a", "1\\:2"), ("a:1", 2), ("ä", "💥"), ("A", 1, 2)]
    rows = random_rows(1)
    with live.create(url, make_model()) as sets:
        for batch in batches:
            assert sets.update(rows, set="user", batch=batch).status == "applied"
        for batch in batches:
            assert sets.update(rows, set="user", batch=batch).status == "duplicate"


def test_batches_of_one_transaction_do_not_affect_each_other(url):
    model, rows = make_model(), [random_rows(seed) for seed in range(4)]
    with live.create(url, model) as sets:
        sets.update(rows[0], set="user", batch=("orders", 0))
        bad = random_rows(9).set_column(1, "x0", pa.array([np.nan] * 30))
        pairs = [(rows[1], 1), (rows[0], 0), (rows[2], 0), (rows[3], 3), (rows[1], 1), (bad, 4)]
        group = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sets.group, "submit", group.append)
            for some, number in pairs:
                sets.update(some, set="user", batch=("orders", number))
        results = sets.group.commit(group)
        found = [getattr(result, "status", type(result)) for result in results]
        conflict = BatchConflictError
        assert found[:5] == ["applied", "duplicate", conflict, "applied", "duplicate"]
        assert isinstance(results[5], InputError)
        assert_holds(sets, model, pa.concat_tables([rows[0], rows[1], rows[3]]))


def test_a_batch_that_is_not_in_memory_at_once(url, monkeypatch):
    monkeypatch.setattr("setfold.live.sets.SMALL_ROWS", 7)
    monkeypatch.setattr("setfold.live.absorb.STORE_BYTES", 1 << 12)  # spills
    model, rows = make_model(), random_rows(1, 300, [f"user {n}" for n in range(50)])
    names = sorted({*rows["user"].to_pylist()})
    with live.create(url, model) as sets:
        found = sets.update(rows.to_reader(7), set="user", batch=("orders", 1))
        assert found == live.Applied("applied", 300, len(names))
        assert sets.update(rows.to_reader(7), set="user", batch=("orders", 1)).status == "duplicate"
        assert sets.update(rows, set="user", batch=("orders", 1)).status == "duplicate"
        with pytest.raises(BatchConflictError):
            sets.update(rows[1:], set="user", batch=("orders", 1))
        bad = random_rows(2, 50).set_column(1, "x0", pa.array([0.0] * 49 + [np.nan]))
        with pytest.raises(InputError, match="row 49"):
            sets.update(bad, set="user", batch=("orders", 2))
        assert_holds(sets, model, rows, names)


def test_no_rows_are_a_batch_too(url):
    with live.create(url, make_model()) as sets:
        none = random_rows(1)[:0]
        assert sets.update(none, set="user", batch=("orders", 1)) == live.Applied("applied")
        assert sets.update(none, set="user", batch=("orders", 1)).status == "duplicate"


# ---- rows and sets ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("x0", np.nan, "row 3"),
        ("x0", np.inf, "row 3"),
        ("x0", None, "row 3"),
        ("user", None, "row 3"),
    ],
)
def test_a_bad_row_leaves_nothing(url, column, value, reason):
    model, rows = make_model(), random_rows(1)
    values = [*rows[column].to_pylist()]
    values[3] = value
    bad = rows.set_column(rows.column_names.index(column), column, pa.array(values))
    with live.create(url, model) as sets:
        with pytest.raises(InputError, match=reason):
            sets.update(bad, set="user", batch=("orders", 1))
        assert_holds(sets, model, rows[:0])
        assert sets.update(rows, set="user", batch=("orders", 1)).status == "applied"
        with pytest.raises(InputError, match=reason):
            sets.update(bad, set="user", batch=("orders", 2))
        assert_holds(sets, model, rows)


def test_elements_that_overflow_together_leave_nothing(url):
    model = setfold.Pool(1, "sum").double()
    with live.create(url, model) as sets:
        for number in range(2):
            rows = pa.table({"user": ["ann", "bob"], "x": [1e308, 1.0]})
            if number == 1:
                with pytest.raises(setfold.NonFiniteError, match="not finite"):
                    sets.update(rows, set="user", batch=("orders", number))
            else:
                sets.update(rows, set="user", batch=("orders", number))
        assert sets.count(["ann", "bob"]) == [1, 1]
        assert sets.update(rows[1:], set="user", batch=("orders", 1)).status == "applied"


def test_a_set_that_is_not_there_is_empty(url):
    model = make_model()
    with live.create(url, model) as sets:
        for _ in range(2):
            assert sets.count(["nobody", "", "nobody"]) == [0, 0, 0]
            expected = encodings(model, random_rows(1)[:0], ["nobody"] * 2)
            assert torch.equal(sets.encode(["nobody", ""]), expected)
            assert sets.encode([]).shape == (0, *expected.shape[1:])
            assert sets.delete(["nobody"]) == 0
            sets.update(random_rows(1), set="user", batch=("orders", 1))


def test_ids_of_several_columns(url):
    model, generator = make_model(), np.random.default_rng(0)
    runs = pa.array(generator.choice([-1, 0, 256], 60))
    kinds = pa.array(generator.choice(["a", "a\0", "", "ä"], 60))
    rows = random_rows(1, 60).append_column("run", runs).append_column("kind", kinds)
    rows = rows.drop_columns(["user"])
    names = sorted({*zip(runs.to_pylist(), kinds.to_pylist(), strict=True)})
    with live.create(url, model) as sets:
        sets.update(rows[:20], set=["run", "kind"], batch=("orders", 1))
        sets.update(rows[20:], set=["run", "kind"], batch=("orders", 2))
        expected = encodings(model, rows, names, ["run", "kind"])
        torch.testing.assert_close(sets.encode(names), expected, rtol=1e-12, atol=1e-12)
        with pytest.raises(InputError, match=r"2 columns; got \('a',\). Pass tuples"):
            sets.count([names[0], "a"])


def test_an_id_of_one_column_is_no_pair(url):
    with live.create(url, make_model()) as sets:
        sets.update(random_rows(1), set="user", batch=("orders", 1))
        with pytest.raises(InputError, match=r"one column; got \('a', 'b'\). Pass single values"):
            sets.count([NAMES[0], ("a", "b")])


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([-(2**63), 2**63 - 1, 0, -1]),
        pa.array([0, 2**64 - 1, 2**63, 5], pa.uint64()),
        pa.array(["", "a\0b", "ä💥", " x "]),
        pa.array([True, False, True, True]),
        pa.array([datetime.date(1, 1, 1), datetime.date(9999, 12, 31)] * 2),
        pa.array(["a", "b", "a", "c"]).dictionary_encode(),
    ],
    ids=lambda ids: str(ids.type),
)
def test_ids_of_many_types(url, ids):
    model = make_model()
    rows = random_rows(1, 4).set_column(0, "user", ids)
    with live.create(url, model) as sets:
        for number in range(4):
            sets.update(rows[number : number + 1], set="user", batch=("orders", number))
        names = [*dict.fromkeys(ids.to_pylist())]
        assert_holds(sets, model, rows, names)
        other = pa.array([1.5] * 4) if ids.type == pa.string() else pa.array(["x"] * 4)
        if not pa.types.is_dictionary(ids.type) and ids.type != pa.string():
            with pytest.raises(InputError, match="the set ids of this store are"):
                sets.update(rows.set_column(0, "user", other), set="user", batch=("orders", 9))
        assert_holds(sets, model, rows, names)


# ---- time ---------------------------------------------------------------------------------------


def test_recent_elements_can_be_read_alone(url, clock):
    model = make_model()
    with live.create(url, model, bucket="1h") as sets:
        rows = timed_rows(1, [0, 1, 2, 30, -5], clock.time)  # one hour is in the future
        sets.update(rows, set="user", batch=("orders", 1), time="at")
        features = rows.drop_columns(["at"])
        count = len(NAMES)
        assert_holds(sets, model, features)
        for hours, last in ((1, "1h"), (2, "2h"), (3, "3h"), (3, "30h"), (4, "31h")):
            some = pa.concat_tables([features[: hours * count], features[4 * count :]])
            assert_holds(sets, model, some, last=last)
        with pytest.raises(InputError, match="multiple"):
            sets.encode(NAMES, last="90m")
        clock.time += 6 * HOUR
        assert sets.count(NAMES[:1], last="1h") == [0]
        assert sets.count(NAMES[:1], last="2h") == [1]


def test_old_buckets_expire_and_late_rows_are_dropped(url, clock):
    model = make_model()
    with live.create(url, model, bucket="1h", window="3h") as sets:
        rows = timed_rows(1, [0, 1, 2, 3, 9], clock.time)
        sets.update(rows, set="user", batch=("orders", 1), time="at")
        features, count = rows.drop_columns(["at"]), len(NAMES)
        assert_holds(sets, model, features)
        assert sets.expire() == 2 * count
        assert_holds(sets, model, features[: 3 * count])
        assert sets.expire() == 0
        late = timed_rows(2, [2, 3, 9], clock.time)
        found = sets.update(late, set="user", batch=("orders", 2), time="at")
        assert found == live.Applied("applied", count, count, 2 * count)
        kept = pa.concat_tables([features[: 3 * count], late.drop_columns(["at"])[:count]])
        assert_holds(sets, model, kept)
        assert sets.update(rows, set="user", batch=("orders", 1), time="at").status == "duplicate"
        clock.time -= 5 * HOUR  # a clock that is wrong does not bring anything back
        assert sets.expire() == 0
        found = sets.update(late, set="user", batch=("orders", 3), time="at")
        assert found.late == 2 * count
        clock.time += 50 * HOUR
        assert sets.expire() == 3 * count
        assert_holds(sets, model, features[:0])


def test_time_and_buckets_belong_together(url, clock):
    with live.create(url, make_model(), bucket="1h") as sets:
        with pytest.raises(InputError, match="has no window"):
            sets.expire()
        with pytest.raises(InputError, match="pass the column with the time"):
            sets.update(random_rows(1), set="user", batch=("orders", 1))
        rows = timed_rows(1, [0], clock.time)
        bad = rows.set_column(4, "at", pa.array([clock.time] * 7 + [None]))
        with pytest.raises(InputError, match="row 7"):
            sets.update(bad, set="user", batch=("orders", 1), time="at")
        assert sets.count(NAMES) == [0] * len(NAMES)
        assert sets.update(rows, set="user", batch=("orders", 1), time="at").rows == 8


# ---- deletion -----------------------------------------------------------------------------------


def test_a_deleted_set_is_gone_and_can_begin_again(url):
    model, first, second = make_model(), random_rows(1), random_rows(2)
    with live.create(url, model) as sets:
        sets.update(first, set="user", batch=("orders", 1))
        gone = NAMES[:3]
        count = sum(sets.count(gone))
        assert sets.delete([*gone, "nobody"]) == count > 0
        kept = first.filter(pa.array([name not in gone for name in first["user"].to_pylist()]))
        assert_holds(sets, model, kept)
        assert sets.update(first, set="user", batch=("orders", 1)).status == "duplicate"
        assert_holds(sets, model, kept)
        assert sets.update(second, set="user", batch=("orders", 2)).deleted == 0
        assert_holds(sets, model, pa.concat_tables([kept, second]))
        assert sets.delete(gone) > 0
        assert sets.count(gone) == [0] * 3


def test_rows_before_the_deletion_stay_deleted(url, clock):
    model = make_model()
    with live.create(url, model, bucket="1h") as sets:
        rows = timed_rows(1, [0, 1, 2], clock.time)
        sets.update(rows, set="user", batch=("orders", 1), time="at")
        sets.delete(NAMES[:2])
        again = timed_rows(2, [0, 1, 2], clock.time)
        found = sets.update(again, set="user", batch=("orders", 2), time="at")
        assert found == live.Applied("applied", 20, 8, 0, 4)
        before = [name in NAMES[:2] for name in rows["user"].to_pylist()]
        at = np.array(again["at"].to_pylist()) < clock.time
        kept = pa.concat_tables(
            [
                rows.filter(pa.array(~np.array(before))),
                again.filter(pa.array(~(np.array(before) & at))),
            ]
        )
        assert_holds(sets, model, kept.drop_columns(["at"]))


def test_batches_from_before_the_deletion_bring_nothing_back(url):
    rows = random_rows(1)
    with live.create(url, make_model()) as sets:
        sets.update(rows, set="user", batch=("orders", 1))
        sets.delete(NAMES[:2])
        sets.update(rows, set="user", batch=("orders", 2))
        layout = Layout(make_columns("user", None, False, None), None, None)
        batch = layout.with_buckets(rows.combine_chunks().to_batches()[0], 0)
        with sets.database.reading() as view:
            known = view.find_batches([("orders", "1"), ("orders", "2"), ("orders", "3")])
            of_deleted = sum(name in NAMES[:2] for name in rows["user"].to_pylist())
            dropped = [
                admit(batch, layout, view, None, known["orders", key].sequence).deleted
                for key in ("1", "2")
            ]
        assert (dropped, len(known)) == ([of_deleted, 0], 2)
