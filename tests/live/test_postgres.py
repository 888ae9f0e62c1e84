"""PostgreSQL alone: addresses, privileges, foreign schemas, and servers that go away."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from setfold import live
from setfold.errors import InputError, StoreError
from setfold.live import postgres
from setfold.live.address import Address
from setfold.live.api import database_of
from tests.live.rows import NAMES, assert_holds, make_model, random_rows
from tests.live.server import Server
from tests.paused import PROCESSES


@pytest.fixture
def own_server():
    """A server that may be stopped."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        server = Server(Path(folder) / "server", fsync="off")
        server.create()
        server.start()
        yield server
        server.stop()


def run(server, *statements, database="postgres"):
    with psycopg.connect(
        host=str(server.folder), user="postgres", dbname=database, autocommit=True
    ) as connection:
        for statement in statements:
            connection.execute(statement)


def lose_commit(monkeypatch, *, before):
    """Let the next connection break when it commits: before the server has done it, or after."""
    original = psycopg.Connection.execute

    def execute(self, query, *arguments, **options):
        if query != "COMMIT" or self.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            return original(self, query, *arguments, **options)
        (read_only,) = original(self, "SHOW transaction_read_only").fetchone()
        if read_only == "on":
            return original(self, query, *arguments, **options)
        monkeypatch.setattr(psycopg.Connection, "execute", original)
        if not before:
            original(self, query)
        self.pgconn.finish()
        raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(psycopg.Connection, "execute", execute)


# ---- connections that are lost ------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("rows_at_once", [1 << 16, 7])
def test_an_update_whose_commit_is_lost_counts_once(server, monkeypatch, before, rows_at_once):
    model, rows = make_model(), random_rows(1)
    monkeypatch.setattr("setfold.live.sets.SMALL_ROWS", rows_at_once)
    with live.create(server.url(), model) as sets:
        sets.update(rows[:5], set="user", batch=("orders", 0))
        lose_commit(monkeypatch, before=before)
        if before and rows_at_once == 7:  # the rows of a large batch cannot be read again
            with pytest.raises(StoreError, match="may or may not have been kept"):
                sets.update(rows, set="user", batch=("orders", 1))
            assert_holds(sets, model, rows[:5])
        found = sets.update(rows, set="user", batch=("orders", 1))
        assert found == live.Applied("applied", 30, len({*rows["user"].to_pylist()}))
        assert_holds(sets, model, pa.concat_tables([rows[:5], rows]))


@pytest.mark.parametrize("before", [True, False])
def test_a_deletion_whose_commit_is_lost_says_so(server, monkeypatch, before):
    model, rows = make_model(), random_rows(1)
    with live.create(server.url(), model) as sets:
        sets.update(rows, set="user", batch=("orders", 0))
        lose_commit(monkeypatch, before=before)
        with pytest.raises(StoreError, match="may or may not have been kept"):
            sets.delete(NAMES)
        assert sum(sets.count(NAMES)) == (30 if before else 0)


def test_a_server_that_comes_back(own_server):
    model, rows = make_model(), random_rows(1)
    with live.create(own_server.url("live"), model) as sets:
        sets.update(rows, set="user", batch=("orders", 0))
        own_server.stop()
        own_server.start()
        assert_holds(sets, model, rows)
        own_server.stop()
        back = threading.Timer(0.5, own_server.start)
        back.start()
        assert sets.update(rows, set="user", batch=("orders", 1)).status == "applied"
        back.join()
        assert_holds(sets, model, pa.concat_tables([rows] * 2))


def test_a_server_that_stays_away(own_server, monkeypatch):
    monkeypatch.setattr(postgres, "AWAY", 0.2)
    model, rows = make_model(), random_rows(1)
    with live.create(own_server.url("live"), model) as sets:
        sets.update(rows, set="user", batch=("orders", 0))
        own_server.stop()
        for call in (sets.count, sets.encode, sets.delete):
            with pytest.raises(StoreError, match="cannot connect"):
                call(NAMES)
        with pytest.raises(StoreError, match="cannot connect"):
            sets.update(rows, set="user", batch=("orders", 1))
        own_server.start()
        assert sets.update(rows, set="user", batch=("orders", 1)).status == "applied"
        assert_holds(sets, model, pa.concat_tables([rows] * 2))


