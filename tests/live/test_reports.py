"""What a store says about itself, and that no damage goes unnoticed."""

from __future__ import annotations

import datetime

import pytest

from setfold import live
from setfold.errors import StoreError
from tests.live.events import NAMES, events, pool, slots


@pytest.fixture
def sets(store_url):
    with live.create(store_url, slots()) as found:
        found.update(events(1, 40), set="user", batch=("days", 1))
        found.add_model(pool())
        found.update(events(2, 40), set="user", batch=("days", 2))
        yield found


def change(sets, statement, *values):
    with sets.database.writing() as transaction:
        transaction.run(statement, values)


def test_info(store_url, clock):
    with live.create(store_url, slots(), bucket="1h", window="48h") as sets:
        empty = sets.info()
        assert (empty.ids, empty.updated, empty.batches, empty.positions) == (None, None, 0, {})
        assert (empty.bucket, empty.window) == ("1h", "2d")
        rows = events(1, 6, names=["ann", "bob"]).assign(at=clock.time)
        rows["user"], rows.loc[5, "at"] = ["ann", "bob", "ann", "ann", "bob", "bob"], 0
        sets.update(rows, set="user", batch=("days", 1), time="at")
        clock.time += 60
        offsets = live.Offsets("clicks", {0: (0, 6), 3: (10, 12)})
        sets.update(rows, set="user", batch=offsets, time="at")
        sets.delete(["bob"])
        found = sets.info()
        assert found.ids == {"user": "large_string"}
        assert found.positions == {"clicks": {"0": 6, "3": 12}}
        assert (found.batches, found.deletions) == (1, 1)
        assert found.updated == datetime.datetime.fromtimestamp(clock.time, datetime.UTC)
        (model,) = found.models
        assert (model.sets, model.states, model.elements) == (1, 1, 6)


def test_an_intact_store(sets):
    assert sets.verify() == (2 * len(NAMES), ())


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("UPDATE states SET count = count + 1 WHERE model = 1", "user 0, bucket 0, model 1"),
        ("UPDATE states SET bucket = 1 WHERE model = 2", "user 0, bucket 1, model 2"),
        ("UPDATE states SET model = 7 WHERE model = 2", "model 7, which does not exist"),
        ("UPDATE models SET content = SUBSTR(content, 1, 99) WHERE number = 1", "model 1 cannot"),
        ("UPDATE models SET active = 0", "not exactly one model is active"),
    ],
)
def test_damage_is_found(sets, damage, problem):
    change(sets, damage)
    assert problem in "\n".join(sets.verify().problems)


def test_one_changed_bit_of_a_state_is_found_and_never_read(sets):
    with sets.database.reading() as view:
        ((content,),) = view.run("SELECT state FROM states WHERE model = 1 LIMIT 1")
    for place in (0, len(content) // 2, len(content) - 1):
        wrong = content[:place] + bytes([content[place] ^ 8]) + content[place + 1 :]
        change(sets, "UPDATE states SET state = ? WHERE model = 1 AND state = ?", wrong, content)
        (problem,) = sets.verify().problems
        assert "is damaged" in problem
        with pytest.raises(StoreError, match="checksum differs"):
            sets.encode(NAMES)
        with pytest.raises(StoreError, match="checksum differs"):
            sets.read().read_all()
        change(sets, "UPDATE states SET state = ? WHERE model = 1 AND state = ?", content, wrong)
    assert sets.verify().problems == ()


def test_many_damaged_states_are_counted(sets, monkeypatch):
    monkeypatch.setattr("setfold.live.reports.MAX_SHOWN", 2)
    change(sets, "UPDATE states SET count = count + 1 WHERE model = 1")
    assert sets.verify().problems[-1] == "and 5 more states of model 1"


def test_a_damaged_file(sets, store_url, tmp_path):
    if "://" in store_url:
        pytest.skip("a server checks its own pages")
    sets.close()
    content = bytearray((tmp_path / "live.db").read_bytes())
    for start in range(4096, len(content), 4096):  # all but the first page
        content[start + 8 : start + 12] = b"\xff" * 4
    (tmp_path / "live.db").write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        live.open(store_url).verify()
