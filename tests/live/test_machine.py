"""Random histories of a store, against a list of rows that are encoded anew."""

from __future__ import annotations

import os
from itertools import count
from typing import NamedTuple

import pyarrow as pa
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import setfold
from setfold import live
from setfold.errors import BatchConflictError, InputError
from tests.live.rows import HOUR

NAMES = ("ann", "bob", "eve")
WINDOW = 4  # hours
EXAMPLES = 150 if os.environ.get("SETFOLD_STRESS") else 12
MODELS = (
    lambda: setfold.SlotSetEncoder(2, 3, 4, 4),
    lambda: setfold.Concat([setfold.Pool(2, ["mean", "max"]), setfold.AttentionPool(2, 2, 4)]),
    lambda: setfold.Pool(2, ["sum", "min"]),
)


class Row(NamedTuple):
    name: str
    hour: int
    x: float
    y: float


NUMBERS = st.integers(-3, 3).map(float)
AGES = st.integers(-1, WINDOW + 2)  # how old a row is, in hours
ROWS = st.lists(st.tuples(st.sampled_from(NAMES), AGES, NUMBERS, NUMBERS), min_size=1, max_size=6)
WRITERS = st.integers(0, 1)


def as_table(rows):
    name, hour, x, y = zip(*rows, strict=True)
    at = [HOUR * number + 7 for number in hour]
    return pa.table({"user": name, "at": at, "x": x, "y": y})


def put(store, rows, batch, history=False):
    options = {"set": "user", "batch": ("orders", batch), "time": "at", "features": ["x", "y"]}
    return (store.fill if history else store.update)(as_table(rows), **options)


def changed(rows):
    return [rows[0]._replace(x=rows[0].x + 1), *rows[1:]]


class Given(NamedTuple):
    """A batch: its rows, when the store got it, and which models got it alone."""

    rows: list[Row]
    order: int | None
    filled: set[int]


class Model:
    """A model of the store: its encoder, when it was added, and the rows that it has seen."""

    def __init__(self, kind, since):
        torch.manual_seed(kind)
        self.kind, self.since, self.kept = kind, since, []
        self.encoder = MODELS[kind]().double().eval()