def test_a_connection_that_ends_while_it_reads(server, monkeypatch):
    model, rows = make_model(), random_rows(1)
    with live.create(server.url(), model) as sets:
        sets.update(rows, set="user", batch=("orders", 0))
        original = postgres.PostgresTransaction.of_sets

        def end_first(self, *arguments):
            monkeypatch.setattr(postgres.PostgresTransaction, "of_sets", original)
            run(server, f"SELECT pg_terminate_backend({self.connection.info.backend_pid})")
            return original(self, *arguments)

        monkeypatch.setattr(postgres.PostgresTransaction, "of_sets", end_first)
        assert_holds(sets, model, rows)


def test_a_process_that_is_forked_has_its_own_connection(server):
    model, rows = make_model(), random_rows(1)
    with live.create(server.url(), model) as sets:
        sets.update(rows, set="user", batch=("orders", 0))

        def work():
            sets.update(rows, set="user", batch=("orders", 1))
            sets.close()

        process = PROCESSES.Process(target=work)
        process.start()
        process.join()
        assert process.exitcode == 0
        assert_holds(sets, model, pa.concat_tables([rows] * 2))


def test_others_that_write_for_too_long(server, monkeypatch):
    monkeypatch.setattr(postgres, "WAIT", 1)
    with live.create(server.url(), make_model()) as sets:
        with (
            sets.database.writing(alone=True),
            pytest.raises(StoreError, match="others have been writing for"),
        ):
            sets.update(random_rows(1), set="user", batch=("orders", 0))
        assert sets.update(random_rows(1), set="user", batch=("orders", 0)).rows == 30


# ---- addresses ----------------------------------------------------------------------------------


def test_passwords_do_not_appear_in_messages():
    nowhere = "127.0.0.1:1/shop"
    urls = [f"postgresql://ann:secret@{nowhere}", f"postgres://{nowhere}?user=ann&password=secret"]
    for url in urls:
        with pytest.raises(StoreError, match="cannot connect to postgresql://ann@") as caught:
            live.open(url)
        for error in (caught.value, caught.value.__cause__):
            assert "secret" not in f"{error} {error!r}"


@pytest.mark.parametrize(
    "password", ["se/cret", "12/34", "se@cret", "secret%", "se:c@ret", "/?secret"]
)
def test_passwords_that_are_not_escaped_do_not_appear_either(password):
    with pytest.raises(InputError, match="write %40 for @") as caught:
        live.open(f"postgresql://ann:{password}@db.example/shop")
    assert caught.value.__cause__ is None
    assert not any(part in str(caught.value) for part in (password, "secret", "cret", "34"))


@pytest.mark.parametrize("schema", ["pg_x", "A", "a-b", "a;b", "", 'a"b', "x" * 64])
def test_a_schema_has_a_plain_name(schema):
    with pytest.raises(InputError, match="small letters"):
        database_of(f"postgresql://db.example/shop?schema={schema}")


def test_an_address_keeps_the_options_of_libpq():
    found = Address.of("postgresql://db.example:5/shop?sslmode=require&schema=a&connect_timeout=3")
    wanted = {"host": "db.example", "port": "5", "sslmode": "require", "connect_timeout": "3"}
    assert wanted.items() <= found.options.items()
    assert found[1:] == ("a", "postgresql://db.example:5/shop?schema=a")


def test_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for name in ("address", "postgres"):
        monkeypatch.delitem(sys.modules, f"setfold.live.{name}")
        monkeypatch.delattr(live, name)
    with pytest.raises(InputError, match=r"pip install 'psycopg\[binary\]'"):
        live.open("postgresql://db.example/shop")


