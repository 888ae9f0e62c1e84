"""The comparisons that recipes declare."""

from __future__ import annotations

import pytest

from experiments.recipes.common import against, changes, in_pairs
from experiments.statistics import ACCURACY, Part

VALUES = {
    "SSE": {1: {0: 0.1, 1: 0.2}, 100: {0: 0.5, 1: 0.6}, 2000: {0: 0.7, 1: 0.8}},
    "PMA": {1: {1: 0.3, 0: 0.4}, 100: {0: 0.3, 1: 0.3}},
    "Deep Sets": {100: {0: 0.2, 1: 0.2}},
}


def told(comparisons) -> list[tuple[str, str, str]]:
    return [(one.ours, one.baseline, one.where) for one in comparisons]


def test_a_method_is_compared_with_others_wherever_both_were_measured():
    found = against(VALUES, "SSE", ["PMA", "Deep Sets"], ACCURACY, " points", part=Part.APART)
    assert told(found) == [
        ("SSE", "PMA", "1 point"),
        ("SSE", "PMA", "100 points"),
        ("SSE", "Deep Sets", "100 points"),
    ]
    assert found[0].differences == pytest.approx([-0.3, -0.1])  # by seed
    assert {one.part for one in found} == {Part.APART}


def test_some_places_are_compared_in_their_order():
    found = against(VALUES, "SSE", ["PMA"], ACCURACY, " points", at=(100, 2000, 1))
    assert [one.where for one in found] == ["100 points", "1 point"]


def test_a_method_is_compared_with_itself():
    found = changes(VALUES, ["SSE", "PMA"], [(2000, 1), (100, 1)], ACCURACY, " points")
    assert told(found) == [
        ("2,000 points", "1 point", "SSE"),
        ("100 points", "1 point", "SSE"),
        ("100 points", "1 point", "PMA"),
    ]
    assert found[0].differences == pytest.approx([0.6, 0.6])


def test_methods_that_were_not_run_are_left_out():
    """Whether the names are right, the smoke runs of the recipes check."""
    found = against(VALUES, "SSE", ["not run", "PMA"], ACCURACY, " points", at=(100,))
    assert told(found) == [("SSE", "PMA", "100 points")]
    assert against(VALUES, "not run", ["PMA"], ACCURACY, " points") == []
    assert against(VALUES, "not run", ["PMA"], ACCURACY, " points", at=(100,)) == []
    found = changes(VALUES, ["not run", "PMA"], [(100, 1)], ACCURACY, " points")
    assert told(found) == [("100 points", "1 point", "PMA")]


def test_methods_without_places_are_compared_in_pairs():
    values = {method: line[100] for method, line in VALUES.items()}
    pairs = {("SSE", "PMA"): Part.CLAIM, ("PMA", "gone"): Part.CLAIM, ("PMA", "SSE"): Part.ASIDE}
    found = in_pairs(values, pairs, ACCURACY, "here")
    assert told(found) == [("SSE", "PMA", "here"), ("PMA", "SSE", "here")]
    assert [one.part for one in found] == [Part.CLAIM, Part.ASIDE]
