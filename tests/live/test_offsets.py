"""Sources whose records are numbered: a batch counts if it continues where the store is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from setfold import live
from setfold.errors import BatchConflictError, InputError
from tests.live.events import NAMES, assert_holds, events, slots


@pytest.fixture
def sets(store_url):
    with live.create(store_url, slots()) as found:
        yield found


def add(sets, rows, **ranges):
    offsets = live.Offsets("clicks", {part[1:]: found for part, found in ranges.items()})
    return sets.update(rows, set="user", batch=offsets).status


@pytest.mark.parametrize("small", [True, False])
def test_a_batch_counts_if_it_continues(sets, small, monkeypatch):
    if not small:
        monkeypatch.setattr("setfold.live.sets.SMALL_ROWS", 6)
    assert add(sets, events(1), p0=(5, 25)) == "applied"  # the first may begin anywhere
    assert add(sets, events(1), p0=(5, 25)) == "duplicate"
    assert add(sets, events(2), p0=(25, 40), p1=(0, 9)) == "applied"
    for wrong in ((20, 45), (41, 45), (0, 41)):
        with pytest.raises(BatchConflictError, match="part 0 of clicks at 40"):
            add(sets, events(3), p0=wrong)
    with pytest.raises(BatchConflictError, match="part 0 of clicks at 40"):
        add(sets, events(3), p0=(25, 40), p1=(9, 10))  # one part is new, the other is not
    assert sets.positions("clicks") == {"0": 40, "1": 9}
    assert sets.positions("other") == {}
    assert_holds(sets, slots(), events(1), events(2))


def test_a_batch_that_fails_does_not_move_the_position(sets):
    add(sets, events(1), p0=(0, 20))
    with pytest.raises(InputError):
        add(sets, events(2).assign(x=float("nan")), p0=(20, 40))
    assert sets.positions("clicks") == {"0": 20}
    assert_holds(sets, slots(), events(1))


def test_consumers_that_race_count_once(sets):
    def race(number):
        try:
            return add(sets, events(7), p0=(0, 20))
        except BatchConflictError:
            return "conflict"

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(race, range(16)))
    assert found.count("applied") == 1
    assert_holds(sets, slots(), events(7))


@pytest.mark.parametrize("ranges", [{}, {0: (3, 3)}, {0: (-1, 3)}, {0: (1.0, 3)}])
def test_ranges_must_be_ranges(sets, ranges):
    with pytest.raises(InputError, match="offsets"):
        sets.update(events(1), set="user", batch=live.Offsets("clicks", ranges))


@pytest.mark.parametrize(
    "offsets",
    [
        live.Offsets("clicks", {0: (0, 2**63)}),
        live.Offsets("clicks", {0: (0, 1, 2)}),
        live.Offsets("clicks", {0: None}),
        live.Offsets("clicks", None),
        live.Offsets("clicks", [(0, 1)]),
        live.Offsets("clicks", {0: (0, 20), "0": (0, 5)}),
        live.Offsets("clicks", {"\ud800": (0, 20)}),
        live.Offsets("clicks\0", {0: (0, 20)}),
        live.Offsets(3, {0: (0, 20)}),
    ],
    ids=range(9),
)
def test_other_offsets_are_refused(sets, offsets):
    with pytest.raises(InputError):
        sets.update(events(1), set="user", batch=offsets)
    with pytest.raises(InputError):
        sets.positions("\ud800")


def test_no_list_of_batches_grows(sets):
    for number in range(5):
        add(sets, events(number), p0=(20 * number, 20 * number + 20))
    assert sets.info().batches == 0
    assert sum(sets.count(NAMES)) == 100
