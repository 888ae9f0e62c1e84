"""A new model beside the active one: history counts once, the switch is atomic, back is possible."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pyarrow as pa
import pytest
import torch
from torch import nn

import setfold
from setfold import live
from setfold.errors import BatchConflictError, DescriptionError, InputError
from tests.live.events import NAMES, assert_holds, events, pool, slots


@pytest.fixture
def sets(store_url):
    """A store with two batches."""
    with live.create(store_url, pool()) as found:
        for number in (1, 2):
            found.update(events(number), set="user", batch=("days", number))
        yield found


def test_history_then_switch_and_back(sets):
    new, old = slots(), pool()
    number = sets.add_model(new)
    assert [(m.number, m.active) for m in sets.models()] == [(1, True), (number, False)]
    sets.update(events(3), set="user", batch=("days", 3))
    for day in (2, 1, 3):  # in any order; day 3 is there already
        status = "duplicate" if day == 3 else "applied"
        assert sets.fill(events(day), set="user", batch=("days", day)).status == status
        assert sets.fill(events(day), set="user", batch=("days", day)).status == "duplicate"
    assert_holds(sets, old, events(1), events(2), events(3))
    sets.switch(number)
    assert_holds(sets, new, events(1), events(2), events(3))
    sets.update(events(4), set="user", batch=("days", 4))
    sets.switch(1)
    assert_holds(sets, old, events(1), events(2), events(3), events(4))
    sets.drop_model(number)
    assert [m.number for m in sets.models()] == [1]
    assert sets.info().models[0].elements == 80


def test_a_fill_with_other_rows_is_refused(sets):
    sets.add_model(slots())
    with pytest.raises(BatchConflictError, match="1 of days was applied before"):
        sets.fill(events(9), set="user", batch=("days", 1))
    assert sets.fill(events(1), set="user", batch=("days", 1)).status == "applied"


def test_history_that_comes_again_with_other_rows_is_refused(sets):
    """Also as an update or a removal: the new model has the rows that were filled in."""
    sets.add_model(slots())
    batch = {"set": "user", "batch": ("days", 0)}
    assert sets.fill(events(0), **batch).status == "applied"
    for call in (sets.fill, sets.update, sets.remove):
        with pytest.raises(BatchConflictError, match="0 of days was applied before"):
            call(events(9), **batch)
    with pytest.raises(BatchConflictError):
        sets.remove(events(0), **batch)
    assert sets.update(events(0), **batch).status == "applied"
    assert_holds(sets, pool(), events(1), events(2), events(0))
    sets.switch(2)
    assert_holds(sets, slots(), events(0))


def test_large_updates_are_compared_with_history(sets, monkeypatch):
    sets.add_model(slots())
    batch = {"set": "user", "batch": ("days", 0)}
    sets.fill(events(0), **batch)
    monkeypatch.setattr("setfold.live.sets.SMALL_ROWS", 7)
    with pytest.raises(BatchConflictError):
        sets.update(events(9), **batch)
    assert sets.update(events(0), **batch).status == "applied"
    sets.switch(2)
    assert_holds(sets, slots(), events(0))


def test_messages_name_the_columns_of_the_user_only(sets):
    with pytest.raises(InputError, match="no column 'usr'") as caught:
        sets.update(events(3), set="usr", batch=("days", 3))
    assert "setfold.bucket" not in str(caught.value)
    rows = events(3).assign(**{"setfold.bucket": 1})
    with pytest.raises(InputError, match=r"uses the name 'setfold\.bucket' itself"):
        sets.update(rows, set="user", batch=("days", 3), features=["x", "setfold.bucket"])


def test_history_that_the_store_never_saw_counts_for_the_new_model_once(sets):
    new = slots()
    number = sets.add_model(new)
    assert sets.fill(events(0), set="user", batch=("days", 0)).status == "applied"
    assert sets.fill(events(0), set="user", batch=("days", 0)).status == "duplicate"
    assert_holds(sets, pool(), events(1), events(2))
    # Should the batch come after all, the new model has it already.
    assert sets.update(events(0), set="user", batch=("days", 0)).status == "applied"
    assert sets.update(events(0), set="user", batch=("days", 0)).status == "duplicate"
    assert_holds(sets, pool(), events(0), events(1), events(2))
    sets.switch(number)
    assert_holds(sets, new, events(0))


def test_a_large_batch_that_was_history_counts_once(sets, monkeypatch):
    monkeypatch.setattr("setfold.live.sets.SMALL_ROWS", 7)
    monkeypatch.setattr("setfold.live.upgrade.SMALL_ROWS", 7)
    number = sets.add_model(slots())
    assert sets.fill(events(0), set="user", batch=("days", 0)).rows == 20
    assert sets.update(events(0), set="user", batch=("days", 0)).rows == 20
    sets.switch(number)
    assert_holds(sets, slots(), events(0))


def test_batches_of_several_threads_with_history_among_them(sets):
    number = sets.add_model(slots())
    sets.fill(events(10), set="user", batch=("days", 10))
    with ThreadPoolExecutor(8) as threads:
        days = range(6, 14)
        list(threads.map(lambda d: sets.update(events(d), set="user", batch=("days", d)), days))
    sets.switch(number)
    assert_holds(sets, slots(), *map(events, range(6, 14)))


def test_a_new_model_may_read_more_columns(store_url):
    def rows(seed):
        return events(seed).assign(city="rome")

    narrow = setfold.Composition(features=nn.Identity(), encoder=pool())
    torch.manual_seed(0)
    columns = setfold.Columns(
        [
            setfold.NumberColumn("x", 0.0, 1.0),
            setfold.CategoryColumn("city", ["rome", "oslo"], dim=2),
        ]
    )
    wide = setfold.Composition(features=columns, encoder=setfold.Pool(columns.dim_out, "mean"))
    with live.create(store_url, narrow) as sets:
        sets.update(rows(1), set="user", batch=("days", 1), features="x,y")
        number = sets.add_model(wide.eval())
        # The models need different columns, and a batch is recognized by those in common.
        again = sets.update(rows(1), set="user", batch=("days", 1), features="x,y")
        assert again.status == "duplicate"
        assert sets.fill(rows(1), set="user", batch=("days", 1)).rows == 20
        assert sets.update(rows(2), set="user", batch=("days", 2), features="x,y").rows == 20
        sets.switch(number)
        sets.drop_model(1)
        assert sets.count(NAMES) == [
            sum(rows(s)["user"].eq(n).sum() for s in (1, 2)) for n in NAMES
        ]
        assert sets.update(rows(1), set="user", batch=("days", 1)).status == "duplicate"
        with pytest.raises(BatchConflictError):
            sets.update(rows(1).assign(x=0.0), set="user", batch=("days", 1))
        with pytest.raises(InputError, match="reads its own columns"):
            sets.update(rows(3), set="user", batch=("days", 3), features="x,y")


def test_a_head_alone_needs_no_history(store_url):
    def model(bias):
        head = nn.Linear(5, 1).double()
        nn.init.constant_(head.bias, bias)
        return setfold.Composition(encoder=slots(), head=head).eval()

    first, second = model(1.0), model(2.0)
    with live.create(store_url, first) as sets:
        sets.update(events(1), set="user", batch=("days", 1))
        number = sets.add_model(second)
        assert sets.fill(events(1), set="user", batch=("days", 1)).status == "duplicate"
        sets.switch(number)
        sets.update(events(2), set="user", batch=("days", 2))
        both = pd.concat([events(1), events(2)])
        own = both[both["user"] == NAMES[0]][["x", "y"]].to_numpy()
        expected = second(torch.tensor(own).unsqueeze(0)).detach()
        torch.testing.assert_close(sets.encode(NAMES[:1], head=True), expected)
        with pytest.raises(InputError, match="already, as number 2"):
            sets.add_model(second)


def test_deleted_sets_do_not_come_back_with_history(sets):
    new = slots()
    sets.delete([NAMES[0]])
    number = sets.add_model(new)
    kept = [rows[rows["user"] != NAMES[0]] for rows in map(events, (0, 1, 2))]
    for day, own in enumerate(kept):
        found = sets.fill(events(day), set="user", batch=("days", day))
        assert (found.rows, found.deleted) == (len(own), 20 - len(own))
    sets.switch(number)
    assert_holds(sets, new, *kept)


def test_history_within_the_window_only(store_url, clock):
    new, hour = slots(), 3600
    with live.create(store_url, pool(), bucket="1h", window="3h") as sets:
        rows = events(1, 40, at=clock.time - hour * (pd.Series(range(40)) % 5))
        sets.update(rows, set="user", batch=("days", 1), time="at")
        sets.expire()
        number = sets.add_model(new)
        found = sets.fill(rows, set="user", batch=("days", 1), time="at")
        recent = rows[rows["at"] > clock.time - 3 * hour]
        assert (found.rows, found.late) == (len(recent), 40 - len(recent))
        sets.switch(number)
        assert_holds(sets, new, recent)
        assert_holds(sets, new, rows[rows["at"] == clock.time], last="1h")


def test_another_process_follows_the_switch(sets, store_url):
    new = slots()
    with live.open(store_url, model=pool()) as reader:
        number = sets.add_model(new)
        for day in (1, 2):
            sets.fill(events(day), set="user", batch=("days", day))
        assert_holds(reader, pool(), events(1), events(2))
        sets.switch(number)
        assert_holds(reader, new, events(1), events(2))
        sets.drop_model(1)
        sets.add_model(pool("max"))  # a number may be given again
        reader.update(events(3), set="user", batch=("days", 3))
        assert_holds(reader, new, events(1), events(2), events(3))


def test_an_update_that_was_prepared_before_is_prepared_again(sets, monkeypatch):
    new, absorb = slots(), live.sets.absorbing
    numbers = []

    def adding(models, rows=None):
        if not numbers:
            numbers.append(sets.add_model(new))
        return absorb(models, rows)

    monkeypatch.setattr("setfold.live.sets.absorbing", adding)
    sets.update(events(3), set="user", batch=("days", 3))
    sets.switch(numbers[0])
    assert_holds(sets, new, events(3))


def test_wrong_numbers_and_models(sets, store_url):
    with pytest.raises(InputError, match="no model 7; it has 1"):
        sets.switch(7)
    with pytest.raises(InputError, match="model 1 is active"):
        sets.drop_model(1)
    with pytest.raises(InputError, match="no model besides the active one"):
        sets.fill(events(1), set="user", batch=("days", 1))

    class Own(nn.Module):
        def forward(self, elements):
            return elements

    with pytest.raises(DescriptionError, match="cannot be saved"):
        sets.add_model(setfold.Composition(features=Own(), encoder=pool()))
    assert len(sets.models()) == 1


def test_rows_as_a_stream(sets):
    sets.add_model(slots())
    table = pa.Table.from_pandas(events(1))
    reader = pa.RecordBatchReader.from_batches(table.schema, table.to_batches(max_chunksize=3))
    assert sets.fill(reader, set="user", batch=("days", 1)).rows == 20
