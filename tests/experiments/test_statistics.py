"""The statistics agree with independent computations, and verdicts with the written rule."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from experiments.recipe import Outcome
from experiments.statistics import (
    ACCURACY,
    LOG_LOSS,
    Comparison,
    Part,
    Verdict,
    confirmed,
    error_of_proportion,
    interval,
    judge,
    leaders,
)

TABLE = {2: 12.7062, 3: 4.30265, 4: 3.18245, 5: 2.77645, 10: 2.26216}  # n: t(0.975, n - 1)
differences = st.lists(st.floats(-1, 1).map(lambda x: round(x, 6)), min_size=2, max_size=6)


def compared(values, measure=ACCURACY, part=Part.CLAIM, **changes) -> Comparison:
    """A comparison with these differences."""
    zeros = dict.fromkeys(range(len(values)), 0.0)
    return Comparison(
        "ours", "baseline", "here", dict(enumerate(values)), zeros, measure, part, **changes
    )


@pytest.mark.parametrize("number", TABLE)
def test_an_interval_is_that_of_textbooks(number):
    values = np.random.default_rng(number).normal(3, 2, number).tolist()
    mean = sum(values) / number
    variance = sum((value - mean) ** 2 for value in values) / (number - 1)
    expected = mean, TABLE[number] * math.sqrt(variance / number)
    assert interval(values) == pytest.approx(expected, rel=1e-5)


def test_one_value_has_no_interval():
    assert interval([0.5]) == (0.5, None)


def test_folds_that_share_training_data_count_less():
    values = [0.1, 0.2, 0.4, 0.3]
    variance = sum((value - 0.25) ** 2 for value in values) / 3
    expected = TABLE[4] * math.sqrt(variance * (1 / 4 + 1 / 4))
    assert interval(values, overlap=1 / 4)[1] == pytest.approx(expected, rel=1e-5)


@given(differences)
def test_a_comparison_is_a_paired_t_test(values):
    found = compared(values)
    if len(set(values)) == 1:
        return
    test = ttest_rel(values, [0.0] * len(values))
    low, high = test.confidence_interval(0.95)
    middle, half = found.interval
    assert (middle - half, middle + half) == pytest.approx((low, high), abs=1e-9)
    assert found.p == pytest.approx(test.pvalue, abs=1e-9)
    shown = found.verdict in (Verdict.BETTER, Verdict.WORSE)
    if abs(test.pvalue - 0.05) > 1e-6:
        assert shown == (test.pvalue < 0.05)
        assert shown == (not low <= 0 <= high)


def test_seeds_are_paired_by_number():
    ours, baseline = {0: 0.9, 1: 0.5, 2: 0.7}, {2: 0.6, 0: 0.8, 1: 0.4}
    found = Comparison("ours", "baseline", "here", ours, baseline, ACCURACY)
    assert found.differences == pytest.approx([0.1, 0.1, 0.1])
    assert (found.verdict, found.in_favour) == (Verdict.BETTER, 3)


def test_other_seeds_are_refused():
    with pytest.raises(ValueError, match=r"same seeds of 'ours' and 'other', here.*'0'.*'1'"):
        Comparison("ours", "other", "here", {0: 1.0}, {1: 1.0}, ACCURACY)


def test_lower_is_better_for_losses():
    assert compared([-0.1, -0.11, -0.12], LOG_LOSS).verdict is Verdict.BETTER
    assert compared([-0.1, -0.11, -0.12], ACCURACY).verdict is Verdict.WORSE
    assert compared([0.1, -0.11, 0.0], LOG_LOSS).in_favour == 1


def test_differences_without_spread():
    assert compared([0.0, 0.0, 0.0]).verdict is Verdict.NEITHER
    assert compared([0.0, 0.0, 0.0]).p == 1
    assert compared([0.5, 0.5, 0.5]).verdict is Verdict.BETTER
    assert compared([0.5, 0.5, 0.5]).p == 0


def test_one_seed_shows_nothing():
    assert compared([0.5]).verdict is Verdict.ONE_SEED
    assert not confirmed([compared([0.5])])[0]


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=4))
def test_with_up_to_four_seeds_a_verdict_implies_that_all_agree(values):
    found = compared(values)
    if found.verdict is Verdict.BETTER:
        assert found.in_favour == len(values)
    if found.verdict is Verdict.WORSE:
        assert found.in_favour == 0


def test_with_five_seeds_it_does_not():
    found = compared([-0.01, 1, 1, 1, 1])
    assert (found.verdict, found.in_favour) == (Verdict.BETTER, 4)


def test_one_of_twenty_comparisons_of_equal_methods_is_wrong():
    random = np.random.default_rng(0)
    rows = random.normal(size=(4000, 3)) - random.normal(size=(4000, 3))
    shown = [compared(row.tolist()).verdict is not Verdict.NEITHER for row in rows]
    assert np.mean(shown) == pytest.approx(0.05, abs=0.01)
    families = [
        confirmed([compared(row.tolist()) for row in part]) for part in rows.reshape(-1, 8, 3)
    ]
    assert np.mean([any(family) for family in families]) == pytest.approx(0.05, abs=0.025)


@given(st.lists(differences, min_size=1, max_size=5))
def test_holms_correction_is_the_closed_test_of_all_subsets(families):
    """A difference remains if Bonferroni's test rejects every subset that contains it."""
    comparisons = [compared(values) for values in families]
    p = [one.p for one in comparisons]
    for place, remains in enumerate(confirmed(comparisons)):
        subsets = (
            subset
            for size in range(1, len(p) + 1)
            for subset in itertools.combinations(range(len(p)), size)
            if place in subset
        )
        assert remains == all(min(p[i] for i in s) * len(s) < 0.05 for s in subsets)


