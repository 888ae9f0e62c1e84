"""Threads and processes that write the same sets: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import threading
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pyarrow as pa
import pytest

from setfold import live
from setfold.live import retry
from setfold.live.names import pack_names
from setfold.live.sets import LiveSets
from tests.live.rows import NAMES, assert_holds, make_model, random_rows
from tests.live.server import wait_until
from tests.paused import PROCESSES

HOT = [NAMES[:3], NAMES[1:4], NAMES[2:5]]  # the sets of each writer


@pytest.fixture(autouse=True)
def no_second_try(monkeypatch):
    """Let a deadlock be an error, instead of being repeated."""
    monkeypatch.setattr(retry, "PAUSES", ())


def rows_of(writer, number):
    """The rows of a batch of a writer; some sets are new in every batch, for all writers."""
    return random_rows((writer, number), 12, [*HOT[writer], f"new {number}", f"new {number + 1}"])


def everything(count):
    names = [*NAMES[:5], *(f"new {number}" for number in range(count + 1))]
    rows = [rows_of(writer, number) for writer in range(3) for number in range(count)]
    return pa.concat_tables(rows), names


def write(sets, writer, count):
    for number in range(count):
        found = sets.update(rows_of(writer, number), set="user", batch=(f"w{writer}", number))
        assert (found.status, found.rows) == ("applied", 12)


@pytest.mark.parametrize("is_shared", [False, True], ids=["stores", "store"])
def test_threads_on_hot_sets(url, is_shared):
    model, count = make_model(), 12
    with live.create(url, model) as sets, ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        stores = [sets if is_shared else stack.enter_context(live.open(url)) for _ in range(3)]
        for done in [pool.submit(write, stores[n], n, count) for n in range(3)]:
            done.result()
        rows, names = everything(count)
        assert_holds(sets, model, rows, names)


def test_processes_on_hot_sets(url):
    model, count = make_model(), 12
    with live.create(url, model) as sets:
        write(sets, 0, 1)  # the processes inherit a connection, which they must not use

        def work(writer):
            for number in range(1 if writer == 0 else 0, count):
                sets.update(rows_of(writer, number), set="user", batch=(f"w{writer}", number))

        processes = [PROCESSES.Process(target=work, args=(writer,)) for writer in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0, 0, 0]
        rows, names = everything(count)
        assert_holds(sets, model, rows, names)


def test_the_same_batch_twice_at_once(url, monkeypatch):
    """Both have looked whether the batch is new before one of them writes it."""
    model, rows = make_model(), random_rows(1)
    with live.create(url, model) as sets, live.open(url) as other:
        original = LiveSets._write

        def write_second(self, *arguments):
            monkeypatch.setattr(LiveSets, "_write", original)
            assert other.update(rows, set="user", batch=("orders", 1)).status == "applied"
            return original(self, *arguments)

        monkeypatch.setattr(LiveSets, "_write", write_second)
        assert sets.update(rows, set="user", batch=("orders", 1)).status == "duplicate"
        assert_holds(sets, model, rows)


@pytest.mark.parametrize("batch", [("orders", 1), ("orders", 2)], ids=["same", "other"])
def test_a_writer_waits_for_the_sets_of_another(server, monkeypatch, batch):
    """One has noted its batch and locked new sets; the other comes to the same ones meanwhile."""
    from setfold.live.postgres import PostgresTransaction

    model, rows, url = make_model(), random_rows(1), server.url()
    arrived, go = threading.Event(), threading.Event()
    original = PostgresTransaction.put

    def wait(self, *arguments):
        monkeypatch.setattr(PostgresTransaction, "put", original)
        arrived.set()
        assert go.wait(60)
        original(self, *arguments)

    monkeypatch.setattr(PostgresTransaction, "put", wait)
    with live.create(url, model) as sets, live.open(url) as other, ThreadPoolExecutor(2) as pool:
        first = pool.submit(sets.update, rows, set="user", batch=("orders", 1))
        assert arrived.wait(60)
        assert other.count(NAMES) == [0] * len(NAMES)  # placeholders are not states
        second = pool.submit(other.update, rows, set="user", batch=batch)
        wait_until(lambda: waiting(sets))
        assert not second.done()
        go.set()
        assert first.result().status == "applied"
        assert second.result().status == ("duplicate" if batch[1] == 1 else "applied")
        assert_holds(sets, model, pa.concat_tables([rows] * batch[1]))


def test_a_set_that_is_removed_meanwhile_is_locked_again(server, monkeypatch):
    """One waits for a set, which is removed then; another adds to it before the first one writes."""
    from setfold.live.postgres import PostgresTransaction

    model, rows, url = make_model(), random_rows(1, 1), server.url()
    key = (pack_names(rows["user"].to_pylist(), [pa.large_string()])[0], 0)
    arrived, go = threading.Event(), threading.Event()
    original = PostgresTransaction.put
    monkeypatch.setattr(retry, "PAUSES", (0.01,))

    def wait(self, *arguments):
        monkeypatch.setattr(PostgresTransaction, "put", original)
        arrived.set()
        assert go.wait(60)
        original(self, *arguments)

    with (
        live.create(url, model) as sets,
        live.open(url) as second,
        live.open(url) as third,
        ThreadPoolExecutor(2) as pool,
    ):
        sets.update(rows, set="user", batch=("orders", 0))
        with sets.database.writing() as transaction:
            assert len(transaction.fetch(1, [key])) == 1
            monkeypatch.setattr(PostgresTransaction, "put", wait)
            first = pool.submit(second.update, rows, set="user", batch=("orders", 1))
            wait_until(lambda: waiting(sets))
            transaction.drop(1, [key])
        assert arrived.wait(60)
        other = pool.submit(third.update, rows, set="user", batch=("orders", 2))
        wait_until(lambda: waiting(sets) or other.done())
        go.set()
        assert [first.result().status, other.result().status] == ["applied"] * 2
        assert_holds(sets, model, pa.concat_tables([rows] * 2), rows["user"].to_pylist())


@pytest.mark.parametrize("are_new", [True, False], ids=["new", "known"])
def test_sets_are_locked_in_sorted_order(server, are_new):
    """One that waits for a set has locked those before it, and none after it."""
    model, url = make_model(), server.url()
    names = [f"user {number}" for number in range(10)]
    rows = random_rows(1, 10).set_column(0, "user", pa.array(names))
    with live.create(url, model) as sets, ExitStack() as stack, ThreadPoolExecutor(11) as pool:
        other, *others = [stack.enter_context(live.open(url)) for _ in range(11)]
        sets.update(rows[:0] if are_new else rows, set="user", batch=("orders", 0))
        keys = [(key, 0) for key in pack_names(names, [pa.large_string()])]
        with sets.database.writing() as transaction:
            transaction.fetch(1, keys[5:6])
            shuffled = rows.take([3, 9, 5, 1, 8, 0, 2, 6, 4, 7])
            done = pool.submit(other.update, shuffled, set="user", batch=("orders", 1))
            wait_until(lambda: waiting(sets))
            locked = list(map(pool.submit, [lock] * 10, others, keys))
            wait_until(lambda: sum(one.done() for one in locked) + waiting(sets) == 11)
            assert [one.done() for one in locked] == [False] * 6 + [True] * 4
        assert done.result().rows == 10
        assert_holds(sets, model, rows if are_new else pa.concat_tables([rows] * 2), names)


def lock(sets, key):
    """Lock a set for a moment, after those that have locked it."""
    with sets.database.writing() as transaction:
        transaction.fetch(1, [key])


def waiting(sets):
    """How many connections wait for a lock, of those that use the tables of this store."""
    with sets.database.reading() as view:
        ((found,),) = view.run(
            "SELECT COUNT(*) FROM pg_locks WHERE NOT granted AND pid IN (SELECT pid FROM pg_locks "
            "JOIN pg_class AS c ON c.oid = relation WHERE c.relnamespace = "
            "current_schema()::regnamespace)"
        )
    return found


def test_a_set_that_is_only_looked_at_does_not_exist(url):
    model, key = make_model(), (b"nobody\0\1", 0)
    with live.create(url, model) as sets:
        for fails in (False, True):
            try:
                with sets.database.writing() as transaction:
                    assert transaction.fetch(1, [key]) == []
                    assert transaction.fetch(1, [key]) == []
                    assert not fails or 1 / 0
            except ZeroDivisionError:
                pass
            with sets.database.reading() as view:
                assert view.totals(1) == (0, 0, 0, 0)
                assert view.fetch(1, [key]) == []


def test_one_that_writes_alone_waits_for_the_others(url):
    model, rows = make_model(), random_rows(1)
    with live.create(url, model) as sets, live.open(url) as other, ThreadPoolExecutor(1) as pool:
        sets.update(rows, set="user", batch=("orders", 1))
        with sets.database.writing() as transaction:
            deletion = pool.submit(other.delete, NAMES)
            (row,) = transaction.of_sets(1, sorted(sets._pack(transaction, NAMES))[:1], None)
            assert row.count > 0
            assert not futures.wait([deletion], timeout=0.3).done
        assert deletion.result() == 30
