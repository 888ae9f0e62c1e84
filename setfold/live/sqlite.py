"""A store in a SQLite file: one file, any number of readers, writers one after the other.

The journal is a write-ahead log that is synced at every commit, so what was committed survives a
power loss.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from setfold.core.persist import sync
from setfold.errors import StoreError
from setfold.live.database import Database, ModelRow, StateRow, Transaction
from setfold.live.pool import Pool
from setfold.live.schema import SCHEMA

APPLICATION = 0x53464C44  # "SFLD": marks the file as a store of setfold
WAIT = 60.0  # seconds to wait for other writers
ERASE_WAIT = 5.0  # seconds to wait for readers
KEYS = 256  # of one statement
PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "secure_delete = ON",
    "trusted_schema = OFF",  # the file may come from anywhere
    f"cache_size = -{64 << 10}",  # KiB of pages in memory, for each connection
    "wal_autocheckpoint = 8192",  # pages of the log before they are moved: a sync for many commits
)
FETCH = """
WITH k (name, bucket) AS (VALUES {})
    SELECT s.rowid, s.name, s.bucket, s.count, s.checksum, s.state FROM k
    CROSS JOIN states AS s ON s.model = ? AND s.name = k.name AND s.bucket = k.bucket
"""  # CROSS: in the order of the keys
PUT = """
INSERT INTO states (model, name, bucket, count, checksum, state) VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (model, name, bucket) DO UPDATE SET
    count = excluded.count, checksum = excluded.checksum, state = excluded.state
"""
CHANGE = "UPDATE states SET count = ?, checksum = ?, state = ? WHERE rowid = ?"


class SqliteTransaction(Transaction):
    """A transaction on a connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.fetched: tuple[int, dict[tuple[Any, ...], int]] = -1, {}  # model; where its rows are

    def run(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self.connection.execute(statement, values).fetchall()

    def run_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> int:
        return self.connection.executemany(statement, rows).rowcount

    def stream(
        self, statement: str, values: Sequence[Any], size: int
    ) -> Iterator[list[tuple[Any, ...]]]:
        cursor = self.connection.execute(statement, values)
        while rows := cursor.fetchmany(size):
            yield rows

    def next_sequences(self, count: int) -> list[int]:
        last = self.number("sequence")
        self.set("sequence", str(last + count))
        return [*range(last + 1, last + count + 1)]

    def fetch(self, model: int, keys: Sequence[tuple[bytes, int]]) -> list[StateRow]:
        found: list[tuple[Any, ...]] = []
        for start in range(0, len(keys), KEYS):
            some = keys[start : start + KEYS]
            statement = FETCH.format(", ".join(["(?, ?)"] * len(some)))
            found += self.run(statement, [*chain.from_iterable(some), model])
        self.fetched = model, {row[1:3]: row[0] for row in found}
        return [StateRow._make(row[1:]) for row in found]

    def put(self, model: int, rows: Sequence[StateRow]) -> None:
        # A row that was fetched is found by its place, without another search in the index.
        places = self.fetched[1] if self.fetched[0] == model else {}
        old = [(*row[2:], places[row[:2]]) for row in rows if row[:2] in places]
        if old and self.run_many(CHANGE, old) != len(old):
            raise StoreError(
                "a state was deleted while it was changed. Nothing was kept; repeat it."
            )
        if len(old) < len(rows):
            self.run_many(PUT, [(model, *row) for row in rows if row[:2] not in places])


class SqliteDatabase(Database):
    """A SQLite file.

    Args:
        url: Its path.
    """

    kind = "SQLite"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.path = Path(url)
        self.pool = Pool(self._connect, lambda connection: not connection.in_transaction)

    def exists(self) -> bool:
        if not self.path.exists() or not self.path.stat().st_size:
            return False
        with self._translated(), self.pool.lent() as connection:
            return connection.execute("PRAGMA application_id").fetchone() == (APPLICATION,)

    def create(self, sizes: Mapping[str, int | None], model: ModelRow) -> None:
        if not self.path.parent.is_dir():
            raise StoreError(f"the folder {self.path.parent} does not exist. Create it first.")
        with self.writing() as transaction:
            if transaction.run("SELECT COUNT(*) FROM sqlite_master") != [(0,)]:
                raise StoreError(f"{self.path} exists already. Pass another path.")
            transaction.define(SCHEMA)
            transaction.run(f"PRAGMA application_id = {APPLICATION}")
            transaction.begin(sizes, model)
            transaction.set("sequence", "0")
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
        with self.pool.lent() as connection:
            connection.execute(begin)
            try:
                yield SqliteTransaction(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # a full disk has rolled it back already
                    connection.execute("ROLLBACK")
                raise

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=WAIT, isolation_level=None, check_same_thread=False
        )
        try:
            self._check_owner(connection)  # before a pragma changes the file
            for pragma in PRAGMAS:
                connection.execute(f"PRAGMA {pragma}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_owner(self, connection: sqlite3.Connection) -> None:
        """Raise StoreError if the file is a database of another program."""
        (number,) = connection.execute("PRAGMA application_id").fetchone()
        is_empty = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone() == (0,)
        if number != APPLICATION and not is_empty:
            raise StoreError(f"{self.path} is a database of another program. Pass another path.")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise errors of SQLite as StoreError."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self.path}: {_explain(error)}") from error

    def check(self) -> list[str]:
        with self._translated(), self.pool.lent() as connection:
            rows = connection.execute("PRAGMA integrity_check").fetchall()
        return [text for (text,) in rows if text != "ok"]

    def erase(self) -> None:
        # Freed pages are zeros already (secure_delete); the log still holds older pages. Whoever
        # reads one of them delays this, and writers wait meanwhile.
        with self._translated(), self.pool.lent() as connection:
            connection.execute(f"PRAGMA busy_timeout = {ERASE_WAIT * 1000:.0f}")
            (is_busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            connection.execute(f"PRAGMA busy_timeout = {WAIT * 1000:.0f}")
        if is_busy:
            raise StoreError(
                f"the rows are deleted, but {self.path}-wal still holds them, because others have "
                f"been reading for {ERASE_WAIT:.0f} seconds. Delete again later to overwrite them."
            )

    def close(self) -> None:
        self.pool.close()


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
