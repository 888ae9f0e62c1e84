"""Files as batches: the identity of a file is the digest of its content."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from glob import has_magic
from pathlib import Path

import pyarrow as pa

from setfold.errors import FileError, InputError, SetfoldError
from setfold.files.budget import current_memory
from setfold.files.engines.task import Stamp
from setfold.files.ids import TEXT
from setfold.files.inputs import Input, file_of, find_inputs, open_reader
from setfold.files.kinds import regrouped
from setfold.files.readers.reader import Reader, split_tree
from setfold.files.run import Progress
from setfold.live.batches import Identity, Layout
from setfold.live.contents import digest_of_file
from setfold.live.sources.intake import Intake, SourceFrame
from setfold.preprocessing.columns import Columns

SOURCE = "files"  # unless the user names it


class FileFrame(SourceFrame):
    """The rows of a file.

    Args:
        found: The file.
        stamp: Its stamp, when its content was digested.
        layout: How its rows are read.
        parsers: The columns of models that read their own.
        on_rows: Callback that is called with the share of the file that was read.
    """

    def __init__(
        self,
        found: Input,
        stamp: Stamp,
        layout: Layout,
        parsers: Sequence[Columns],
        on_rows: Callable[[float], None],
    ) -> None:
        self.path, self.stamp, self.layout, self.on_rows = found.path, stamp, layout, on_rows
        columns = layout.columns
        self.texts = {name for parser in [None, *parsers] for name in columns.texts(parser)}
        self.numbers = {name for parser in [None, *parsers] for name in columns.numbers(parser)}
        self.folders = {
            name: found.partition[name] for name in columns.set_names if name in found.partition
        }
        super().__init__(found, layout.skip)

    def _open(self) -> None:
        with self._reader() as reader:
            self.schema = reader.schema
        self.folders = {
            name: value for name, value in self.folders.items() if name not in self.schema.names
        }
        for name in self.folders:
            self.schema = self.schema.append(pa.field(name, TEXT))

    def _reader(self) -> Reader:
        return open_reader(self.path, self.texts, self.numbers)

    def place_of(self, row: int) -> str:
        return f"{self.path}, row {row} (counting from 0)"

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield from regrouped(self._read(names), self.rows)
        if Stamp.of(self.path) != self.stamp:
            raise FileError(
                f"{self.path} has changed while it was read. Nothing of it was applied. Make sure "
                "that nothing writes to it, and try again."
            )

    def _read(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        stored, row = [name for name in names if name not in self.folders], 0
        with self._reader() as reader:
            reader.check(stored)
            for batch in reader.read(stored, rows=self.rows):
                for bad in reader.take_bad_rows():
                    self.refuse(*bad)
                if not self.skip:
                    self.reasons |= reader.take_reasons()
                row += batch.num_rows
                for name, value in self.folders.items():
                    column = pa.repeat(pa.scalar(value, TEXT), batch.num_rows)
                    batch = batch.append_column(name, column)
                yield batch.select(list(names))
                self.on_rows(min(1.0, row / reader.num_rows) if reader.num_rows else 0.5)


class FileSource:
    """Applies files, each of them once.

    Args:
        intake: What takes their rows.
        source: The name of the source, which is part of the identity of its files.
        progress: Callback that is called while files are read.
        on_error: Callback that is called with the error of a file that is skipped; if None, the
            error is raised.

    Attributes:
        unreadable: How many files were skipped.
    """

    def __init__(
        self,
        intake: Intake,
        source: str | None = None,
        progress: Callable[[Progress], None] | None = None,
        on_error: Callable[[SetfoldError], None] | None = None,
    ) -> None:
        self.intake, self.source = intake, source or SOURCE
        self.progress, self.on_error, self.unreadable = progress, on_error, 0
        self.started, self.done, self.total = time.monotonic(), 0, 0

    def find(self, names: Sequence[str | Path]) -> list[Input]:
        """Return the files that names refer to."""
        return find_inputs(names, keys=self.intake.layout.columns.set_names)

    def apply(self, files: Sequence[Input]) -> None:
        """Apply files.

        Raises:
            FileError: A file cannot be read.
            InputError: A row is bad, or a column is missing.
        """
        sizes = [Stamp.of(found.path).bytes for found in files]
        self.done, self.total, self.started = 0, sum(sizes), time.monotonic()
        for found, size in zip(files, sizes, strict=True):
            try:
                self.apply_file(found)
            except (FileError, InputError) as error:
                if self.on_error is None:
                    raise
                self.unreadable += 1
                self.on_error(error)
            self.done += size

    def apply_file(self, found: Input) -> None:
        """Apply a file, unless it was applied before."""
        stamp = Stamp.of(found.path)
        identity = self.identity_of(found)
        if not self.intake.history and self.intake.knows(identity):
            self.intake.duplicates += 1
            return

        def report(share: float) -> None:
            if self.progress is not None:
                done, seconds = self.done + share * stamp.bytes, time.monotonic() - self.started
                rows, total = self.intake.rows, max(self.total, stamp.bytes)
                self.progress(Progress("reading", done, total, rows, seconds, current_memory()))

        parsers = self.intake.parsers()
        with_columns = FileFrame(found, stamp, self.intake.layout, parsers, report)
        if with_columns.schema.names:  # JSON lines have columns only if there is a line
            self.intake.apply(with_columns, identity)

    def identity_of(self, found: Input) -> Identity:
        """Return the identity of a file: its content, and set ids that are in its path."""
        file, tree = split_tree(found.path)
        keys = [found.partition.get(key) for key in self.intake.layout.columns.set_names]
        more = [part for part in (tree, *keys) if part]
        return Identity.of((self.source, digest_of_file(file).hex(), *more))


def watch(
    source: FileSource, names: Sequence[str | Path], seconds: float, stop: threading.Event
) -> None:
    """Apply files when they are complete, until an event is set.

    A file is complete if its size and modification time are the same in two looks. Files whose
    names begin with "." or "_" are ignored.

    Args:
        source: What applies files.
        names: Files, folders and glob patterns.
        seconds: The time between two looks.
        stop: The event.
    """
    before: dict[str, Stamp] = {}
    applied: dict[str, Stamp] = {}
    while not stop.is_set():
        now: dict[str, Stamp] = {}
        for found in _present(source, names):
            key = os.path.realpath(file_of(found.path)) + str(split_tree(found.path)[1] or "")
            try:
                now[key] = Stamp.of(found.path)
            except FileNotFoundError:
                continue
            is_new = now[key] == before.get(key) != applied.get(key)
            if is_new and not stop.is_set() and _apply_complete(source, found, now[key]):
                applied[key] = now[key]
        before = now
        stop.wait(seconds)


def _present(source: FileSource, names: Sequence[str | Path]) -> list[Input]:
    """Return the files that names refer to now; a folder may be empty."""
    found: list[Input] = []
    for name in names:
        try:
            found += source.find([name])
        except InputError:
            if not (Path(name).is_dir() or has_magic(str(name))):
                raise
    return found


def _apply_complete(source: FileSource, found: Input, stamp: Stamp) -> bool:
    """Apply a file, and return whether it stayed the same meanwhile."""
    try:
        source.apply([found])
    except (FileError, FileNotFoundError):
        if _stays(found, stamp):
            raise
    return _stays(found, stamp)


def _stays(found: Input, stamp: Stamp) -> bool:
    try:
        return Stamp.of(found.path) == stamp
    except FileNotFoundError:
        return False
