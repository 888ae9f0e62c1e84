"""Store: the states of any number of sets within a bound of memory.

Tables come in; when they are too many, those of the same sets are merged; when they are still too
many, all go to disk, divided into buckets by a hash of the set's name. In the end each bucket is
a store of its own, and all of a set is in one of them. A bucket that is too large is divided again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from setfold.core.encoder import StreamingSetEncoder
from setfold.files.tables.spill import LEVELS, append, divided, shorten, tables_in
from setfold.files.tables.table import (
    RowTable,
    StateTable,
    Table,
    all_sets,
    merged,
    state_bytes,
    states_of,
)

MOST_TABLES = 16  # that wait to be merged


class Store:
    """States of any number of sets.

    Args:
        encoder: whose states they are, in evaluation mode.
        folder: for what does not fit; made when it is needed.
        budget: bytes that the tables may take in memory, all together and while they are merged.
        level: how often the sets were divided before.

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
        self, encoder: StreamingSetEncoder, folder: Path, budget: int, level: int = 0
    ) -> None:
        self.encoder, self.folder, self.budget, self.level = encoder, folder, budget, level
        self.device = str(encoder.initial_state(0).device)
        self.state_bytes = state_bytes(encoder)
        self.states: list[StateTable] = []
        self.rows: list[RowTable] = []
        self.spills = 0
        self.spilled = 0  # bytes
        self.held = 0  # bytes that are in memory, or will be while rows are put together

    def add(self, table: Table) -> None:
        """Take in what some rows add to their sets."""
        self._keep(table)
        if len(self.states) > MOST_TABLES:  # a few large blocks rather than many small ones
            self._hold([merged(self.states)], self.rows)
        if self.held > self.budget // 2:
            self._compact()
            if self.held > self.budget // 4 and not self.is_last:
                self._spill()

    def drain(self) -> Iterator[StateTable]:
        """All sets, each once and with all it is made of; each table sorted. The store is empty then."""
        if not self.fits():
            for bucket in self.close():
                yield from self.drain_bucket(bucket)
                self.drop_bucket(bucket)
        elif self.states or self.rows:
            yield self._taken().sorted()

    @property
    def is_last(self) -> bool:
        """Whether the sets cannot be divided again: their names agree in all bits of the hash."""
        return self.level == LEVELS

    def fits(self) -> bool:
        """Whether nothing lies on disk, and the states of all sets fit in memory."""
        if self.spills:
            return False
        if self.is_last:
            return True
        return all_sets([*self.states, *self.rows]) * self.state_bytes <= self.budget // 2

    def close(self) -> list[int]:
        """Bring the rest to disk; gives the buckets that hold anything."""
        if self.states or self.rows:
            self._spill()
        return sorted({int(path.name.partition(".")[0]) for path in self.files()})

    def drain_bucket(self, bucket: int) -> Iterator[StateTable]:
        """All sets of a bucket, as `drain` gives them; it stays on disk."""
        folder = self.folder / f"{bucket:02d}"
        if folder.exists():  # of a run that was killed
            shutil.rmtree(folder)
        own = Store(self.encoder, folder, self.budget, self.level + 1)
        for path in self.files(bucket):
            for table in tables_in(path):
                own.add(table)
        yield from own.drain()
        self.spills += own.spills
        self.spilled += own.spilled

    def drop_bucket(self, bucket: int) -> None:
        """Remove a bucket that is no longer needed."""
        for path in self.files(bucket):
            path.unlink()

    def files(self, bucket: int | None = None) -> list[Path]:
        """Those that hold what lies on disk: all, or those of a bucket."""
        start = "*" if bucket is None else f"{bucket:02d}"
        return sorted(self.folder.glob(f"{start}.*.tables"), reverse=True)  # states before rows

    # ---- snapshots -----------------------------------------------------------------------------

    def save(self, path: Path) -> dict[str, int]:
        """Write down what is in memory; gives the lengths of the files that hold the rest."""
        path.touch()
        tables: list[Table] = [*self.states, *self.rows]
        for table in tables:
            append(path, table)
        return {file.name: file.stat().st_size for file in self.files()}

    def restore(self, path: Path, lengths: dict[str, int], spills: int, spilled: int) -> None:
        """Go back to what `save` wrote down."""
        for file in self.files():
            shorten(file, lengths.get(file.name, 0))
        for name, length in lengths.items():
            shorten(self.folder / name, length)
        self._hold([], [])
        for table in tables_in(path):
            self._keep(table)
        self.spills, self.spilled = spills, spilled

    def _keep(self, table: Table) -> None:
        if isinstance(table, StateTable):
            self.states.append(table)
            self.held += table.nbytes
        else:
            self.rows.append(table)
            self.held += 2 * table.nbytes

    def _hold(self, states: list[StateTable], rows: list[RowTable]) -> None:
        """Hold these, and nothing else."""
        self.states, self.rows = states, rows
        self.held = sum(t.nbytes for t in states) + 2 * sum(t.nbytes for t in rows)

    # ---- within the bound ----------------------------------------------------------------------

    def _compact(self) -> None:
        """Merge what belongs to the same sets, and make states of rows where those are fewer bytes."""
        if self.states:
            self._hold([merged(self.states)], self.rows)
        if self.rows:
            sets = all_sets(self.rows)
            if 2 * sets * self.state_bytes < sum(table.nbytes for table in self.rows):
                self._hold([self._taken()], [])

    def _taken(self) -> StateTable:
        """Everything as states, merged; the store is empty then."""
        states, rows = self.states, self.rows
        self._hold([], [])
        if rows:
            together = RowTable.concat(rows)
            rows.clear()
            for table in states_of(self.encoder, together, self.device):
                states.append(table)
        return merged(states)

    def _spill(self) -> None:
        """Bring everything to disk, each set to its bucket."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for kind, tables in (("states", self.states), ("rows", self.rows)):
            while tables:
                for bucket, part in divided(tables.pop(0), self.level):
                    path = self.folder / f"{bucket:02d}.{kind}.tables"
                    self.spilled += append(path, part)
        self._hold([], [])
        self.spills += 1
