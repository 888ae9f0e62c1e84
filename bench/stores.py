"""Stores of live sets, and what they are compared with: raw upserts, and a file that is rewritten.

Raw upserts write as many bytes to the same database: one table of names and states with the same
settings, one durable transaction for each batch, in as few statements as the database allows.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

import setfold
from bench.plan import LIVE_WIDTH, Plan
from bench.server import Server
from setfold import live
from setfold.live.sqlite import PRAGMAS

if TYPE_CHECKING:
    import psycopg

FILL = 68_000  # sets of a batch that fills a store: large, so that it has the store alone
SOURCE = "bench"
POSTGRES = {"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}

RAW_TABLE = "CREATE TABLE raw (name {blob} PRIMARY KEY, state {blob} NOT NULL)"
SQLITE_UPSERT = """
INSERT INTO raw (name, state) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET state = excluded.state
"""
POSTGRES_UPSERT = """
INSERT INTO raw SELECT * FROM unnest(%b::bytea[], %b::bytea[])
    ON CONFLICT (name) DO UPDATE SET state = excluded.state
"""


def encoder_of(slots: int) -> setfold.SlotSetEncoder:
    """Return a model whose states have 8 * slots * (LIVE_WIDTH + 1) bytes."""
    encoder = setfold.SlotSetEncoder(
        dim_in=LIVE_WIDTH, num_slots=slots, dim_slot=LIVE_WIDTH, dim_out=2 * LIVE_WIDTH
    )
    return encoder.eval()


def name_of(number: int) -> str:
    """Return the id of a set."""
    return f"user {number:08d}"


class Events:
    """Draws events of sets.

    Args:
        seed: Where the numbers begin.
    """

    def __init__(self, seed: int = 0) -> None:
        self.draw = np.random.default_rng(seed)

    def choose(self, kept: int, count: int) -> np.ndarray:
        """Return the numbers of different sets, chosen from all that are kept."""
        return self.draw.choice(kept, min(count, kept), replace=False)

    def of(self, numbers: np.ndarray) -> pa.Table:
        """Return an event of each set; a set may be listed several times."""
        elements = self.draw.standard_normal((len(numbers), LIVE_WIDTH), dtype=np.float32)
        columns = {f"f{place}": column.copy() for place, column in enumerate(elements.T)}
        return pa.table({"user": [name_of(number) for number in numbers], **columns})

    def blobs(self, count: int, size: int) -> list[bytes]:
        """Return random bytes, so that no write finds its bytes in the database already."""
        content = self.draw.bytes(count * size)
        return [content[start : start + size] for start in range(0, count * size, size)]


class Stores(ABC):
    """A database with stores, and with a table for raw upserts."""

    title: str

    def __init__(self) -> None:
        self.opened: dict[str, live.LiveSets] = {}
        self.batches = 0

    @abstractmethod
    def url(self, name: str) -> str:
        """Return where a store is."""

    @abstractmethod
    def fill_raw(self, name: str) -> None:
        """Create the table for raw upserts, with the states of a store."""

    @abstractmethod
    def upsert(self, names: Sequence[bytes], states: Sequence[bytes], *, read: bool) -> None:
        """Write states in one durable transaction; read the old ones before if `read` is set."""

    @abstractmethod
    def settle(self) -> None:
        """Finish what the database has put off, so that no measurement pays for filling it."""

    def cpu_seconds(self) -> float:
        """Return the CPU time of this process and of the database so far."""
        return time.process_time()

    def create(self, name: str, slots: int, sets: int, events: Events) -> live.LiveSets:
        """Create a store that keeps some sets, each with one element."""
        store = self.opened[name] = live.create(self.url(name), encoder_of(slots))
        for start in range(0, sets, FILL):
            store.update(
                events.of(np.arange(start, min(start + FILL, sets))),
                set="user",
                batch=(SOURCE, "fill", start),
            )
        return store

    def update(self, name: str, rows: pa.Table) -> None:
        """Apply a batch to a store."""
        self.batches += 1
        self.opened[name].update(rows, set="user", batch=(SOURCE, self.batches))

    def close(self) -> None:
        for store in self.opened.values():
            store.close()
        self.opened.clear()


class SqliteStores(Stores):
    """Stores in SQLite files.

    Args:
        folder: A folder for them, on disk.
    """

    title = "SQLite"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.raw = sqlite3.connect(folder / "raw.db", isolation_level=None)
        for pragma in PRAGMAS:
            self.raw.execute(f"PRAGMA {pragma}")

    def url(self, name: str) -> str:
        return str(self.folder / f"{name}.db")

    def fill_raw(self, name: str) -> None:
        self.raw.execute(RAW_TABLE.format(blob="BLOB"))
        self.raw.execute("ATTACH ? AS store", (self.url(name),))
        self.raw.execute("INSERT INTO raw SELECT name, state FROM store.states ORDER BY name")
        self.raw.execute("DETACH store")

    def upsert(self, names: Sequence[bytes], states: Sequence[bytes], *, read: bool) -> None:
        self.raw.execute("BEGIN IMMEDIATE")
        for name in names if read else ():
            self.raw.execute("SELECT state FROM raw WHERE name = ?", (name,)).fetchone()
        self.raw.executemany(SQLITE_UPSERT, zip(names, states, strict=True))
        self.raw.execute("COMMIT")

    def settle(self) -> None:
        self.raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for name in self.opened:
            with sqlite3.connect(self.url(name)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.close()

    def close(self) -> None:
        super().close()
        self.raw.close()


class PostgresStores(Stores):
    """Stores in a PostgreSQL server that runs as long as they are used.

    Args:
        folder: A folder for its files, on disk.

    Raises:
        NoServerError: There is no PostgreSQL here.
    """

    title = "PostgreSQL"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.sockets = TemporaryDirectory(prefix="setfold-bench-")
        self.server = Server(folder / "server", Path(self.sockets.name), **POSTGRES)
        self.server.create()
        self.server.start()
        try:
            self.raw = self._connect()
        except BaseException:
            self.server.stop()
            raise

    def _connect(self) -> psycopg.Connection:
        import psycopg

        url = self.server.url("raw").partition("&schema")[0]
        return psycopg.connect(url, autocommit=True)

    def url(self, name: str) -> str:
        return self.server.url(name)

    def fill_raw(self, name: str) -> None:
        self.raw.execute(RAW_TABLE.format(blob="bytea"))
        self.raw.execute("ALTER TABLE raw ALTER state SET STORAGE EXTERNAL")  # as in a store
        self.raw.execute("ALTER TABLE raw SET (toast_tuple_target = 8160)")
        self.raw.execute(f"INSERT INTO raw SELECT name, state FROM {name}.states ORDER BY name")

    def upsert(self, names: Sequence[bytes], states: Sequence[bytes], *, read: bool) -> None:
        with self.raw.transaction():
            cursor = self.raw.cursor(binary=True)
            if read:
                cursor.execute("SELECT name, state FROM raw WHERE name = ANY(%b)", [list(names)])
                cursor.fetchall()
            cursor.execute(POSTGRES_UPSERT, [list(names), list(states)])

    def settle(self) -> None:
        for table in ("raw", *(f"{name}.states" for name in self.opened)):
            self.raw.execute(f"VACUUM ANALYZE {table}")
        self.raw.execute("CHECKPOINT")

    def cpu_seconds(self) -> float:
        return time.process_time() + self.server.cpu_seconds()

    def close(self) -> None:
        super().close()
        self.raw.close()
        self.server.stop()
        self.sockets.cleanup()


class StateFile:
    """The states of a store in a file, which every batch rewrites.

    Args:
        store: The store.
        folder: A folder on disk.
    """

    def __init__(self, store: live.LiveSets, folder: Path) -> None:
        self.model, self.folder, self.batches = store.model, folder, 0
        self.path = folder / "states.arrow"
        store.export(self.path, states=True)

    def update(self, rows: pa.Table) -> None:
        """Encode the rows, and merge their states into the file."""
        import pyarrow.parquet as pq

        self.batches += 1
        batch, states, out = (
            self.folder / f"{self.batches}.{kind}" for kind in ("parquet", "arrow", "npz")
        )
        new = self.folder / "new.arrow"
        pq.write_table(rows, batch)
        setfold.encode_sets(self.model, batch, out, set="user", states=states)
        setfold.merge_states([self.path, states], new)
        os.replace(new, self.path)
        for left in (batch, states, out):
            left.unlink()

    def remove(self) -> None:
        """Delete it."""
        self.path.unlink()


def lacking_space(folder: Path, plan: Plan) -> str | None:
    """Return why stores of the planned size do not fit on a disk; None if they do."""
    needed = plan.live_sets * plan.live_bytes
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return None
    return f"they need {needed / 1e9:.0f} GB, but {free / 1e9:.1f} GB are free in {folder}"


def timed(run: Callable[[], object], cpu: Callable[[], float]) -> tuple[float, float]:
    """Return the wall seconds and the CPU seconds of a call."""
    used, begin = cpu(), time.perf_counter()
    run()
    return time.perf_counter() - begin, cpu() - used
