"""Which records a section shows while others are missing."""

from __future__ import annotations

import dataclasses
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from experiments import blocks
from experiments.recipe import Size
from tests.experiments.clouds import RECORDS, record
from tests.experiments.test_page import CLOUDS


def runs_of(found):
    return {(one.method, one.settings["points"], one.seed) for one in found}


def test_all_records_count_if_none_is_missing():
    other = record("SSE, slots apart", 200, 0, 0.9, size="smoke")
    stranger = record("a method that is gone", 200, 1, 0.9)
    found = blocks.complete(CLOUDS, [*RECORDS, other, stranger], Size.SMALL)
    assert len(found) == len(RECORDS)
    assert runs_of(found) == runs_of(RECORDS)
    assert blocks.missing(CLOUDS, found) == []


def test_a_method_counts_if_all_its_runs_are_recorded():
    missing = [one for one in RECORDS if (one.seed, one.method) != (0, "Deep Sets")]
    partly = [*missing, record("Deep Sets", 200, 0, 0.05)]  # but not with 1000 points
    for records in (missing, partly):
        found = blocks.complete(CLOUDS, records, Size.SMALL)
        # two seeds of one method are as many as one seed of two methods
        assert runs_of(found) == runs_of(one for one in RECORDS if one.method != "Deep Sets")
        assert blocks.missing(CLOUDS, found) == ["Deep Sets"]


def test_a_record_counts_if_its_training_has_the_settings_of_now():
    changed = [
        dataclasses.replace(one, training={**one.training, "epochs": 5})
        if one.method == "Deep Sets"
        else one
        for one in RECORDS
    ]
    found = blocks.complete(CLOUDS, changed, Size.SMALL)
    assert {one.method for one in found} == {"SSE, slots apart"}


def test_nothing_counts_without_records():
    assert blocks.complete(CLOUDS, [], Size.SMALL) == []
    assert blocks.complete(CLOUDS, [record("Deep Sets", 200, 0, 0.05)], Size.SMALL) == []


OLD = {method: {0, 1, 2} for method in "abcdef"}


def test_new_methods_appear_with_their_third_seed():
    for seeds, shown in (({0}, 6), ({0, 1}, 6), ({0, 1, 2}, 9)):
        methods, common = blocks.largest({**OLD, **dict.fromkeys("xyz", seeds)})
        assert (len(methods), common) == (shown, [0, 1, 2])


def test_more_seeds_are_shown_once_all_methods_have_them():
    done = {method: {0, 1, 2, 3, 4} for method in OLD} | {"x": {0, 1, 2}}
    assert blocks.largest(done) == ([*OLD, "x"], [0, 1, 2])
    assert blocks.largest({**done, "x": {0, 1, 2, 3}}) == ([*OLD, "x"], [0, 1, 2, 3])


def test_methods_are_shown_with_the_seeds_that_they_have_in_common():
    assert blocks.largest({"a": {0, 1}, "b": {0, 2}, "c": {0, 3}}) == (["a", "b", "c"], [0])


@given(st.lists(st.sets(st.integers(0, 5)), max_size=6))
def test_the_block_is_the_largest_of_all(several):
    done = {str(number): seeds for number, seeds in enumerate(several)}
    methods, seeds = blocks.largest(done)
    assert all(set(seeds) <= done[method] for method in methods)
    sizes = []
    for count in range(1, 7):
        for chosen in combinations(range(6), count):
            having = [method for method, own in done.items() if set(chosen) <= own]
            if having:
                sizes.append((len(having) * min(count, 3), count))
    assert (len(methods) * min(len(seeds), 3), len(seeds)) == max(sizes, default=(0, 0))
