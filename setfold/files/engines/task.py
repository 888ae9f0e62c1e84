"""What an engine is given to do: pieces of files in, tables of partial states out.

A step is the result of some rows, and of nothing else: whoever computes it twice gets the same, and
whoever loses it computes it again. No engine keeps anything between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from setfold.core.encoder import StreamingSetEncoder
from setfold.errors import FileError, NonFiniteError, SetfoldError
from setfold.files.columns import Columns
from setfold.files.inputs import Input
from setfold.files.readers import open_reader
from setfold.files.rows import BadRow, Rows, rows_of
from setfold.files.states import read_states
from setfold.files.tables.table import StateTable, Table, absorbed, element_dtypes
from setfold.files.tables.usable import usable_alone


class Stamp(NamedTuple):
    """By what a file is known to be the one that it was."""

    bytes: int
    modified: int  # nanoseconds

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """The stamp of a file, or of all files of a folder that is read as one."""
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        known = [file.stat() for file in files]
        return cls(sum(s.st_size for s in known), max((s.st_mtime_ns for s in known), default=0))


class Piece(NamedTuple):
    """Some rows of a file, or sets of a file of states."""

    input: Input
    stamp: Stamp
    start: int
    stop: int | None
    share: float  # of the file
    states: bool = False

    @property
    def bytes(self) -> float:
        """What of the file it is."""
        return self.share * self.stamp.bytes


class Skipped(NamedTuple):
    """What was left out of the result, and why."""

    file: str
    row: int | None  # None for a whole file; else this row, or all from here where reading ended
    reason: str


class Step(NamedTuple):
    """What some rows of a piece become."""

    piece: int
    rows: int  # of the piece, up to and with these
    tables: tuple[Table, ...]
    elements: int
    skipped: tuple[Skipped, ...] = ()


class Batch(NamedTuple):
    """What was read and is not absorbed yet."""

    piece: int
    rows: int
    content: Rows | StateTable | None
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class Task:
    """How pieces become steps; may be sent to another process.

    Args:
        encoder: in evaluation mode.
        columns: which columns of a file are what.
        width: of an element, where it is known.
        rows: that are absorbed at once.
        skip: whether what cannot be used is left out, rather than an error.
    """

    encoder: StreamingSetEncoder
    columns: Columns
    width: int | None
    rows: int
    skip: bool

    @property
    def device(self) -> torch.device:
        """Where the encoder is."""
        return self.encoder.initial_state(0).device

    def steps(self, number: int, piece: Piece, done: int = 0) -> Iterator[Step]:
        """The steps of a piece, without those for rows that are done."""
        for batch in self.batches(number, piece, done):
            yield self.step(batch, piece)

    def batches(self, number: int, piece: Piece, done: int = 0) -> Iterator[Batch]:
        """Read a piece. It is always read from its start: where batches are cut may depend on that."""
        if Stamp.of(piece.input.path) != piece.stamp:
            raise _changed(piece)
        position = 0
        try:
            for content in self._contents(piece):
                position += len(content) if isinstance(content, StateTable) else content.read
                if position > done:
                    yield Batch(number, position, content)
        except FileError as error:
            if not self.skip or piece.states:
                raise
            first, end = piece.start + position, piece.stop
            lost = f"rows {first} to {end - 1}" if end is not None else f"all rows from {first} on"
            place = Skipped(str(piece.input.path), first, f"{lost} are left out: {error}")
            if (
                position >= done
            ):  # one row further, so that a run that goes on does not list it again
                yield Batch(number, position + 1, None, (place,))
        if Stamp.of(piece.input.path) != piece.stamp:
            raise _changed(piece)

    def _contents(self, piece: Piece) -> Iterator[Rows | StateTable]:
        path, partition = piece.input
        if piece.states:
            yield from read_states(path)
            return
        first, (dtype, _) = piece.start, element_dtypes(self.encoder)
        with open_reader(path, self.columns.set, self.columns.named) as reader:
            names = self.columns.needed(reader.schema, partition, path)
            for batch in reader.read(names, piece.start, piece.stop, rows=self.rows):
                unread = tuple(BadRow(*bad) for bad in reader.take_bad())  # just before the batch
                first += len(unread)
                rows = rows_of(
                    batch,
                    self.columns,
                    first=first,
                    dtype=dtype,
                    width=self.width,
                    partition=partition,
                )
                told = reader.take_reasons()
                bad = (BadRow(row, told.get(row, reason)) for row, reason in rows.bad)
                yield replace(rows, bad=(*unread, *bad), read=rows.read + len(unread))
                first += batch.num_rows

    def step(self, batch: Batch, piece: Piece) -> Step:
        """Absorb what was read."""
        if batch.content is None:
            return Step(batch.piece, batch.rows, (), 0, batch.skipped)
        if isinstance(batch.content, StateTable):
            seen = int(batch.content.state.count.sum())
            return Step(batch.piece, batch.rows, (batch.content,), seen)
        rows, path = batch.content, str(piece.input.path)
        skipped = [Skipped(path, bad.row, bad.reason) for bad in rows.bad]
        if skipped and not self.skip:
            raise _bad_row(skipped[0])
        elements, sets = rows.elements, self._sets(rows, path)
        empty = self._empty(rows, path)
        try:
            tables = self._absorbed(sets, elements)
        except NonFiniteError:
            wrong = self._unusable(rows)
            skipped += [Skipped(path, row, reason) for row, reason in wrong.items()]
            if wrong and not self.skip:
                raise _bad_row(min(skipped, key=_place)) from None
            good = ~np.isin(rows.numbers, list(wrong))
            elements, sets = elements[good], sets.filter(pa.array(good))
            try:
                tables = self._absorbed(sets, elements)
            except NonFiniteError as error:  # each is fine alone
                first, last = rows.numbers[[0, -1]]
                raise NonFiniteError(f"{path}, rows {first} to {last}: {error}") from error
        skipped.sort(key=_place)
        return Step(batch.piece, batch.rows, empty + tables, len(elements), tuple(skipped))

    def _sets(self, rows: Rows, path: str) -> pa.Array:
        """The set of each element: as the file says, or the file itself, or its row."""
        if rows.sets is not None:
            return self._named(rows.sets, path)
        places = pa.array(np.zeros(len(rows.elements), np.int32))
        return pa.DictionaryArray.from_arrays(places, pa.array([path], pa.large_string()))

    def _named(self, sets: pa.Array, path: str) -> pa.Array:
        """Sets as the file names them, or, where each row is one, by file and row."""
        if self.columns.set is not None:
            return sets
        numbers = sets.cast(pa.large_string())
        start, colon = (pa.scalar(text, pa.large_string()) for text in (path, ":"))
        return pc.binary_join_element_wise(start, numbers, colon)

    def _empty(self, rows: Rows, path: str) -> tuple[Table, ...]:
        """The sets of rows that hold no elements: they have an encoding all the same."""
        if rows.empty is None or not len(rows.empty):
            return ()
        names = self._named(rows.empty, path).unique()
        return (StateTable(names, self.encoder.initial_state(len(names)).to("cpu")),)

    def _absorbed(self, sets: pa.Array, elements: np.ndarray) -> tuple[Table, ...]:
        if not len(elements):
            return ()
        return (absorbed(self.encoder, sets, self._given(elements)),)

    def _given(self, elements: np.ndarray) -> Tensor:
        """Elements as the encoder takes them, where it is."""
        if not elements.flags.writeable:  # Arrow's own, which torch must not see
            elements = elements.copy()
        _, dtype = element_dtypes(self.encoder)
        return torch.from_numpy(elements).to(self.device, dtype)

    def _unusable(self, rows: Rows) -> dict[int, str]:
        """The rows of which the encoder makes NaN or infinity, and why; all of one that is exploded."""
        finite = np.isfinite(rows.elements).all(tuple(range(1, rows.elements.ndim)))
        wrong = dict.fromkeys(rows.numbers[~finite].tolist(), "a number is NaN or infinite")
        alone = usable_alone(self.encoder, self._given(rows.elements[finite])).numpy()
        for row in rows.numbers[finite][~alone].tolist():
            wrong.setdefault(row, "its numbers are too large for the model")
        return wrong


def _changed(piece: Piece) -> FileError:
    return FileError(
        f"{piece.input.path} has changed since this run began, so its rows may be counted wrongly. Begin anew "
        "(--restart), when nothing writes to it any more."
    )


def _place(bad: Skipped) -> int:
    return bad.row or 0


def _bad_row(bad: Skipped) -> SetfoldError:
    return FileError(
        f"{bad.file}, row {bad.row} (the first is row 0): {bad.reason}. Mend it, or leave out what cannot be used: "
        "--on-error skip --restart."
    )
