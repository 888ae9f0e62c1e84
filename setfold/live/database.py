"""What a store keeps, and the transactions by which it changes. Read this file first.

    settings    schema version, buckets, types of set ids, epoch
    models      each with its weights; one of them is active, all are updated
    states      the state of each set, in each bucket of time, for each model
    batches     which batches were applied, and a digest of their rows
    fills       which batches were applied to one model only, after it was added
    positions   for sources with offsets: the first one that was not applied yet
    deletions   which sets were deleted, and when

An update of states and the entry of its batch are one transaction. The epoch counts changes other
than updates: deletions, expiries, and changes of models. An update that was prepared in another
epoch is prepared again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

from setfold.errors import StoreError
from setfold.live.schema import BUCKETS, MIGRATIONS, VERSION

SETTINGS = "SELECT name, value FROM settings"


class StateRow(NamedTuple):
    """The state of a set in a bucket."""

    name: bytes
    bucket: int
    count: int  # type: ignore[assignment]  # tuples have a method of this name
    checksum: bytes
    state: bytes


class ModelRow(NamedTuple):
    """A model of a store.

    Attributes:
        number: Its number in the store.
        digest: The digest of its weights.
        content: The content of its file.
        active: Whether it is the one that is read.
        since: The sequence number of the last batch before it was added.
    """

    number: int
    digest: str
    content: bytes
    active: bool
    since: int


class BatchRow(NamedTuple):
    """A batch that was applied: which, with which rows, after which others, and when."""

    source: str
    key: str
    digest: bytes
    sequence: int
    at: int  # microseconds since 1970


class Deletion(NamedTuple):
    """The deletion of a set: after which batch, and when, in microseconds since 1970."""

    sequence: int
    at: int


class Transaction(ABC):
    """A transaction on a store, or a consistent view of it.

    The statements are written for SQLite; other databases translate them.
    """

    _settings: dict[str, str] | None = None  # None if they were not read yet

    @abstractmethod
    def run(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement, and return the rows that it yields."""

    @abstractmethod
    def run_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> int:
        """Run a statement for each row of values, and return how many rows it has changed."""

    def define(self, statements: str) -> None:
        """Run statements that define tables."""
        for statement in statements.split(";"):
            self.run(statement)

    @abstractmethod
    def stream(
        self, statement: str, values: Sequence[Any], size: int
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Run a query, and yield its rows, `size` at a time."""

    # ---- settings --------------------------------------------------------------------------

    def settings(self) -> Mapping[str, str]:
        """Return all settings. They are read once: what others change does not matter meanwhile."""
        if self._settings is None:
            self._settings = dict(self.run(SETTINGS))
        return self._settings

    def set(self, name: str, value: str) -> None:
        """Change a setting."""
        self.run(
            "INSERT INTO settings (name, value) VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            (name, value),
        )
        self._settings = None

    def set_once(self, name: str, value: str) -> str:
        """Let a setting have a value unless it has one; return the one that it has."""
        if name not in self.settings():
            self.run(
                "INSERT INTO settings (name, value) VALUES (?, ?) ON CONFLICT DO NOTHING",
                (name, value),
            )
            self._settings = None  # it may be that of another transaction
        return self.settings()[name]

    def epoch(self) -> int:
        """Return the number of changes other than updates."""
        return self.number("epoch")

    def number(self, name: str) -> int:
        """Return a setting that is a number.

        Raises:
            StoreError: There is none.
        """
        try:
            return int(self.settings()[name])
        except (KeyError, TypeError, ValueError):
            raise StoreError(
                f"the store is damaged: its setting {name!r} is missing or not a number. Restore a "
                "backup."
            ) from None

    def begin_epoch(self) -> None:
        """Count a change other than an update."""
        self.set("epoch", str(self.epoch() + 1))

    @abstractmethod
    def next_sequences(self, count: int) -> list[int]:
        """Return numbers that are larger than that of every batch and deletion before."""

    def next_sequence(self) -> int:
        """Return one such number."""
        return self.next_sequences(1)[0]

    def begin(self, sizes: Mapping[str, int | None], model: ModelRow) -> None:
        """Fill the tables of a new store."""
        first = {"version": VERSION, "epoch": 0, **sizes}
        for name, value in first.items():
            if value is not None:
                self.set(name, str(value))
        self.add_model(model)
        if sizes["bucket"] is not None:
            self.run(BUCKETS)

    # ---- models ----------------------------------------------------------------------------

    def models(self) -> list[ModelRow]:
        """Return all models, the active one first."""
        rows = self.run(
            "SELECT number, digest, content, active, since FROM models ORDER BY active DESC, number"
        )
        return [ModelRow(n, digest, bytes(c), bool(a), since) for n, digest, c, a, since in rows]

    def add_model(self, model: ModelRow) -> None:
        """Add a model, without states."""
        self.run(
            "INSERT INTO models (number, digest, content, active, since) VALUES (?, ?, ?, ?, ?)",
            (model.number, model.digest, model.content, int(model.active), model.since),
        )

    def copy_states(self, model: int, to: int) -> None:
        """Give a model the states of another one, whose states would be the same."""
        for table, columns in (
            ("states", "name, bucket, count, checksum, state"),
            ("fills", "source, key, digest"),
        ):
            self.run(
                f"INSERT INTO {table} (model, {columns}) SELECT ?, {columns} FROM {table} "
                "WHERE model = ?",
                (to, model),
            )

    def activate(self, number: int) -> None:
        """Let a model be the active one."""
        self.run("UPDATE models SET active = CASE number WHEN ? THEN 1 ELSE 0 END", (number,))

    def drop_model(self, number: int) -> None:
        """Remove a model and its states."""
        for table, column in (("states", "model"), ("fills", "model"), ("models", "number")):
            self.run(f"DELETE FROM {table} WHERE {column} = ?", (number,))

    # ---- batches ---------------------------------------------------------------------------

    def find_batches(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], BatchRow]:
        """Return those of some batches that were applied."""
        found = {}
        for key in keys:
            for row in self.run(
                "SELECT source, key, digest, sequence, at FROM batches "
                "WHERE source = ? AND key = ?",
                key,
            ):
                found[key] = BatchRow(row[0], row[1], bytes(row[2]), row[3], row[4])
        return found

    def add_batches(self, rows: Iterable[BatchRow]) -> int:
        """Note that batches were applied, except those that others have noted; return how many.

        A transaction that notes the same batch waits until this one ends.
        """
        return self.run_many(
            "INSERT INTO batches (source, key, digest, sequence, at) VALUES (?, ?, ?, ?, ?) "
            "ON CONFLICT DO NOTHING",
            sorted(rows),  # so that two that note the same ones never wait for each other
        )

    def keys_of(self, source: str) -> list[str]:
        """Return which batches of a source were applied."""
        return [key for (key,) in self.run("SELECT key FROM batches WHERE source = ?", (source,))]

    def filled(self, source: str, key: str) -> dict[int, bytes | None]:
        """Return to which models a batch was applied alone, after they were added.

        Each with the digest of its rows; None if the key of the batch says which they were.
        """
        statement = "SELECT model, digest FROM fills WHERE source = ? AND key = ?"
        rows = self.run(statement, (source, key))
        return {number: None if digest is None else bytes(digest) for number, digest in rows}

    def add_fill(self, model: int, source: str, key: str, digest: bytes | None) -> None:
        """Note that a batch was applied to one model only, afterwards."""
        self.run(
            "INSERT INTO fills (model, source, key, digest) VALUES (?, ?, ?, ?)",
            (model, source, key, digest),
        )

    def positions(self, source: str) -> dict[str, int]:
        """Return, for each part of a source, the first offset that was not applied yet."""
        return dict(self.run("SELECT part, next FROM positions WHERE source = ?", (source,)))

    def move_position(self, source: str, part: str, offsets: tuple[int, int], at: int) -> bool:
        """Note that the offsets from a first one on were applied, before the second one.

        Returns:
            False if other offsets were applied last, so that nothing was noted.
        """
        first, after = offsets
        return bool(
            self.run(
                "INSERT INTO positions (source, part, next, at) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (source, part) DO UPDATE SET next = excluded.next, at = excluded.at "
                "WHERE positions.next = ? RETURNING next",
                (source, part, after, at, first),
            )
        )

    def count_updates(self) -> tuple[int, int | None]:
        """Return the number of batches, and when the last update was; None if there was none."""
        ((count, last),) = self.run("SELECT COUNT(*), MAX(at) FROM batches")
        ((moved,),) = self.run("SELECT MAX(at) FROM positions")
        return int(count), max((at for at in (last, moved) if at is not None), default=None)

    # ---- states ----------------------------------------------------------------------------

    @abstractmethod
    def fetch(self, model: int, keys: Sequence[tuple[bytes, int]]) -> list[StateRow]:
        """Return the states of some sets and buckets, as far as they exist, in sorted order.

        A transaction that writes locks them, and those that do not exist, until it ends.

        Args:
            model: The number of the model.
            keys: Name and bucket, sorted.
        """

    @abstractmethod
    def put(self, model: int, rows: Sequence[StateRow]) -> None:
        """Write states that `fetch` has locked."""

    def drop(self, model: int, keys: Sequence[tuple[bytes, int]]) -> None:
        """Delete states that `fetch` has locked."""
        self.run_many(
            "DELETE FROM states WHERE model = ? AND name = ? AND bucket = ?",
            [(model, *key) for key in keys],
        )

    def of_sets(self, model: int, names: Sequence[bytes], since: int | None) -> list[StateRow]:
        """Return the states of some sets, in all buckets or in those since one."""
        bound = "" if since is None else " AND bucket >= ?"
        more = () if since is None else (since,)
        found = []
        for name in names:
            found += self.run(
                "SELECT name, bucket, count, checksum, state FROM states "
                f"WHERE model = ? AND name = ?{bound} ORDER BY bucket",
                (model, name, *more),
            )
        return [state_row(row) for row in found]

    def scan(self, model: int, since: int | None, size: int) -> Iterator[list[StateRow]]:
        """Yield the states of all sets, sorted by name and bucket, `size` at a time."""
        bound = "" if since is None else " AND bucket >= ?"
        rows = self.stream(
            "SELECT name, bucket, count, checksum, state FROM states "
            f"WHERE model = ?{bound} ORDER BY name, bucket",
            (model,) if since is None else (model, since),
            size,
        )
        for some in rows:
            yield [state_row(row) for row in some]

    def delete_set(self, name: bytes, deletion: Deletion) -> int:
        """Delete a set from all models and buckets; return the number of its elements."""
        ((count,),) = self.run(
            "SELECT COALESCE(SUM(count), 0) FROM states WHERE name = ? AND model = "
            "(SELECT number FROM models WHERE active = 1)",
            (name,),
        )
        self.run("DELETE FROM states WHERE name = ?", (name,))
        self.run(
            "INSERT INTO deletions (name, sequence, at) VALUES (?, ?, ?) ON CONFLICT (name) "
            "DO UPDATE SET sequence = excluded.sequence, at = excluded.at",
            (name, *deletion),
        )
        return int(count)

    def deletions(self, names: Iterable[bytes]) -> dict[bytes, Deletion]:
        """Return the deletions of some sets."""
        if not self.run("SELECT 1 FROM deletions LIMIT 1"):
            return {}
        found = {}
        for name in names:
            for row in self.run("SELECT sequence, at FROM deletions WHERE name = ?", (name,)):
                found[name] = Deletion(*row)
        return found

    def expire(self, before: int) -> int:
        """Delete all buckets before one; return how many states were deleted."""
        ((count,),) = self.run("SELECT COUNT(*) FROM states WHERE bucket < ?", (before,))
        self.run("DELETE FROM states WHERE bucket < ?", (before,))
        return int(count)

    def totals(self, model: int) -> tuple[int, int, int, int]:
        """Return the numbers of sets, states, elements and bytes of a model."""
        ((sets, states, elements, size),) = self.run(
            "SELECT COUNT(DISTINCT name), COUNT(*), COALESCE(SUM(count), 0), "
            "COALESCE(SUM(LENGTH(state)), 0) FROM states WHERE model = ?",
            (model,),
        )
        return int(sets), int(states), int(elements), int(size)


class Database(ABC):
    """A database that can hold a store.

    Args:
        url: The path of a file, or postgresql://...
    """

    kind: ClassVar[str]

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def shown(self) -> str:
        """The URL without a password, for messages."""
        return self.url

    @abstractmethod
    def exists(self) -> bool:
        """Whether it holds a store."""

    @abstractmethod
    def create(self, sizes: Mapping[str, int | None], model: ModelRow) -> None:
        """Create a store, in one transaction.

        Args:
            sizes: The settings "bucket" and "window", in microseconds; None for neither.
            model: The first model.

        Raises:
            StoreError: There is a store already.
        """

    @abstractmethod
    def reading(self) -> AbstractContextManager[Transaction]:
        """Return a context with a consistent view."""

    @abstractmethod
    def writing(self, *, alone: bool = False) -> AbstractContextManager[Transaction]:
        """Return a context with a transaction, which is durable after the context.

        Args:
            alone: Whether no other transaction writes at the same time.
        """

    @abstractmethod
    def check(self) -> list[str]:
        """Return what the database finds wrong with itself."""

    @abstractmethod
    def erase(self) -> None:
        """Overwrite what deleted rows have left in files, as far as the database can.

        Raises:
            StoreError: Not yet, because others still read it.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""

    def check_version(self) -> None:
        """Raise StoreError unless this setfold can use the store."""
        if not self.exists():
            raise StoreError(
                f"there is no store at {self.shown}. Create one with setfold.live.create.",
                command=f"there is no store at {self.shown}. Create one with setfold live create.",
            )
        with self.reading() as view:
            found = view.settings().get("version")
        if found in {str(version) for version in MIGRATIONS}:
            self._migrate()
        elif found != str(VERSION):
            raise StoreError(
                f"{self.shown} has schema version {found}; this setfold knows versions up to "
                f"{VERSION}. Use a newer setfold."
            )

    def _migrate(self) -> None:
        """Bring the tables of an older version to this one, in one transaction."""
        with self.writing(alone=True) as transaction:
            for version in range(transaction.number("version"), VERSION):  # others may be faster
                transaction.define(MIGRATIONS[version])
            transaction.set("version", str(VERSION))


def state_row(row: tuple[Any, ...]) -> StateRow:
    """Return a row of the table of states."""
    name, bucket, count, checksum, state = row
    return StateRow(bytes(name), bucket, count, bytes(checksum), bytes(state))