SURE = [1.0, 1.001, 0.999]  # p < 0.000001
WEAK = [1.0, 1.5, 0.8]  # 0.01 < p < 0.05
UNSURE = [1.0, -1.0, 0.1]
SURE_WORSE, WEAK_WORSE = [-x for x in SURE], [-x for x in WEAK]


def claims(*rows, part=Part.CLAIM) -> list[Comparison]:
    return [compared(values, part=part) for values in rows]


@pytest.mark.parametrize(
    ("printed", "apart", "aside", "expected"),
    [
        ([WEAK] * 9, [], [], Outcome.HOLDS),  # all must agree, so nothing is corrected
        ([SURE], [SURE_WORSE], [SURE_WORSE], Outcome.HOLDS),
        ([SURE, UNSURE], [WEAK, SURE], [], Outcome.WITH_SLOTS_APART),
        ([SURE_WORSE], [SURE], [], Outcome.WITH_SLOTS_APART),
        ([SURE, UNSURE], [], [], Outcome.PARTLY),
        ([SURE, SURE_WORSE], [], [], Outcome.PARTLY),
        ([UNSURE], [SURE, UNSURE], [], Outcome.PARTLY),
        ([WEAK, UNSURE, UNSURE, UNSURE], [], [], Outcome.NOT_SHOWN),  # not after the correction
        ([WEAK, UNSURE], [], [UNSURE] * 9, Outcome.NOT_SHOWN),  # of all rows of the section
        ([WEAK_WORSE, UNSURE, UNSURE, UNSURE], [], [], Outcome.NOT_SHOWN),
        ([UNSURE], [], [SURE], Outcome.NOT_SHOWN),  # what does not count does not count
        ([UNSURE, SURE_WORSE], [], [], Outcome.FAILS),
        ([WEAK, UNSURE, SURE_WORSE], [UNSURE], [SURE], Outcome.FAILS),
        ([[1.0]], [], [], Outcome.ONE_SEED),
        ([], [], [SURE], None),
        ([], [], [], None),
    ],
)
def test_the_rule(printed, apart, aside, expected):
    rows = claims(*printed) + claims(*apart, part=Part.APART) + claims(*aside, part=Part.ASIDE)
    assert judge(rows) is expected


def test_the_examples_of_the_rule_are_what_they_say():
    assert compared(SURE).p < 1e-6
    assert 0.01 < compared(WEAK).p < 0.05
    assert compared(UNSURE).p > 0.5


def test_leaders_are_the_best_and_all_that_are_not_shown_to_be_worse():
    values = {
        "best": {0: 0.9, 1: 0.8},
        "worse": {1: 0.7, 0: 0.8},
        "unsure": {0: 0.5, 1: 0.85},
        "one seed": {0: 1.0},
    }
    assert leaders(values, larger_is_better=True, digits=2) == {"best", "unsure"}
    assert leaders(values, larger_is_better=False, digits=2) == {"unsure", "worse", "best"}
    assert leaders({"alone": {0: 1.0, 1: 2.0}}, larger_is_better=True, digits=2) == set()


def test_the_error_of_a_proportion_is_that_of_its_items():
    random = np.random.default_rng(0)
    accuracies = random.binomial(2446, 0.84, size=20_000) / 2446
    assert error_of_proportion(0.84, 2446) == pytest.approx(accuracies.std(), rel=0.02)
