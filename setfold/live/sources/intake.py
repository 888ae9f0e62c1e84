"""What all sources share: frames that explain bad rows, and what became of the batches."""

from __future__ import annotations

import re
import signal
import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from setfold.errors import BatchConflictError, InputError
from setfold.files.kinds import Frame
from setfold.files.request import make_columns
from setfold.live.batches import SMALL_ROWS, Applied, Identity, Layout, Offsets
from setfold.live.ledger import ChangedError
from setfold.live.names import SetIds
from setfold.live.sets import TRIES, LiveSets
from setfold.preprocessing.columns import Columns, columns_of

BAD_ROW = re.compile(r"row (\d+) \(counting from 0\): (.*?)\.( Remove such rows first\.)?")


class SourceFrame(Frame):
    """Rows of a source, which can be read several times.

    Args:
        frame: Where they are.
        skip: Whether rows that cannot be parsed are skipped.

    Attributes:
        skipped: How many rows were skipped when they were read last.
    """

    def __init__(self, frame: object, skip: bool) -> None:
        self.skip, self.skipped = skip, 0
        self.reasons: dict[int, str] = {}  # why values are null that are not null in the source
        super().__init__(frame, SMALL_ROWS)

    @abstractmethod
    def place_of(self, row: int) -> str:
        """Return where a row is, for messages."""

    def refuse(self, row: int, reason: str) -> None:
        """Skip a row that cannot be parsed, or raise InputError."""
        if not self.skip:
            raise self.bad_row_error(row, reason)
        self.skipped += 1

    def bad_row_error(self, row: int, reason: str) -> InputError:
        """Return the error about a bad row."""
        return InputError(
            f"{self.place_of(row)}: {reason}. Correct it, or skip bad rows with --on-error skip."
        )

    def explain(self, error: InputError) -> InputError:
        """Return an error about a row with the place of the row in the source."""
        found = BAD_ROW.fullmatch(str(error))
        if found is None:
            return error
        row = int(found[1])
        return self.bad_row_error(row, self.reasons.get(row, found[2]))


@dataclass
class Intake:
    """Takes the rows of a source into a store, and counts them.

    Args:
        sets: The store.
        set: The column that holds the set id of each row, or several.
        features: The columns to encode.
        time: The column that holds the time of each row.
        skip: Whether bad rows are skipped.
        history: Whether the rows are history for the models that are not active.

    Attributes:
        batches: How many batches were applied.
        duplicates: How many batches were applied before.
        rows: How many rows count now.
        late: How many rows came too late.
        deleted: How many rows are of sets that were deleted after them.
        skipped: How many rows were skipped.
    """

    sets: LiveSets
    set: str | Sequence[str]
    features: str | Sequence[str] | None = None
    time: str | None = None
    skip: bool = False
    history: bool = False
    batches: int = 0
    duplicates: int = 0
    rows: int = 0
    late: int = 0
    deleted: int = 0
    skipped: int = 0
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        columns = make_columns(self.set, self.features, False, None)
        self.layout = Layout(columns, self.time, self.sets.bucket, self.skip)

    def apply(self, frame: SourceFrame, identity: Identity | Offsets) -> Applied:
        """Apply a batch, and count what becomes of it."""
        found = self._apply(frame, identity)
        if found.status == "duplicate":
            self.duplicates += 1
            return found
        found = found._replace(skipped=found.skipped + frame.skipped)
        self.batches += 1
        self.rows += found.rows
        self.late += found.late
        self.deleted += found.deleted
        self.skipped += found.skipped
        return found

    def _apply(self, frame: SourceFrame, identity: Identity | Offsets) -> Applied:
        for left in reversed(range(TRIES)):
            frame.skipped = 0
            try:
                if self.history:
                    assert isinstance(identity, Identity)
                    return self.sets._fill(frame, identity, self.layout)
                return self.sets._update(frame, identity, self.layout)
            except ChangedError:
                if not left:
                    raise
            except BatchConflictError:
                raise
            except InputError as error:
                raise frame.explain(error) from error
        raise AssertionError

    def knows(self, identity: Identity) -> bool:
        """Whether a batch was applied to the store before, whatever its rows."""
        with self.sets.database.reading() as view:
            return identity in view.find_batches([identity])

    def parsers(self) -> list[Columns]:
        """Return the columns of those models that read their own."""
        with self.sets.database.reading() as view:
            models = self.sets._refresh(view)
        found = (columns_of(model.encoder) for model in models)
        return [parser for parser in found if parser is not None]

    def id_types(self) -> dict[str, pa.DataType]:
        """Return the types of the columns of a set id, as far as they are known."""
        with self.sets.database.reading() as view:
            ids = SetIds.of(view)
        names = self.layout.columns.set_names
        if ids is None or len(ids.types) != len(names):
            return {}
        return dict(zip(names, ids.kinds, strict=True))


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """Return a context in which SIGTERM and Ctrl-C set an event; the second one ends the process."""
    stop, before = threading.Event(), dict[signal.Signals, Any]()

    def note(*_: object) -> None:
        stop.set()
        for number, handler in before.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
