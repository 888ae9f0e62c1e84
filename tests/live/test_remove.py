"""Elements that were added can be removed again, exactly once, where the statistics allow it."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from setfold import live
from setfold.errors import BatchConflictError, InputError, NotRemovableError
from tests.live.events import NAMES, assert_holds, events, pool, slots


@pytest.fixture
def sets(store_url):
    with live.create(store_url, slots()) as found:
        found.update(events(1), set="user", batch=("orders", 1))
        yield found


def test_removed_elements_do_not_count_any_more(sets):
    rows = events(1)
    found = sets.remove(rows[5:9], set="user", batch=("cancelled", 1))
    assert (found.status, found.rows) == ("applied", 4)
    assert_holds(sets, slots(), rows[:5], rows[9:])
    assert sets.remove(rows[5:9], set="user", batch=("cancelled", 1)).status == "duplicate"
    assert_holds(sets, slots(), rows[:5], rows[9:])
    with pytest.raises(BatchConflictError):
        sets.remove(rows[4:9], set="user", batch=("cancelled", 1))
    with pytest.raises(BatchConflictError):  # the same rows, in the other direction
        sets.update(rows[5:9], set="user", batch=("cancelled", 1))


def test_a_set_without_elements_is_exactly_empty_and_gone(sets):
    rows = events(1)
    sets.remove(rows, set="user", batch=("cancelled", 1))
    assert sets.info().models[0].states == 0
    assert_holds(sets, slots())
    sets.update(rows, set="user", batch=("orders", 2))
    assert_holds(sets, slots(), rows)


def test_more_than_a_set_has_is_refused(sets):
    rows = events(1)
    for wrong in (pd.concat([rows, rows[:1]]), rows.assign(user="nobody")):
        with pytest.raises(InputError, match="cannot remove more elements than a set has"):
            sets.remove(wrong, set="user", batch=("cancelled", 1))
    with pytest.raises(InputError, match="NaN or infinite"):
        sets.remove(rows.assign(x=float("nan")), set="user", batch=("cancelled", 1))
    assert_holds(sets, slots(), rows)
    assert sets.info().batches == 1


@pytest.mark.parametrize("model", [pool("max"), pool("mean", "min")])
def test_extremes_cannot_be_removed(store_url, model):
    with live.create(store_url, model) as sets:
        sets.update(events(1), set="user", batch=("orders", 1))
        with pytest.raises(NotRemovableError):
            sets.remove(events(1), set="user", batch=("cancelled", 1))
        assert_holds(sets, model, events(1))


def test_buckets_are_those_of_the_times(store_url, clock):
    hours = pd.Series(range(20)) % 3
    rows = events(1, at=clock.time - 3600 * hours)
    with live.create(store_url, slots(), bucket="1h") as sets:
        sets.update(rows, set="user", batch=("orders", 1), time="at")
        sets.remove(rows[:6], set="user", batch=("cancelled", 1), time="at")
        assert_holds(sets, slots(), rows[6:])
        assert_holds(sets, slots(), rows[6:][hours[6:] < 2], last="2h")
        moved = rows[6:].assign(at=clock.time - 3600 * 9)
        with pytest.raises(InputError, match="in this bucket"):
            sets.remove(moved, set="user", batch=("cancelled", 2), time="at")


def test_all_models_lose_elements_and_history_follows(sets):
    rows, model = events(1), pool()
    sets.remove(rows[:4], set="user", batch=("cancelled", 1))
    number = sets.add_model(model)
    with pytest.raises(InputError, match="may not be filled yet"):
        sets.remove(rows[4:8], set="user", batch=("cancelled", 2))
    with pytest.raises(InputError, match="cannot remove more"):  # before the rows themselves
        sets.fill(rows[:4], set="user", batch=("cancelled", 1))
    sets.fill(rows, set="user", batch=("orders", 1))
    sets.fill(rows[:4], set="user", batch=("cancelled", 1))
    sets.remove(rows[4:8], set="user", batch=("cancelled", 2))
    assert sets.fill(rows[4:8], set="user", batch=("cancelled", 2)).status == "duplicate"
    assert_holds(sets, slots(), rows[8:])
    sets.switch(number)
    assert_holds(sets, model, rows[8:])


def test_a_model_that_is_filled_late_has_the_same_elements_in_the_end(sets):
    # Model 2 has seen one element of the set when another one is removed that it has not seen.
    rows, model = events(1, 2, names=NAMES[:1]), pool("sum")
    sets.update(rows[:1], set="user", batch=("orders", 2))
    number = sets.add_model(model)
    sets.update(rows[1:], set="user", batch=("orders", 3))
    sets.remove(rows[:1], set="user", batch=("cancelled", 1))
    sets.fill(rows[:1], set="user", batch=("orders", 2))
    sets.fill(events(1), set="user", batch=("orders", 1))
    sets.switch(number)
    assert_holds(sets, model, events(1), rows[1:])


@settings(max_examples=15)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=12))
def test_any_order_of_adding_and_removing(tmp_path_factory, steps):
    url, model = str(tmp_path_factory.mktemp("live") / "live.db"), slots()
    have = dict.fromkeys(range(6), 0)
    with live.create(url, model) as sets:
        for number, (add, batch) in enumerate(steps):
            rows = events(batch, 3)
            if add:
                sets.update(rows, set="user", batch=("steps", number))
                have[batch] += 1
            elif have[batch]:
                sets.remove(rows, set="user", batch=("steps", number))
                have[batch] -= 1
        assert_holds(
            sets, model, *(events(b, 3) for b, times in have.items() for _ in range(times))
        )
        names = {name for b, times in have.items() if times for name in events(b, 3)["user"]}
        assert sets.info().models[0].sets == len(names)
