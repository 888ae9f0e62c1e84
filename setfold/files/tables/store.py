"""Store: the states of any number of sets, with bounded memory.

The store collects tables. When they take too much memory, it merges those of the same sets. If that
is not enough, it spills all of them to disk, into buckets by a hash of the set id. At the end each
bucket is processed as a store of its own, because all parts of a set are in the same bucket. A
bucket that is too large for memory is split into buckets again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from setfold.core.encoder import StreamingSetEncoder
from setfold.core.persist import sync
from setfold.errors import FileError
from setfold.files.tables.absorb import mark_overflows, states_of
from setfold.files.tables.frames import START_OVER, append_frame, read_frames
from setfold.files.tables.spill import LEVELS, append, read_tables, split_by_bucket, truncate
from setfold.files.tables.table import (
    RowTable,
    StateTable,
    Table,
    all_sets,
    from_arrow,
    merged,
)

MAX_TABLES = 16  # state tables that are collected before they are merged


class Store:
    """States of any number of sets.

    Args:
        encoder: The encoder of the states, in evaluation mode.
        folder: The folder to spill to; created when it is needed.
        budget: The memory for all tables in bytes, including the memory for merging them.
        level: How often the sets were split into buckets before.
        on_spill: Callback that is called with the number of bytes after each spill, also for
            buckets that are split again.

    >>> import pyarrow as pa, setfold, tempfile, torch
    >>> encoder = setfold.Pool(2, "mean").eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(encoder, Path(folder), budget=1 << 20)
    ...     for names in (["a", "b"], ["b", "c"]):
    ...         store.add(StateTable.of(encoder, pa.array(names), torch.randn(2, 2)))
    ...     [table.sets.to_pylist() for table in store.drain()]
    [['a', 'b', 'c']]
    """

    def __init__(
        self,
        encoder: StreamingSetEncoder,
        folder: Path,
        budget: int,
        level: int = 0,
        on_spill: Callable[[int], None] | None = None,
    ) -> None:
        self.encoder, self.folder, self.budget, self.level = encoder, folder, budget, level
        self.on_spill = on_spill
        self.state_nbytes = encoder.state_nbytes
        self.states: list[StateTable] = []
        self.rows: list[RowTable] = []
        self.owned: StateTable | None = None  # made here, so that it may be changed
        self.nbytes = 0  # memory of the tables; rows count twice, for when they are concatenated
        self.kind: dict[str, Any] = {}  # of set ids and elements
        self.unsynced: set[Path] = set()  # files that would not survive a power loss

    def add(self, table: Table) -> None:
        """Add a table. Merge and spill if the tables take too much memory."""
        if not self._add_in_place(table):
            self._collect(table)
            if self._should_merge():
                self._merge_states()
        if self.nbytes > self.budget // 2:
            self._compact()
            if self.nbytes > self.budget // 4 and not self.is_last_level:
                self._spill()

    def _add_in_place(self, table: Table) -> bool:
        """Merge a table into the only one there is, without new memory; False if that fails."""
        if not (isinstance(table, StateTable) and self.states == [self.owned]):
            return False
        self._check_alike(table)
        return self.owned is not None and self.owned.add(table)

    def _should_merge(self) -> bool:
        """Whether the other tables of states are as large as the first, or many."""
        sizes = [table.nbytes for table in self.states]
        return len(sizes) > MAX_TABLES or (len(sizes) > 1 and sum(sizes[1:]) >= sizes[0])

    def _merge_states(self) -> None:
        table = mark_overflows(merged(self.states))
        if len(self.states) > 1:
            self.owned = table
        self._replace_tables([table], self.rows)

    def drain(self) -> Iterator[StateTable]:
        """Yield the complete states of all sets, as sorted tables, and empty the store."""
        if not self.fits():
            buckets, lengths = self.close(), self.lengths()
            for bucket in buckets:
                yield from self.drain_bucket(bucket, lengths)
                self.drop_bucket(bucket)
        elif self.states or self.rows:
            yield self._take_all().sorted()

    @property
    def is_last_level(self) -> bool:
        """Whether the sets cannot be split again, because all bits of the hash are used."""
        return self.level == LEVELS

    def fits(self) -> bool:
        """Whether nothing was spilled, and the states of all sets fit in memory."""
        if self.files():
            return False
        if self.is_last_level:
            return True
        tables: list[Table] = [*self.states, *self.rows]
        most = self.budget // 2 // self.state_nbytes
        return sum(map(len, tables)) <= most or all_sets(tables) <= most

    def close(self) -> list[int]:
        """Spill the rest, and return the buckets that are not empty."""
        if self.states or self.rows:
            self._spill()
        return sorted({int(path.name.partition(".")[0]) for path in self.files()})

    def drain_bucket(self, bucket: int, lengths: dict[str, int]) -> Iterator[StateTable]:
        """Yield the states of a bucket like `drain`, but keep its files.

        Args:
            bucket: The bucket.
            lengths: What `lengths` returned when the store was closed.

        Raises:
            FileError: A file of the bucket is missing or corrupt.
        """
        folder = self.folder / f"{bucket:02d}"
        if folder.exists():  # left by an interrupted run
            shutil.rmtree(folder)
        child = Store(self.encoder, folder, self.budget, self.level + 1, self.on_spill)
        names = [name for name in lengths if name.startswith(f"{bucket:02d}.")]
        for name in sorted(names, reverse=True):  # states before rows
            for table in read_tables(self.folder / name, lengths[name]):
                child.add(table)
        yield from child.drain()

    def drop_bucket(self, bucket: int) -> None:
        """Remove the files of a bucket."""
        for path in self.files(bucket):
            path.unlink()

    def files(self, bucket: int | None = None) -> list[Path]:
        """Return the files with spilled tables: all, or those of a bucket."""
        start = "*" if bucket is None else f"{bucket:02d}"
        return sorted(self.folder.glob(f"{start}.*.tables"))

    def lengths(self) -> dict[str, int]:
        """Return the lengths of the files with spilled tables, by name."""
        return {file.name: file.stat().st_size for file in self.files()}

    # ---- checkpoints ---------------------------------------------------------------------------

    def save(self, path: Path) -> dict[str, int]:
        """Write the tables in memory to a new file, and return the lengths of the spilled files."""
        tables: list[Table] = [*self.states, *self.rows]
        for table in tables:
            append(path, table)
        append_frame(path, None)
        return self.lengths()

    def sync(self) -> None:
        """Make sure that the spilled files survive a power loss."""
        for path in self.unsynced:
            sync(path)
        if self.unsynced:
            sync(self.folder)
        self.unsynced.clear()

    def restore(self, path: Path, lengths: dict[str, int]) -> None:
        """Restore what `save` has written.

        Raises:
            FileError: A file is missing or corrupt.
        """
        for file in self.files():
            truncate(file, lengths.get(file.name, 0))
        for name, length in lengths.items():
            truncate(self.folder / name, length)
        self._replace_tables([], [])
        for table in read_frames(path):
            self._collect(from_arrow(table))

    def _collect(self, table: Table) -> None:
        self._check_alike(table)
        if isinstance(table, StateTable):
            self.states.append(table)
            self.nbytes += table.nbytes
        else:
            self.rows.append(table)
            self.nbytes += 2 * table.nbytes

    def _check_alike(self, table: Table) -> None:
        """Raise FileError for a table that does not fit the others, which only a file can hold."""
        elements = table.elements if isinstance(table, RowTable) else None
        found = {"set": table.sets.type}
        if elements is not None:
            found |= {"width": elements.shape[1:], "dtype": elements.dtype}
        if (self.kind | found) != (found | self.kind):
            raise FileError(
                f"a table in {self.folder.parent} does not fit the others: it has {found}; expected "
                f"{self.kind}. {START_OVER}"
            )
        self.kind |= found

    def _replace_tables(self, states: list[StateTable], rows: list[RowTable]) -> None:
        self.states, self.rows = states, rows
        if self.owned not in states:
            self.owned = None
        self.nbytes = sum(t.nbytes for t in states) + 2 * sum(t.nbytes for t in rows)

    # ---- merge and spill -----------------------------------------------------------------------

    def _compact(self) -> None:
        """Merge states of the same sets, and turn rows into states if that saves memory."""
        if self.states:
            self._merge_states()
        if self.rows:
            sets = all_sets(self.rows)
            if 2 * sets * self.state_nbytes < sum(table.nbytes for table in self.rows):
                self._replace_tables([self._take_all()], [])

    def _take_all(self) -> StateTable:
        """Return everything as one table of merged states, and empty the store."""
        states, rows = self.states, self.rows
        self._replace_tables([], [])
        if rows:
            concatenated = RowTable.concat(rows)
            rows.clear()
            for table in states_of(self.encoder, concatenated, str(self.encoder.device)):
                states.append(table)
        return mark_overflows(merged(states))

    def _spill(self) -> None:
        """Write all tables to disk, each set into its bucket."""
        self.folder.mkdir(parents=True, exist_ok=True)
        nbytes = 0
        for kind, tables in (("states", self.states), ("rows", self.rows)):
            while tables:
                for bucket, part in split_by_bucket(tables.pop(0), self.level):
                    path = self.folder / f"{bucket:02d}.{kind}.tables"
                    nbytes += append(path, part)
                    self.unsynced.add(path)
        self._replace_tables([], [])
        if self.on_spill is not None:
            self.on_spill(nbytes)
