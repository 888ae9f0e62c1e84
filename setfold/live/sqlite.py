"""A store in a SQLite file: one file, any number of readers, writers one after the other.

The journal is a write-ahead log that is synced at every commit, so what was committed survives a
power loss. Every thread has a connection of its own.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setfold.core.persist import sync
from setfold.errors import StoreError
from setfold.live.database import Database, ModelRow, StateRow, Transaction, state_row

SCHEMA = """
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE models (number INTEGER PRIMARY KEY, digest TEXT NOT NULL, content BLOB NOT NULL,
    active INTEGER NOT NULL, since INTEGER NOT NULL);
CREATE TABLE states (model INTEGER NOT NULL, name BLOB NOT NULL, bucket INTEGER NOT NULL,
    count INTEGER NOT NULL, checksum BLOB NOT NULL, state BLOB NOT NULL);
CREATE UNIQUE INDEX states_of_sets ON states (model, name, bucket);
CREATE TABLE batches (source TEXT NOT NULL, key TEXT NOT NULL, digest BLOB NOT NULL,
    sequence INTEGER NOT NULL, PRIMARY KEY (source, key)) WITHOUT ROWID;
CREATE TABLE fills (model INTEGER NOT NULL, source TEXT NOT NULL, key TEXT NOT NULL,
    PRIMARY KEY (model, source, key)) WITHOUT ROWID;
CREATE TABLE positions (source TEXT NOT NULL, part TEXT NOT NULL, next INTEGER NOT NULL,
    PRIMARY KEY (source, part)) WITHOUT ROWID;
CREATE TABLE deletions (name BLOB PRIMARY KEY, sequence INTEGER NOT NULL, at INTEGER NOT NULL)
    WITHOUT ROWID;
"""
BUCKETS = "CREATE INDEX states_of_buckets ON states (bucket)"  # for expiry
APPLICATION = 0x53464C44  # "SFLD": marks the file as a store of setfold
WAIT = 60.0  # seconds to wait for other writers
CACHE = 64 << 10  # KiB of pages in memory, for each connection
CHECKPOINT = 8192  # pages of the log before they are moved to the file: a sync for many commits


class SqliteTransaction(Transaction):
    """A transaction on a connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    def run(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self.connection.execute(statement, values).fetchall()

    def run_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        self.connection.executemany(statement, rows)

    def stream(
        self, statement: str, values: Sequence[Any], size: int
    ) -> Iterator[list[tuple[Any, ...]]]:
        cursor = self.connection.execute(statement, values)
        while rows := cursor.fetchmany(size):
            yield rows

    def next_sequence(self) -> int:
        ((number,),) = self.run(
            "UPDATE settings SET value = value + 1 WHERE name = 'sequence' RETURNING value"
        )
        return int(number)

    def fetch(self, model: int, keys: Sequence[tuple[bytes, int]]) -> list[StateRow]:
        statement = (
            "SELECT name, bucket, count, checksum, state FROM states "
            "WHERE model = ? AND name = ? AND bucket = ?"
        )
        execute, found = self.connection.execute, []
        for name, bucket in keys:
            row = execute(statement, (model, name, bucket)).fetchone()
            if row is not None:
                found.append(state_row(row))
        return found

    def put(self, model: int, rows: Sequence[StateRow]) -> None:
        self.run_many(
            "INSERT INTO states (model, name, bucket, count, checksum, state) "
            "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (model, name, bucket) DO UPDATE SET "
            "count = excluded.count, checksum = excluded.checksum, state = excluded.state",
            ((model, *row) for row in rows),
        )


class SqliteDatabase(Database):
    """A SQLite file.

    Args:
        url: Its path.
    """

    kind = "SQLite"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.path = Path(url)
        self.local = threading.local()
        self.opened: list[sqlite3.Connection] = []
        self.lock = threading.Lock()

    def exists(self) -> bool:
        if not self.path.exists() or not self.path.stat().st_size:
            return False
        with self._translated():
            (number,) = self._connection().execute("PRAGMA application_id").fetchone()
            tables = self._connection().execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if number != APPLICATION:
            if tables == (0,):
                return False
            raise StoreError(f"{self.path} is a database of another program. Pass another path.")
        return True

    def create(self, sizes: Mapping[str, int | None], model: ModelRow) -> None:
        if not self.path.parent.is_dir():
            raise StoreError(f"the folder {self.path.parent} does not exist. Create it first.")
        with self.writing() as transaction:
            if transaction.run("SELECT COUNT(*) FROM sqlite_master") != [(0,)]:
                raise StoreError(f"{self.path} exists already. Pass another path.")
            for statement in SCHEMA.split(";"):
                transaction.run(statement)
            if sizes["bucket"] is not None:
                transaction.run(BUCKETS)
            transaction.run(f"PRAGMA application_id = {APPLICATION}")
            transaction.begin(sizes, model)
        sync(self.path.parent)

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        with self._translated(), self._transaction("BEGIN") as found:
            yield found

    @contextmanager
    def writing(self, *, alone: bool = False) -> Iterator[Transaction]:
        with self._translated(), self._transaction("BEGIN IMMEDIATE") as found:
            yield found

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Transaction]:
        connection = self._connection()
        connection.execute(begin)
        try:
            yield SqliteTransaction(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # a full disk has rolled it back already
                connection.execute("ROLLBACK")
            raise

    def _connection(self) -> sqlite3.Connection:
        """Return the connection of this thread."""
        found = getattr(self.local, "connection", None)
        if found is not None and self.local.process == os.getpid():  # none survives a fork
            return found
        connection = sqlite3.connect(
            self.path, timeout=WAIT, isolation_level=None, check_same_thread=False
        )
        for pragma in (
            "journal_mode = WAL",
            "synchronous = FULL",
            "secure_delete = ON",
            f"cache_size = -{CACHE}",
            f"wal_autocheckpoint = {CHECKPOINT}",
        ):
            connection.execute(f"PRAGMA {pragma}")
        self.local.connection, self.local.process = connection, os.getpid()
        with self.lock:
            self.opened.append(connection)
        return connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise errors of SQLite as StoreError."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self.path}: {_explain(error)}") from error

    def check(self) -> list[str]:
        with self._translated():
            rows = self._connection().execute("PRAGMA integrity_check").fetchall()
        return [text for (text,) in rows if text != "ok"]

    def erase(self) -> None:
        # Freed pages are zeros already (secure_delete); the log still holds older pages.
        with self._translated():
            self._connection().execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self.lock:
            for connection in self.opened:
                connection.close()
            self.opened.clear()
        self.local = threading.local()


def _explain(error: sqlite3.Error) -> str:
    """Return what an error of SQLite means, and what to do."""
    text = str(error)
    if "locked" in text or "busy" in text:
        return f"another process has been writing for {WAIT:.0f} seconds. Try again later."
    if "full" in text:
        return "the disk is full. Nothing of this change was kept; free some space and repeat it."
    if "malformed" in text or "not a database" in text:
        return f"the file is damaged or not a store ({text}). Restore a backup."
    if "readonly" in text or "unable to open" in text:
        return f"cannot be opened for writing ({text}). Check the path and its permissions."
    return f"{text}. Nothing of this change was kept."
