"""Random histories of a store, against a list of rows that are encoded anew."""

from __future__ import annotations

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
from tests.live.test_stores import add_model

NAMES = ("ann", "bob", "eve")
WINDOW = 4  # hours
MODELS = (
    lambda: setfold.SlotSetEncoder(2, 3, 4, 4),
    lambda: setfold.Concat([setfold.Pool(2, ["mean", "max"]), setfold.AttentionPool(2, 2, 4)]),
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


def put(store, rows, batch):
    options = {"set": "user", "batch": ("orders", batch), "time": "at", "features": ["x", "y"]}
    return store.update(as_table(rows), **options)


class Machine(RuleBasedStateMachine):
    """A store that two programs use, and what it should hold.

    `kept` are the rows of each model that count.
    """

    new_url = None
    clock = None

    def __init__(self):
        super().__init__()
        self.clock.time = 1_000_000 * HOUR + 1800
        self.url, self.numbers = self.new_url(), count()
        self.encoders, self.kept, self.active = [self.encoder(0)], [[]], 0
        self.batches, self.deletions, self.horizon = [], {}, None
        live.create(self.url, self.encoders[0], bucket="1h", window=f"{WINDOW}h").close()
        self.stores = [live.open(self.url) for _ in range(2)]

    def encoder(self, number):
        torch.manual_seed(number)
        return MODELS[number]().double().eval()

    @property
    def hour(self):
        return int(self.clock.time) // HOUR

    def late(self, row):
        return self.horizon is not None and row.hour < self.horizon

    def deleted(self, row):
        return not self.late(row) and row.hour < self.deletions.get(row.name, row.hour)

    # ---- updates -------------------------------------------------------------------------------

    @rule(writer=WRITERS, drawn=ROWS)
    def update(self, writer, drawn):
        rows = [Row(name, self.hour - age, x, y) for name, age, x, y in drawn]
        left = [row for row in rows if not self.late(row) and not self.deleted(row)]
        late, deleted = sum(map(self.late, rows)), sum(map(self.deleted, rows))
        found = put(self.stores[writer], rows, len(self.batches))
        sets = len({row.name for row in left})
        assert found == live.Applied("applied", len(left), sets, late, deleted)
        self.batches.append(rows)
        for kept in self.kept:
            kept += left

    @rule(writer=WRITERS, data=st.data())
    def replay(self, writer, data):
        if self.batches:
            number = data.draw(st.integers(0, len(self.batches) - 1))
            again = put(self.stores[writer], self.batches[number], number)
            assert again.status == "duplicate"
            other = [*self.batches[number]]
            other[0] = other[0]._replace(x=other[0].x + 1)
            with pytest.raises(BatchConflictError):
                put(self.stores[writer], other, number)

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
        assert found == sum(row.name in names for row in self.kept[self.active])
        if self.batches:  # the ids of a store are known after the first batch
            self.deletions |= dict.fromkeys(names, self.hour)
        self.keep(lambda row: row.name not in names)

    @rule(writer=WRITERS)
    def expire(self, writer):
        first = self.hour - WINDOW + 1
        self.horizon = max(first, self.horizon or first)
        gone = {
            (number, row.name, row.hour)
            for number, kept in enumerate(self.kept)
            for row in kept
            if row.hour < self.horizon
        }
        assert self.stores[writer].expire() == len(gone)
        self.keep(lambda row: row.hour >= self.horizon)

    def keep(self, condition):
        self.kept = [[row for row in kept if condition(row)] for kept in self.kept]

    @rule(writer=WRITERS)
    def change_model(self, writer):
        """Add a model, and switch between the two from then on."""
        if len(self.encoders) == 1:
            self.encoders.append(self.encoder(1))
            self.kept.append([])
            add_model(self.stores[writer], self.encoders[1])
        else:
            self.active = 1 - self.active
            with self.stores[writer].database.writing(alone=True) as transaction:
                transaction.activate(self.active + 1)
                transaction.begin_epoch()

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
        encoder, names = self.encoders[self.active], [*NAMES, "nobody"]
        own = {name: [] for name in names}
        for row in self.kept[self.active]:
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
        machine, settings=settings(max_examples=12, stateful_step_count=25, deadline=None)
    )