class Machine(RuleBasedStateMachine):
    """A store that two programs use, and what it should hold.

    `deletions` are the hour of each, and its place in the order of all changes.
    """

    new_url = None
    clock = None

    def __init__(self):
        super().__init__()
        self.clock.time = 1_000_000 * HOUR + 1800
        self.url, self.numbers = self.new_url(), count()
        self.models, self.active, self.order = {1: Model(0, 0)}, 1, 0
        self.batches, self.deletions, self.horizon = [], {}, None
        first = self.models[1].encoder
        live.create(self.url, first, bucket="1h", window=f"{WINDOW}h").close()
        self.stores = [live.open(self.url) for _ in range(2)]

    def next(self):
        self.order += 1
        return self.order

    @property
    def hour(self):
        return int(self.clock.time) // HOUR

    def late(self, row):
        return self.horizon is not None and row.hour < self.horizon

    def deleted(self, row, order=None):
        """Whether a row comes too late for its set; of a batch that is new, or from before."""
        hour, at = self.deletions.get(row.name, (row.hour, 0))
        return not self.late(row) and (row.hour < hour or (order is not None and order < at))

    def admitted(self, rows, order=None):
        """Return the rows that count, and what the store should say."""
        left = [row for row in rows if not self.late(row) and not self.deleted(row, order)]
        late = sum(map(self.late, rows))
        sets = len({row.name for row in left})
        return left, live.Applied("applied", len(left), sets, late, len(rows) - len(left) - late)

    # ---- updates -------------------------------------------------------------------------------

    @rule(writer=WRITERS, drawn=ROWS)
    def update(self, writer, drawn):
        rows = [Row(name, self.hour - age, x, y) for name, age, x, y in drawn]
        left, expected = self.admitted(rows)
        assert put(self.stores[writer], rows, len(self.batches)) == expected
        self.batches.append(Given(rows, self.next(), set()))
        for model in self.models.values():
            model.kept += left

    @rule(writer=WRITERS, data=st.data())
    def replay(self, writer, data):
        if self.batches:
            number = data.draw(st.integers(0, len(self.batches) - 1))
            batch, store = self.batches[number], self.stores[writer]
            if batch.order is not None or batch.filled:
                with pytest.raises(BatchConflictError):
                    put(store, changed(batch.rows), number)
            if batch.order is None:
                self.update_with_history(store, number)
            assert put(store, batch.rows, number).status == "duplicate"

    def update_with_history(self, store, number):
        """A batch comes that some models have already, as history."""
        batch = self.batches[number]
        left, expected = self.admitted(batch.rows)
        status = "duplicate" if self.active in batch.filled else "applied"
        assert put(store, batch.rows, number) == expected._replace(status=status)
        self.batches[number] = batch._replace(order=self.next())
        for model in self.models.keys() - batch.filled:
            self.models[model].kept += left

    @rule(writer=WRITERS, drawn=ROWS, bad=st.sampled_from([float("nan"), float("inf"), None]))
    def bad_row(self, writer, drawn, bad):
        rows = [Row(name, self.hour - age, x, y) for name, age, x, y in drawn]
        kept = Row("ann", self.hour + 1, bad, 0.0)  # bad rows that are late do not matter
        with pytest.raises(InputError):
            put(self.stores[writer], [*rows, kept], len(self.batches))

    # ---- other changes -------------------------------------------------------------------------

    @rule(writer=WRITERS, names=st.sets(st.sampled_from(NAMES), min_size=1))
    def delete(self, writer, names):
        found = self.stores[writer].delete(sorted(names))
        assert found == sum(row.name in names for row in self.models[self.active].kept)
        if self.batches:  # the ids of a store are known after the first batch
            self.deletions |= dict.fromkeys(names, (self.hour, self.next()))
        self.keep(lambda row: row.name not in names)

    @rule(writer=WRITERS)
    def expire(self, writer):
        first = self.hour - WINDOW + 1
        self.horizon = max(first, self.horizon or first)
        gone = {
            (number, row.name, row.hour)
            for number, model in self.models.items()
            for row in model.kept
            if row.hour < self.horizon
        }
        assert self.stores[writer].expire() == len(gone)
        self.keep(lambda row: row.hour >= self.horizon)

    def keep(self, condition):
        for model in self.models.values():
            model.kept = [row for row in model.kept if condition(row)]

    # ---- models --------------------------------------------------------------------------------

    @rule(writer=WRITERS, kind=st.integers(0, len(MODELS) - 1))
    def add(self, writer, kind):
        new = Model(kind, self.next())
        if kind in {model.kind for model in self.models.values()}:
            with pytest.raises(InputError, match="has this model already"):
                self.stores[writer].add_model(new.encoder)
        else:
            number = self.stores[writer].add_model(new.encoder)
            assert number == max(self.models) + 1
            self.models[number] = new

    @rule(writer=WRITERS, drawn=ROWS, data=st.data())
    def fill(self, writer, drawn, data):
        """History: a batch from before, or one that the store has never seen."""
        store, others = self.stores[writer], self.models.keys() - {self.active}
        number = data.draw(st.integers(0, len(self.batches)))
        if number == len(self.batches):
            rows = [Row(name, self.hour - age, x, y) for name, age, x, y in drawn]
            if not others:
                with pytest.raises(InputError, match="no model besides"):
                    put(store, rows, number, history=True)
                return
            self.batches.append(Given(rows, None, set()))
        batch = self.batches[number]
        lacking = {
            other
            for other in others - batch.filled
            if batch.order is None or batch.order <= self.models[other].since
        }
        if others:
            left, expected = self.admitted(batch.rows, batch.order or 0)
            found = put(store, batch.rows, number, history=True)
            assert found == (expected if lacking else live.Applied("duplicate"))
            for other in lacking:
                self.models[other].kept += left
            batch.filled.update(lacking)
            if batch.order is not None or batch.filled:
                with pytest.raises(BatchConflictError):
                    put(store, changed(batch.rows), number, history=True)

    @rule(writer=WRITERS, data=st.data())
    def switch(self, writer, data):
        self.active = data.draw(st.sampled_from(sorted(self.models)))
        self.stores[writer].switch(self.active)

    @rule(writer=WRITERS, data=st.data())
    def drop(self, writer, data):
        number = data.draw(st.sampled_from(sorted(self.models)))
        if number == self.active:
            with pytest.raises(InputError, match="is active"):
                self.stores[writer].drop_model(number)
        else:
            self.stores[writer].drop_model(number)
            del self.models[number]
            for batch in self.batches:
                batch.filled.discard(number)

    # ---- time, and programs that begin again ---------------------------------------------------

    @rule(hours=st.integers(-1, 3))
    def wait(self, hours):
        self.clock.time += hours * HOUR

    @rule(writer=WRITERS)
    def reopen(self, writer):
        self.stores[writer].close()
        self.stores[writer] = live.open(self.url)

    # ---- reading -------------------------------------------------------------------------------

    @rule(reader=WRITERS, last=st.sampled_from([None, 1, 2, 9]))
    def look(self, reader, last):
        encoder, names = self.models[self.active].encoder, [*NAMES, "nobody"]
        own = {name: [] for name in names}
        for row in self.models[self.active].kept:
            if last is None or row.hour > self.hour - last:
                own[row.name].append(row[2:])
        options = {} if last is None else {"last": f"{last}h"}
        assert self.stores[reader].count(names, **options) == [len(own[name]) for name in names]
        with torch.no_grad():
            rows = [torch.tensor(own[name], dtype=torch.float64).reshape(-1, 2) for name in names]
            expected = torch.cat([encoder(elements.unsqueeze(0)) for elements in rows])
        found = self.stores[reader].encode(names, **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    def teardown(self):
        try:
            self.look(0, None)
            self.look(1, 2)
        finally:
            for store in self.stores:
                store.close()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_random_histories(request, tmp_path, clock, kind):
    numbers = count()
    if kind == "postgres":
        new_url = request.getfixturevalue("server").url
    else:
        new_url = lambda: str(tmp_path / f"{next(numbers)}.db")  # noqa: E731
    machine = type("Machine", (Machine,), {"new_url": staticmethod(new_url), "clock": clock})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=25, deadline=None)
    )