# ---- databases ----------------------------------------------------------------------------------


def test_several_stores_share_a_database(server):
    rows = random_rows(1)
    with (
        live.create(server.url(), make_model()) as one,
        live.create(server.url(), make_model(1)) as other,
    ):
        one.update(rows, set="user", batch=("orders", 1))
        assert other.update(rows[:7], set="user", batch=("orders", 1)).rows == 7
        assert_holds(one, make_model(), rows)
        assert_holds(other, make_model(1), rows[:7])


def test_a_schema_of_another_program_is_left_alone(server):
    url = server.url("theirs")
    run(server, "CREATE SCHEMA theirs", "CREATE TABLE theirs.settings (name TEXT, value TEXT)")
    for call in (live.open, lambda url: live.create(url, make_model())):
        with pytest.raises(StoreError, match="belongs to another program"):
            call(url)
    run(server, "DROP TABLE theirs.settings")
    with pytest.raises(StoreError, match="there is no store"):
        live.open(url)
    live.create(url, make_model()).close()


def test_privileges_and_encodings(server):
    run(server, "CREATE ROLE stranger LOGIN", "CREATE ROLE reader LOGIN")
    run(server, "ALTER ROLE reader SET default_transaction_read_only = on")
    run(
        server,
        "CREATE DATABASE latin TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'",
    )
    url = server.url()
    with pytest.raises(StoreError, match="lacks a privilege"):
        live.create(url.replace("postgres@", "stranger@"), make_model())
    with pytest.raises(StoreError, match="encoding LATIN1"):
        live.create(url.replace("/postgres?", "/latin?"), make_model())
    with pytest.raises(StoreError, match="cannot connect"):
        live.create(url.replace("/postgres?", "/missing?"), make_model())
    live.create(url, make_model()).close()
    with pytest.raises(StoreError, match="lacks a privilege"):
        live.open(url.replace("postgres@", "stranger@"))
    schema = Address.of(url).schema
    run(server, f"GRANT ALL ON SCHEMA {schema} TO reader")
    run(server, f"GRANT ALL ON ALL TABLES IN SCHEMA {schema} TO reader")
    with live.open(url.replace("postgres@", "reader@")) as sets:
        assert sets.count(["x"]) == [0]
        with pytest.raises(StoreError, match="read-only"):
            sets.update(random_rows(1), set="user", batch=("orders", 1))


def test_names_that_are_too_long(server):
    import random

    letters = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=9000)
    rows = pa.table({"user": ["".join(letters), "ann"], "x0": [1.0, 2.0], "x1": [1.0, 2.0]})
    rows = rows.append_column("x2", rows["x0"])
    with live.create(server.url(), make_model()) as sets:
        with pytest.raises(InputError, match="too long for PostgreSQL"):
            sets.update(rows, set="user", batch=("orders", 1))
        assert sets.count(["ann"]) == [0]
        assert sets.update(rows[1:], set="user", batch=("orders", 1)).rows == 1


def test_tables_that_were_changed(server):
    url = server.url()
    with live.create(url, make_model()) as sets:
        sets.update(random_rows(1), set="user", batch=("orders", 1))
        assert sets.database.check() == []
        run(server, f"ALTER TABLE {Address.of(url).schema}.states RENAME TO other")
        assert sets.database.check() == ["the table states is missing"]
        for call in (sets.encode, sets.delete):
            with pytest.raises(StoreError, match="tables were changed"):
                call(NAMES)


def test_what_was_committed_is_synced(server):
    url = server.url()
    run(
        server, "CREATE ROLE hasty LOGIN SUPERUSER", "ALTER ROLE hasty SET synchronous_commit = off"
    )
    with (
        live.create(url.replace("postgres@", "hasty@"), make_model()) as sets,
        sets.database.writing() as transaction,
    ):
        assert transaction.run("SHOW synchronous_commit") == [("on",)]
