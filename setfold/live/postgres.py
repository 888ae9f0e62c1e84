"""A store in a PostgreSQL database: any number of readers, and writers on different sets at once.

The tables are in a schema of their own, `setfold` unless the URL names another one:
postgresql://user@host/database?schema=clicks.

An update shares a lock of the store with other updates; deletions and changes of models have it
alone. Within an update, everything is locked in sorted order: the batches, then the states, also
those that do not exist yet. So no update is lost, and no two updates wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, TypeVar
from zlib import crc32

from setfold.errors import InputError, SetfoldError, StoreError
from setfold.live.address import Address  # first: it says what to install
from setfold.live.database import (
    SETTINGS,
    BatchRow,
    Database,
    Deletion,
    ModelRow,
    StateRow,
    Transaction,
    state_row,
)
from setfold.live.pool import Pool
from setfold.live.retry import InterruptedTransactionError
from setfold.live.schema import SCHEMA

import psycopg  # isort: skip
from psycopg import errors, pq  # isort: skip

MARK = "a store of setfold"  # the comment of the schema
APPLICATION = 0x53464C44  # "SFLD": the advisory locks of setfold
WAIT = 60  # seconds to wait for other writers
AWAY = 30.0  # seconds to wait for a server that was reached before
KEYS = 4096  # keys of one statement
ROWS_BYTES = 1 << 24  # states of one statement
TABLES = ("settings", "models", "states", "batches", "fills", "positions", "deletions")
LAYOUT = """
ALTER TABLE states ALTER state SET STORAGE EXTERNAL;
ALTER TABLE states SET (toast_tuple_target = 8160);
CREATE SEQUENCE sequences
"""  # states are floats, which do not compress; those of a few KB stay in their row
SESSION = """
SET search_path = "{schema}";
SET lock_timeout = '{wait}s';
SET client_min_messages = warning;
SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') = 'off'
"""
# Lists are sent as binary (%b): as text, bytes take twice the space and a hundred times the time.
PLACEHOLDERS = """
INSERT INTO states (model, name, bucket, count, checksum, state)
    SELECT %s, name, bucket, 0, '', '' FROM unnest(%b::bytea[], %b::bigint[])
    WITH ORDINALITY AS k (name, bucket, place) ORDER BY place
    ON CONFLICT DO NOTHING RETURNING name, bucket
"""
FETCH = """
SELECT s.name, s.bucket, s.count, s.checksum, s.state FROM states AS s
    JOIN unnest(%b::bytea[], %b::bigint[]) AS k (name, bucket)
    ON s.name = k.name AND s.bucket = k.bucket WHERE s.model = %s ORDER BY s.name, s.bucket
"""
PUT = """
INSERT INTO states (model, name, bucket, count, checksum, state)
    SELECT %s, * FROM unnest(%b::bytea[], %b::bigint[], %b::bigint[], %b::bytea[], %b::bytea[])
    ON CONFLICT (model, name, bucket) DO UPDATE SET
    count = excluded.count, checksum = excluded.checksum, state = excluded.state
"""
FORGET = """
DELETE FROM states AS s USING unnest(%b::bytea[], %b::bigint[]) AS k (name, bucket)
    WHERE s.model = %s AND s.name = k.name AND s.bucket = k.bucket
"""
BATCHES = """
SELECT source, key, digest, sequence, at FROM batches
    JOIN unnest(%s::text[], %s::text[]) AS k (source, key) USING (source, key)
