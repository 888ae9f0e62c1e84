"""Models of a store, stores that are opened again, and stores that are damaged, in each database."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

import setfold
from setfold import live
from setfold.errors import StateMismatchError, StoreError
from setfold.live.models import new_row
from setfold.live.sets import LiveSets
from tests.live.rows import DIM, NAMES, assert_holds, make_model, random_rows, timed_rows


def add_model(sets, encoder):
    """Put a model beside the others, as an upgrade does."""
    with sets.database.writing(alone=True) as transaction:
        number = len(transaction.models()) + 1
        row = new_row(number, encoder, active=False, since=transaction.next_sequence())
        transaction.add_model(row)
        transaction.begin_epoch()
    return number


def tables_of(sets):
    """The tables of a store with their columns."""
    with sets.database.reading() as view:
        if sets.database.kind == "SQLite":
            return sorted(
                (table, *column[1:4])
                for (table,) in view.run("SELECT name FROM sqlite_master WHERE type = 'table'")
                for column in view.run(f"SELECT * FROM pragma_table_info('{table}')")
            )
        return view.run(
            "SELECT table_name, column_name, data_type, is_nullable FROM information_schema.columns "
            "WHERE table_schema = current_schema() ORDER BY table_name, column_name"
        )


def test_a_store_of_an_older_version_is_migrated(url):
    """When it is opened, by several at once, and nothing is lost."""
    model, rows = make_model(), random_rows(1)
    with live.create(url, model) as sets:
        wanted = tables_of(sets)
        sets.update(rows, set="user", batch=("orders", 1))
        sets.add_model(make_model(1))
        sets.fill(random_rows(2), set="user", batch=("orders", 0))
        with sets.database.writing(alone=True) as transaction:
            transaction.run("ALTER TABLE fills DROP COLUMN digest")
            transaction.set("version", "1")
    with ThreadPoolExecutor(4) as threads:
        stores = list(threads.map(live.open, [url] * 4))
    for sets in stores:
        assert tables_of(sets) == wanted
        assert_holds(sets, model, rows)
        assert sets.fill(random_rows(2), set="user", batch=("orders", 0)).status == "duplicate"
        assert sets.update(rows, set="user", batch=("orders", 1)).status == "duplicate"
        sets.close()


def test_every_model_is_updated(url):
    first, second = make_model(1), setfold.Pool(DIM, "max").double()
    rows = [random_rows(seed) for seed in range(3)]
    live.create(url, first).close()
    with live.open(url) as sets, live.open(url) as other:
        sets.update(rows[0], set="user", batch=("orders", 0))
        number = add_model(sets, second)
        for writer, batch in ((sets, 1), (other, 2)):
            writer.update(rows[batch], set="user", batch=("orders", batch))
        assert_holds(other, first, pa.concat_tables(rows))
        with sets.database.writing(alone=True) as transaction:
            transaction.activate(number)
            transaction.begin_epoch()
        for reader in (sets, other):
            assert_holds(reader, second, pa.concat_tables(rows[1:]))
        deleted = sum(name in NAMES[:1] for name in pa.concat_tables(rows[1:])["user"].to_pylist())
        assert other.delete(NAMES[:1]) == deleted
        with sets.database.writing(alone=True) as transaction:
            transaction.activate(1)
            transaction.begin_epoch()
        assert other.count(NAMES[:1]) == [0]


@pytest.mark.parametrize("change", ["deletion", "expiry", "model"])
def test_a_change_while_an_update_is_prepared(url, clock, monkeypatch, change):
    model, second = make_model(), setfold.Pool(DIM, "mean").double()
    rows, features = timed_rows(1, [0, 2], clock.time), None
    with live.create(url, model, bucket="1h", window="2h") as sets, live.open(url) as other:
        features, count = rows.drop_columns(["at"]), len(NAMES)
        sets.update(rows[:count], set="user", batch=("orders", 0), time="at")
        original = LiveSets._write

        def change_first(self, *arguments):
            monkeypatch.setattr(LiveSets, "_write", original)
            if change == "deletion":
                other.delete(NAMES[:1])
            elif change == "expiry":
                other.expire()
            else:
                add_model(other, second)
            return original(self, *arguments)

        monkeypatch.setattr(LiveSets, "_write", change_first)
        found = sets.update(rows, set="user", batch=("orders", 1), time="at")
        if change == "model":
            assert_holds(sets, model, pa.concat_tables([features[:count], features]))
            with sets.database.reading() as view:
                assert view.totals(2)[:3] == (count, 2 * count, 2 * count)
        elif change == "expiry":
            assert (found.rows, found.late) == (count, count)
            assert_holds(sets, model, pa.concat_tables([features[:count]] * 2))
        else:
            assert (found.rows, found.deleted) == (2 * count - 1, 1)
            later = [features[:count], features[count + 1 :]]  # without the old row of the set
            assert_holds(sets, model, pa.concat_tables([features[1:count], *later]))


def test_a_store_can_be_opened_again(url):
    model, rows = make_model(), random_rows(1)
    with live.create(url, model) as sets:
        sets.update(rows, set="user", batch=("orders", 1))
    for given in (None, model, make_model()):
        with live.open(url, model=given) as sets:
            assert_holds(sets, model, rows)
    with live.open(url) as sets:
        sets.close()
        assert_holds(sets, model, rows)
    with pytest.raises(StoreError, match="exists already"):
        live.create(url, model)
    for other in (make_model(1), setfold.Pool(DIM, "mean").double(), make_model().float()):
        with pytest.raises(StateMismatchError, match="another model"):
            live.open(url, model=other)


def test_a_store_that_does_not_exist(url):
    with pytest.raises(StoreError, match="there is no store"):
        live.open(url)
    live.create(url, make_model()).close()
    live.open(url).close()


@pytest.mark.parametrize("column", ["state", "count", "checksum", "name"])
def test_a_damaged_state_is_noticed(url, column):
    model, rows = make_model(), random_rows(1)
    with live.create(url, model) as sets:
        sets.update(rows, set="user", batch=("orders", 1))
        with sets.database.writing() as transaction:
            (first, second, *_) = transaction.of_sets(
                1, sorted(sets._pack(transaction, NAMES)), None
            )
            other = {"state": first.state[:-1] + b"!", "count": first.count + 1}
            other |= {"checksum": second.checksum, "name": first.name[:-1] + b"\x02"}
            transaction.run(
                f"UPDATE states SET {column} = ? WHERE name = ?", (other[column], first.name)
            )
            if column == "name":  # the state of one set under the name of another
                transaction.run("UPDATE states SET name = ? WHERE name = ?", (b"x", second.name))
                transaction.run(
                    "UPDATE states SET name = ? WHERE name = ?", (second.name, other["name"])
                )
        with pytest.raises(StoreError, match="damaged"):
            sets.encode(NAMES)
        with pytest.raises(StoreError, match="damaged"):
            sets.count(NAMES)
        with pytest.raises(StoreError, match="damaged"):
            sets.update(rows, set="user", batch=("orders", 2))


def test_a_store_of_another_version(url):
    with live.create(url, make_model()) as sets:
        for value, expected in (("99", "Use a newer setfold"), (None, "schema version None")):
            with sets.database.writing() as transaction:
                if value is None:
                    transaction.run("DELETE FROM settings WHERE name = 'version'")
                else:
                    transaction.set("version", value)
            with pytest.raises(StoreError, match=expected):
                live.open(url)
        with sets.database.writing() as transaction:
            transaction.run("DELETE FROM settings WHERE name = 'epoch'")
        with pytest.raises(StoreError, match="damaged"):
            sets.update(random_rows(1), set="user", batch=("orders", 1))
