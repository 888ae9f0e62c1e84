"""What an engine computes: shards of files in, tables of partial states out.

A step depends on its rows and on nothing else. If it is computed twice, the result is the same, and
if it is lost, it can be computed again. Engines keep no state between steps.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from setfold.core.encoder import StreamingSetEncoder
from setfold.errors import FileError, InputError, NonFiniteError, SetfoldError
from setfold.files.columns import ColumnSpec, Validated
from setfold.files.ids import TEXT, pack
from setfold.files.inputs import Input, file_of, open_reader
from setfold.files.readers.reader import BadRow
from setfold.files.rows import Rows, rows_of
from setfold.files.states import read_states
from setfold.files.tables.absorb import (
    absorb_or_mark,
    absorbed,
    blames_elements,
    find_marks,
    find_unusable,
    reason_of,
)
from setfold.files.tables.table import StateTable, Table, element_dtypes
from setfold.native.dispatch import Room
from setfold.preprocessing.columns import Columns, columns_of, decoded


class Stamp(NamedTuple):
    """Size and modification time, used to detect changed inputs."""

    bytes: int
    modified: int  # nanoseconds

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """Return the stamp of a file, or of all files in a folder that is read as one input."""
        path = file_of(path)
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        stats = [file.stat() for file in files]
        return cls(sum(s.st_size for s in stats), max((s.st_mtime_ns for s in stats), default=0))


class Shard(NamedTuple):
    """A range of rows of a file, or the sets of a state file."""

    input: Input
    stamp: Stamp
    start: int
    stop: int | None  # None if the number of rows is not known
    share: float  # fraction of the file
    holds_states: bool = False

    @property
    def bytes(self) -> float:
        """The size of the shard on disk."""
        return self.share * self.stamp.bytes


class Skipped(NamedTuple):
    """A row, file or set that was skipped, and why."""

    file: str | None  # None for a set
    row: int | None  # None for a whole file; where reading failed, the first row that is missing
    reason: str
    set: str | None = None  # the id of a set whose state or encoding is not finite


class Step(NamedTuple):
    """The result of some rows of a shard."""

    shard: int
    rows: int  # how many rows of the shard are done after this step
    tables: tuple[Table, ...]
    elements: int
    skipped: tuple[Skipped, ...] = ()


class Batch(NamedTuple):
    """Rows or states that were read but not processed yet."""

    shard: int
    rows: int
    content: Rows | StateTable | None
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class Task:
    """How shards become steps. It can be pickled and sent to other processes.

    Args:
        encoder: The encoder, in evaluation mode.
        columns: Which columns hold the features and the set id.
        width: The number of features of an element; None if it is not known.
        batch_rows: How many rows are processed at a time.
        skip: Whether to skip bad rows instead of raising an error.
        threads: How many threads process batches.
    """

    encoder: StreamingSetEncoder
    columns: ColumnSpec
    width: int | None
    batch_rows: int
    skip: bool
    threads: int = 1

    # The end of an error message about a set: what to do besides scaling the features.
    leave_out: ClassVar[str] = ", or leave out such sets with --on-error skip --restart"

    @cached_property
    def device(self) -> torch.device:
        """The device of the encoder."""
        return self.encoder.device

    @cached_property
    def parser(self) -> Columns | None:
        """The columns that the encoder parses itself."""
        return columns_of(self.encoder)

    @cached_property
    def dtypes(self) -> tuple[np.dtype, torch.dtype]:
        """The dtype in which elements are read, and the dtype that the encoder takes."""
        return element_dtypes(self.encoder)

    @cached_property
    def _valid(self) -> list[Validated]:
        """The columns of the last file."""
        return [Validated()]

    @cached_property
    def _room(self) -> Room:
        """Where elements are stored."""
        return Room()

    def steps(self, number: int, shard: Shard, done: int = 0) -> Iterator[Step]:
        """Yield the steps of a shard, except those for rows that are already done."""
        for batch in self.batches(number, shard, done):
            yield self.step(batch, shard)

    def batches(self, number: int, shard: Shard, done: int = 0) -> Generator[Batch, None, None]:
        """Read a shard, always from its start, because batch boundaries may depend on that."""
        if Stamp.of(shard.input.path) != shard.stamp:
            raise _changed_error(shard)
        position = 0
        try:
            for content in self._contents(shard):
                start = position
                position += len(content) if isinstance(content, StateTable) else content.read
                if start < done < position:
                    raise InputError(
                        f"cannot resume: the interrupted run read {shard.input.path} in other "
                        "batches. Start over with --restart."
                    )
                if position > done:
                    yield Batch(number, position, content)
        except FileError as error:
            if not self.skip or shard.holds_states:
                raise
            first, end = shard.start + position, shard.stop
            lost = f"rows {first} to {end - 1}" if end is not None else f"all rows from {first} on"
            entry = Skipped(str(shard.input.path), first, f"{lost} are skipped: {error}")
            if position >= done:
                # One row further, so that a resumed run does not list it again.
                yield Batch(number, position + 1, None, (entry,))
        if Stamp.of(shard.input.path) != shard.stamp:
            raise _changed_error(shard)

    def _contents(self, shard: Shard) -> Iterator[Rows | StateTable]:
        if shard.holds_states:
            yield from read_states(shard.input.path)
            return
        for _, rows in self.read(shard, grouped=True):
            yield rows

    def read(
        self, shard: Shard, more: Sequence[str] = (), grouped: bool = False
    ) -> Iterator[tuple[pa.RecordBatch, Rows]]:
        """Yield the rows of a shard, as they are stored and as elements.

        Args:
            shard: A shard of rows.
            more: Columns that the batches have in addition to those that the elements need.
            grouped: Whether elements of a set may follow one another.
        """
        path, partition, _ = shard.input
        first, (dtype, _) = shard.start, self.dtypes
        numbers = self.columns.numbers(self.parser)
        with open_reader(path, self.columns.texts(self.parser), numbers) as reader:
            valid = self._valid[0]
            if not valid.holds(reader.schema, partition):
                names = self.columns.needed(reader.schema, partition, path, self.parser)
                valid = self._valid[0] = Validated(reader.schema, frozenset(partition), names)
            names = [*dict.fromkeys([*valid.names, *more])]
            for batch in reader.read(names, shard.start, shard.stop, rows=self.batch_rows):
                unread = reader.take_bad_rows()  # just before the batch
                first += len(unread)
                rows = rows_of(
                    batch,
                    self.columns,
                    first=first,
                    dtype=dtype,
                    width=self.width,
                    partition=partition,
                    parser=self.parser,
                    room=self._room,
                    grouped=grouped,
                )
                reasons = reader.take_reasons()
                bad = (BadRow(row, reasons.get(row, reason)) for row, reason in rows.bad)
                yield batch, replace(rows, bad=(*unread, *bad), read=rows.read + len(unread))
                first += batch.num_rows

    def step(self, batch: Batch, shard: Shard) -> Step:
        """Turn a batch into tables of states or rows.

        Raises:
            FileError: A row is bad, and bad rows are not skipped.
            NonFiniteError: The encoder overflows, although each element is fine on its own.
            InputError: The encoder raises an error that no single row causes.
        """
        if batch.content is None:
            return Step(batch.shard, batch.rows, (), 0, batch.skipped)
        if isinstance(batch.content, StateTable):
            seen = int(batch.content.count.sum())
            return Step(batch.shard, batch.rows, (batch.content,), seen)
        rows, path = batch.content, str(shard.input.path)
        skipped = [Skipped(path, bad.row, bad.reason) for bad in rows.bad]
        if skipped and not self.skip:
            raise self.bad_row_error(skipped[0])
        elements, sets = rows.elements, self.set_ids(rows, shard.input.name)
        empty = self._empty_sets(rows, shard.input.name)
        try:
            tables = self._absorb(sets, elements)
        except Exception as error:  # the encoder may contain any code
            if not blames_elements(error):
                raise
            wrong = self._find_unusable(rows)
            skipped += [Skipped(path, row, reason) for row, reason in wrong.items()]
            if wrong and not self.skip:
                raise self.bad_row_error(min(skipped, key=_row_number)) from error
            good = ~np.isin(rows.numbers, list(wrong))
            # A dictionary would keep the names of sets of which no element is left.
            elements, sets = elements[good], decoded(sets).filter(pa.array(good))
            tables = self._absorb_or_mark(rows, sets, elements, path)
        skipped.sort(key=_row_number)
        return Step(batch.shard, batch.rows, empty + tables, len(elements), tuple(skipped))

    def bad_row_error(self, bad: Skipped) -> SetfoldError:
        """Return the error for a bad row."""
        return FileError(
            f"{bad.file}, row {bad.row} (counting from 0): {bad.reason}. Correct the row, or skip "
            "bad rows with --on-error skip --restart."
        )

    def set_ids(self, rows: Rows, name: str) -> pa.Array:
        """Return the set id of each element: from the file, or the name of the file."""
        if rows.sets is not None:
            return self._qualify(rows.sets, name)
        places = pa.array(np.zeros(len(rows.elements), np.int32))
        return pa.DictionaryArray.from_arrays(places, pa.array([name], pa.large_string()))

    def _qualify(self, sets: pa.Array, name: str) -> pa.Array:
        """Return the set ids of the file or, where each row is a set, its name and the rows."""
        if self.columns.set is not None:
            return sets
        return pack([pa.repeat(pa.scalar(name, TEXT), len(sets)), sets])

    def _empty_sets(self, rows: Rows, name: str) -> tuple[Table, ...]:
        """Return the initial states of rows without elements, which are sets, too."""
        if rows.empty is None or not len(rows.empty):
            return ()
        names = self._qualify(rows.empty, name).unique()
        return (StateTable.of_state(names, self.encoder.initial_state(len(names)).to("cpu")),)

    def _absorb(self, sets: pa.Array, elements: np.ndarray) -> tuple[Table, ...]:
        if not len(elements):
            return ()
        return (absorbed(self.encoder, sets, self.to_tensor(elements)),)

    def _absorb_or_mark(
        self, rows: Rows, sets: pa.Array, elements: np.ndarray, path: str
    ) -> tuple[Table, ...]:
        """Absorb elements that are usable one by one. Sets that overflow are marked or raise."""
        try:
            return self._absorb(sets, elements)
        except NonFiniteError as error:
            table = absorb_or_mark(self.encoder, sets, self.to_tensor(elements))
            marks = find_marks(table)
            if not self.skip and marks.any():
                first, last = rows.numbers.min(), rows.numbers.max()
                name = self.columns.show_id(table.sets.filter(pa.array(marks))[0])
                raise NonFiniteError(
                    f"{path}, rows {first} to {last}: the elements of the set {name} are too large "
                    f"together. Scale the features{self.leave_out}."
                ) from error
            return (table,)
        except Exception as error:
            if not blames_elements(error):
                raise
            first, last = rows.numbers.min(), rows.numbers.max()
            raise InputError(
                f"{path}, rows {first} to {last}: {reason_of(error)}, but not for any of these "
                "rows alone. A model must treat each row on its own."
            ) from error

    def to_tensor(self, elements: np.ndarray) -> Tensor:
        """Return elements as a tensor with the dtype and on the device of the encoder."""
        if not elements.flags.writeable:  # Arrow owns it, and torch does not support read-only
            elements = elements.copy()
        return torch.from_numpy(elements).to(self.device, self.dtypes[1])

    def _find_unusable(self, rows: Rows) -> dict[int, str]:
        """Return the rows that the encoder cannot absorb, and why."""
        wrong = rows.find_non_finite()
        finite = ~np.isin(rows.numbers, list(wrong))
        numbers, elements = rows.numbers[finite], self.to_tensor(rows.elements[finite])
        for place, reason in find_unusable(self.encoder, elements).items():
            wrong.setdefault(int(numbers[place]), reason)
        return wrong


def _changed_error(shard: Shard) -> FileError:
    return FileError(
        f"{shard.input.path} has changed since this run began, so its rows may be counted wrongly. "
        "Make sure that nothing writes to it, then start over with --restart."
    )


def _row_number(skipped: Skipped) -> int:
    return skipped.row or 0
