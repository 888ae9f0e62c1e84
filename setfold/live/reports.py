"""What a store holds, and whether it is intact."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import pyarrow as pa

from setfold.errors import SetfoldError, StoreError
from setfold.files.ids import unpack
from setfold.live.database import StateRow, Transaction
from setfold.live.merging import states_at_once
from setfold.live.models import LiveModel, open_models
from setfold.live.names import NO_IDS, SetIds
from setfold.live.opened import OpenStore
from setfold.live.times import SECOND, format_duration

MAX_SHOWN = 20  # problems with states that are listed


class ModelTotals(NamedTuple):
    """A model of a store, and what it has.

    Attributes:
        number: Its number in the store.
        kind: The name of its class.
        active: Whether it is the one that is read.
        sets: The number of sets.
        states: The number of states: one for each set and bucket.
        elements: The number of elements.
        bytes: The size of the states, without what the database adds.
    """

    number: int
    kind: str
    active: bool
    sets: int
    states: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Info:
    """What a store holds.

    Args:
        url: Where it is.
        database: Which database holds it.
        ids: The columns of a set id, with their types; None before the first update.
        bucket: The size of a bucket of time, such as "1d"; None without buckets.
        window: When buckets expire.
        batches: How many batches were applied, apart from those with offsets.
        positions: For each source with offsets, where its parts continue.
        deletions: How many sets were deleted.
        updated: When the last update was; None if there was none.
        models: The models, the active one first.
    """

    url: str
    database: str
    ids: dict[str, str] | None
    bucket: str | None
    window: str | None
    batches: int
    positions: dict[str, dict[str, int]]
    deletions: int
    updated: datetime | None
    models: tuple[ModelTotals, ...]


class Verified(NamedTuple):
    """What was verified.

    Attributes:
        states: The number of states that were read.
        problems: What is wrong, a sentence each; empty if the store is intact.
    """

    states: int
    problems: tuple[str, ...]


class Reporting(OpenStore):
    """The part of `LiveSets` that describes and verifies the store."""

    def info(self) -> Info:
        """Return what the store holds. All states are counted, which takes time in a large store."""
        with self._snapshot() as view:
            models = self._refresh(view)
            batches, last = view.count_updates()
            totals = [
                ModelTotals(
                    model.number,
                    type(model.encoder).__name__,
                    model.row.active,
                    *view.totals(model.number),
                )
                for model in models
            ]
            positions: dict[str, dict[str, int]] = {}
            for (source,) in view.run("SELECT DISTINCT source FROM positions ORDER BY source"):
                positions[source] = view.positions(source)
            ((deletions,),) = view.run("SELECT COUNT(*) FROM deletions")
        return Info(
            url=self.database.shown,
            database=self.database.kind,
            ids=self.ids,
            bucket=None if self.bucket is None else format_duration(self.bucket),
            window=None if self.window is None else format_duration(self.window),
            batches=batches,
            positions=positions,
            deletions=int(deletions),
            updated=None if last is None else datetime.fromtimestamp(last / SECOND, UTC),
            models=tuple(totals),
        )

    def verify(self) -> Verified:
        """Check the database, the models, and the checksum of every state."""
        problems = [f"the database reports: {text}" for text in self.database.check()]
        states = 0
        with self._snapshot() as view:
            ids = SetIds.of(view) or NO_IDS
            rows = view.models()
            if [row.active for row in rows].count(True) != 1:
                problems.append("not exactly one model is active")
            for row in rows:
                given = self.given if row.active and not row.content else None
                try:
                    (model,) = open_models([row], given, self.allow)
                except SetfoldError as error:
                    problems.append(f"model {row.number} cannot be loaded: {error}")
                    continue
                found, wrong = _verify_states(view, model, ids)
                states, problems = states + found, problems + wrong
            numbers = {row.number for row in rows}
            for (number,) in view.run("SELECT DISTINCT model FROM states"):
                if number not in numbers:
                    problems.append(f"there are states of model {number}, which does not exist")
        return Verified(states, tuple(problems))


def _verify_states(view: Transaction, model: LiveModel, ids: SetIds) -> tuple[int, list[str]]:
    """Return the number of states of a model, and what is wrong with them."""
    states, damaged = 0, list[StateRow]()
    for rows in view.scan(model.number, None, states_at_once(model)):
        states += len(rows)
        wrong = model.codec.find_damaged(rows)
        damaged += wrong or _find_unreadable(rows, model, ids)
    problems = [_describe(row, model, ids) for row in damaged[:MAX_SHOWN]]
    if len(damaged) > MAX_SHOWN:
        problems.append(f"and {len(damaged) - MAX_SHOWN} more states of model {model.number}")
    return states, problems


def _find_unreadable(rows: list[StateRow], model: LiveModel, ids: SetIds) -> list[StateRow]:
    """Return rows whose checksum is right, but which are not states of such sets."""
    try:
        model.codec.to_table(rows)
        unpack(pa.array([row.name for row in rows], pa.large_binary()), ids.kinds)
    except (StoreError, ValueError, pa.ArrowException):
        if len(rows) == 1:
            return rows
        return [bad for row in rows for bad in _find_unreadable([row], model, ids)]
    return [row for row in rows if row.count < 0]


def _describe(row: StateRow, model: LiveModel, ids: SetIds) -> str:
    try:
        name = ids.show(row.name)
    except ValueError:
        name = repr(row.name)
    where = f"of the set {name}, bucket {row.bucket}, model {model.number}"
    return (
        f"the state {where} is damaged. Delete the set and add its rows again, or restore a backup"
    )