"""
Connection = psycopg.Connection[tuple[Any, ...]]
Item = TypeVar("Item")


class PostgresTransaction(Transaction):
    """A transaction on a connection.

    Args:
        connection: The connection, on which it has begun.
        is_shared: Whether others may write at the same time, so that it must lock states.
        settings: All settings, if they are known.
    """

    def __init__(
        self, connection: Connection, is_shared: bool, settings: dict[str, str] | None
    ) -> None:
        self.connection, self.is_shared, self._settings = connection, is_shared, settings
        self.cursor = connection.cursor(binary=True)
        self.placeholders: dict[int, set[tuple[Any, ...]]] = {}

    def run(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        cursor = self.cursor.execute(_translated(statement), values)
        return cursor.fetchall() if cursor.description else []

    def run_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> int:
        self.cursor.executemany(_translated(statement), rows)
        return self.cursor.rowcount

    def define(self, statements: str) -> None:
        super().define(_typed(statements))

    def stream(
        self, statement: str, values: Sequence[Any], size: int
    ) -> Iterator[list[tuple[Any, ...]]]:
        with self.connection.cursor("stream", binary=True) as cursor:
            cursor.execute(_translated(statement), values)
            while rows := cursor.fetchmany(size):
                yield rows

    def next_sequences(self, count: int) -> list[int]:
        statement = "SELECT nextval('sequences') FROM generate_series(1, ?) ORDER BY 1"
        return [number for (number,) in self.run(statement, (count,))]

    def find_batches(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], BatchRow]:
        found = self.run(BATCHES, [[key[0] for key in keys], [key[1] for key in keys]])
        return {row[:2]: BatchRow(*row) for row in found}

    def deletions(self, names: Iterable[bytes]) -> dict[bytes, Deletion]:
        statement = "SELECT name, sequence, at FROM deletions WHERE name = ANY(?::bytea[])"
        return {name: Deletion(*rest) for name, *rest in self.run(statement, [list(names)])}

    def of_sets(self, model: int, names: Sequence[bytes], since: int | None) -> list[StateRow]:
        bound = "" if since is None else " AND bucket >= ?"
        found = self.run(
            "SELECT name, bucket, count, checksum, state FROM states "
            f"WHERE model = ? AND name = ANY(?::bytea[]){bound} ORDER BY name, bucket",
            [model, list(names), *([] if since is None else [since])],
        )
        return [state_row(row) for row in found]

    def fetch(self, model: int, keys: Sequence[tuple[bytes, int]]) -> list[StateRow]:
        # All placeholders come before the first lock of a row: then whoever waits for a row waits
        # for a transaction that waits for no placeholder, and in either step the order is sorted.
        new = self.placeholders.setdefault(model, set())
        for some in _portions(keys) if self.is_shared else ():
            new.update(self.run(PLACEHOLDERS, [model, *_columns(some, 2)]))
        lock = " FOR UPDATE OF s" if self.is_shared else ""
        old = [key for key in keys if key not in new] if new else keys
        found = [
            StateRow._make(row)
            for some in _portions(old)
            for row in self.run(FETCH + lock, [*_columns(some, 2), model])
        ]
        if self.is_shared and len(found) < len(old):
            raise InterruptedTransactionError(
                "others have removed a set while this change was waiting for it. Nothing of this "
                "change was kept; repeat it.",
                is_unknown=False,
            )
        return found

    def put(self, model: int, rows: Sequence[StateRow]) -> None:
        size = max(1, ROWS_BYTES // max(len(rows[0].state), 1)) if rows else 1
        for some in _portions(rows, min(size, KEYS)):
            self.run(PUT, [model, *_columns(some, 5)])
        if model in self.placeholders:
            self.placeholders[model].difference_update((row.name, row.bucket) for row in rows)

    def remove_placeholders(self) -> None:
        """Delete the rows of states that were locked before they existed, and never written."""
        for model, keys in self.placeholders.items():
            for some in _portions(sorted(keys)):
                self.run(FORGET, [*_columns(some, 2), model])


class PostgresDatabase(Database):
    """A schema of a PostgreSQL database.

    Args:
        url: postgresql://user:password@host:port/database?schema=name; everything is optional.
    """

    kind = "PostgreSQL"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.options, self.schema, self._shown = Address.of(url)
        lock = f"{APPLICATION}, {crc32(self.schema.encode()) - (1 << 31)}"
        begin = "BEGIN ISOLATION LEVEL READ COMMITTED"
        self.begin_alone = f"{begin}; SELECT pg_advisory_xact_lock({lock})"
        self.begin_shared = f"{begin}; SELECT pg_advisory_xact_lock_shared({lock})"
        self.pool = Pool(self._connect, _is_idle)
        self.was_reached = False
        self.has_settings = False  # whether the store exists for certain

    @property
    def shown(self) -> str:
        return self._shown

    def exists(self) -> bool:
        with self.reading() as view:
            self.has_settings = self._has_store(view)
        return self.has_settings

    def _has_store(self, view: Transaction) -> bool:
        found = view.run(
            "SELECT obj_description(oid, 'pg_namespace'), EXISTS (SELECT FROM pg_class "
            "WHERE relnamespace = n.oid), has_schema_privilege(oid, 'USAGE') "
            "FROM pg_namespace AS n WHERE nspname = ?",
            (self.schema,),
        )
        comment, has_tables, is_allowed = found[0] if found else (None, False, True)
        if not is_allowed:
            raise StoreError(f"{self.shown}: {NOT_ALLOWED}.")
        if comment != MARK and has_tables:
            raise StoreError(
                f"the schema {self.schema!r} of {self.shown} belongs to another program. Pass another "
                "one in the URL: ?schema=name."
            )
        return comment == MARK and has_tables

    def create(self, sizes: Mapping[str, int | None], model: ModelRow) -> None:
        with self.writing(alone=True) as transaction:
            if self._has_store(transaction):
                raise StoreError(
                    f"{self.shown} exists already. Pass another schema in the URL: ?schema=name."
                )
            ((encoding,),) = transaction.run("SHOW server_encoding")
            if encoding != "UTF8":
                raise StoreError(
                    f"the database of {self.shown} has the encoding {encoding}. Create one with "
                    "ENCODING 'UTF8'."
                )
            transaction.run(f'CREATE SCHEMA IF NOT EXISTS "{self.schema}"')
            transaction.run(f"COMMENT ON SCHEMA \"{self.schema}\" IS '{MARK}'")
            transaction.define(SCHEMA + LAYOUT)
            transaction.begin(sizes, model)
        self.has_settings = True

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
        with self._transaction(begin, is_writing=False, is_shared=False) as found:
            yield found

    @contextmanager
    def writing(self, *, alone: bool = False) -> Iterator[Transaction]:
        begin = self.begin_alone if alone else self.begin_shared
        with self._transaction(begin, is_writing=True, is_shared=not alone) as found:
            yield found

    @contextmanager
    def _transaction(
        self, begin: str, *, is_writing: bool, is_shared: bool
    ) -> Iterator[Transaction]:
        (connection, settings), is_committing = self._begin(begin), False
        try:
            transaction = PostgresTransaction(connection, is_shared, settings)
            yield transaction
            if is_writing:
                transaction.remove_placeholders()
                is_committing = True
                if connection.execute("COMMIT").statusmessage != "COMMIT":
                    raise StoreError(f"{self.shown}: the change was rolled back. Repeat it.")
        except psycopg.Error as error:
            raise self._explain(error, connection, is_committing) from error
        finally:
            if not _is_idle(connection):
                with suppress(psycopg.Error):
                    connection.execute("ROLLBACK")
            self.pool.give_back(connection)

    def _begin(self, begin: str) -> tuple[Connection, dict[str, str] | None]:
        """Return a connection with a transaction, and the settings if there is a store.

        Connections that were lost meanwhile are replaced.
        """
        for _ in range(3):
            connection = self.pool.take()
            try:
                if not self.has_settings:
                    connection.execute(begin)
                    return connection, None
                cursor = connection.execute(f"{begin}; {SETTINGS}")  # in one message
                while cursor.nextset():
                    pass
                return connection, dict(cursor.fetchall())
            except psycopg.Error as error:
                explained, is_lost = self._explain(error, connection, False), connection.closed
                connection.close()
                if not is_lost:
                    raise explained from error
                self.pool.close()  # the server was away, so the others are lost, too
            except BaseException:
                connection.close()
                raise
        raise explained

    def _connect(self) -> Connection:
        """Return a new connection; wait for a server that is away for a while."""
        last, pause = time.monotonic() + (AWAY if self.was_reached else 0), 0.05
        while True:
            try:
                return self._connect_once()
            except psycopg.Error as error:
                if time.monotonic() + pause > last:
                    raise StoreError(
                        f"cannot connect to {self.shown}: {_line(error)}. Check the address, user and "
                        "password, and that the server is running."
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _connect_once(self) -> Connection:
        connection = psycopg.connect(**self.options, autocommit=True)  # type: ignore[arg-type]
        try:
            connection.execute(SESSION.format(schema=self.schema, wait=WAIT))
        except BaseException:
            connection.close()
            raise
        self.was_reached = True
        return connection

    def check(self) -> list[str]:
        with self.reading() as view:
            found = view.run(
                "SELECT c.relname, i.indisvalid FROM pg_class AS c JOIN pg_namespace AS n "
                "ON c.relnamespace = n.oid LEFT JOIN pg_index AS i ON i.indexrelid = c.oid "
                "WHERE n.nspname = ?",
                (self.schema,),
            )
            names = {name for name, _ in found}
            wrong = [f"the table {name} is missing" for name in TABLES if name not in names]
            wrong += [f"the index {name} is not valid" for name, valid in found if valid is False]
            return wrong

    def erase(self) -> None:
        # VACUUM frees what no other transaction can see; later writes overwrite it.
        with self.pool.lent() as connection:
            try:
                connection.execute("VACUUM (INDEX_CLEANUP ON, TRUNCATE OFF) states")
            except psycopg.Error as error:
                raise StoreError(
                    f"the rows are deleted, but {self.shown} cannot overwrite them yet: {_line(error)}. "
                    "Run VACUUM later."
                ) from error

    def close(self) -> None:
        self.pool.close()

    def _explain(
        self, error: psycopg.Error, connection: Connection, is_committing: bool
    ) -> SetfoldError:
        """Return the error to raise: what happened, and what to do."""
        text, nothing = _line(error), "Nothing of this change was kept"
        if connection.closed:
            unknown = "The change may or may not have been kept: look, and repeat it if not"
            return InterruptedTransactionError(
                f"{self.shown}: the connection was lost ({text}). "
                f"{unknown if is_committing else nothing + '; repeat it'}.",
                is_unknown=is_committing,
            )
        if isinstance(error, errors.SerializationFailure | errors.DeadlockDetected):
            return InterruptedTransactionError(
                f"{self.shown}: others write the same sets ({text}). {nothing}; repeat it.",
                is_unknown=False,
            )
        if isinstance(error, errors.ProgramLimitExceeded):
            return InputError(
                f"a set id or the identity of a batch is too long for PostgreSQL ({text}). {nothing}."
            )
        for kinds, advice in ADVICE.items():
            if isinstance(error, kinds):
                return StoreError(f"{self.shown}: {advice} ({text}). {nothing}.")
        return StoreError(f"{self.shown}: {text}. {nothing}.")


NOT_ALLOWED = "the user lacks a privilege; ask the owner of the database"
ADVICE: dict[tuple[type[psycopg.Error], ...], str] = {
    (errors.LockNotAvailable,): f"others have been writing for {WAIT} seconds; try again later",
    (errors.DiskFull,): "the disk of the server is full; free some space and repeat the change",
    (errors.ReadOnlySqlTransaction,): "the server is read-only; connect to the primary server",
    (errors.InsufficientPrivilege,): NOT_ALLOWED,
    (errors.UndefinedTable, errors.UndefinedColumn, errors.UndefinedObject): (
        "there is no store, or its tables were changed; create one, or restore a backup"
    ),
}


def _is_idle(connection: Connection) -> bool:
    return connection.info.transaction_status == pq.TransactionStatus.IDLE


@lru_cache
def _translated(statement: str) -> str:
    """Return a statement with the placeholders of psycopg."""
    return statement.replace("?::bytea[]", "%b::bytea[]").replace("?", "%s")


def _typed(statement: str) -> str:
    """Return a statement that creates a table with the types of PostgreSQL."""
    for theirs, own in (("BLOB", "BYTEA"), ("INTEGER", "BIGINT"), (" WITHOUT ROWID", "")):
        statement = statement.replace(theirs, own)
    return statement


def _portions(items: Sequence[Item], size: int = KEYS) -> Iterator[Sequence[Item]]:
    """Yield some items at a time, so that no statement becomes too large."""
    return (items[start : start + size] for start in range(0, len(items), size))


def _columns(rows: Sequence[Sequence[Any]], width: int) -> list[list[Any]]:
    """Return the columns of rows."""
    return [[row[place] for row in rows] for place in range(width)]


def _line(error: psycopg.Error) -> str:
    """Return what an error says, in one line."""
    return " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__
