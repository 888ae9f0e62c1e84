from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from experiments import report
from tests.experiments.clouds import RECORDS, record


def test_a_summary_is_the_mean_and_its_95_percent_interval():
    values = [0.8556, 0.8507, 0.8612]
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    expected = f"{np.mean(values):.4f} ± {(high - low) / 2:.4f}"
    assert report.summary(dict(enumerate(values))) == expected
    assert report.summary({0: 0.85}, digits=3) == "0.850"
    assert report.summary({0: -0.0001}, digits=2) == "0.00"  # not -0.00


def test_records_are_grouped_in_the_order_of_methods_and_settings():
    groups = report.by(RECORDS, "method", "points")
    methods = ["Deep Sets", "SSE, slots apart"]
    assert list(groups) == [(method, points) for method in methods for points in (200, 1000)]
    assert report.metric(groups["SSE, slots apart", 1000], "accuracy") == {0: 0.3, 1: 0.5}
    assert sum(map(len, groups.values())) == len(RECORDS)


def test_a_grid_and_traces_are_what_figures_draw():
    assert report.grid(RECORDS, "accuracy", "points", "method")[200] == {
        "Deep Sets": {0: 0.05, 1: 0.15},
        "SSE, slots apart": {0: 0.2, 1: 0.4},
    }
    small = [one for one in RECORDS if one.settings["points"] == 200]
    losses = report.traces(small, "loss")["SSE, slots apart"]
    assert losses == {1: {0: 0.2, 1: 0.4}, 2: {0: 0.1, 1: 0.2}}
    after = report.traces(small, "after", x="seen")["Deep Sets"]
    assert after == {10: {0: 0.05, 1: 0.15}, 20: {0: 1.05, 1: 1.15}}


def test_unknown_metrics_and_settings_are_refused_with_those_there_are():
    with pytest.raises(KeyError, match=r"'nll'.*clouds, SSE.*accuracy"):
        report.metric(RECORDS, "nll")
    with pytest.raises(KeyError, match="expected a number 'seen'"):
        report.metric(RECORDS, "seen")
    with pytest.raises(KeyError, match=r"'slots'.*method.*points.*seed"):
        report.by(RECORDS, "slots")


def test_several_values_of_one_seed_are_refused():
    with pytest.raises(ValueError, match=r"one record for each seed; got several of clouds, SSE"):
        report.metric(RECORDS, "accuracy")
    with pytest.raises(ValueError, match=r"one record for each seed.*by"):
        report.traces(RECORDS, "loss")


def test_tables_align_numbers():
    rows = [
        ["paper", 0.9, None, 1_000_000, "a | b"],
        ["ours", {0: 0.5, 1: 0.7}, {0: 0.25}, 20, "-1.5e-05"],
        ["theirs", {0: 0.1, 1: 0.2}, {0: 0.251}, 3, "c"],
    ]
    lines = report.table(["", "x", "y", "n", "text"], rows, digits=2).split("\n")
    assert lines == [
        "| | x | y | n | text |",
        "|---|---:|---:|---:|---|",
        "| paper | 0.90 | – | 1,000,000 | a \\| b |",
        "| ours | 0.60 ± 1.27 | 0.25 | 20 | -1.5e-05 |",
        "| theirs | 0.15 ± 0.64 | 0.25 | 3 | c |",
    ]


def bold(best, digits=2, **columns) -> dict[str, bool]:
    """Return which rows of a table with one column are bold."""
    rows = [[name, cell] for name, cell in columns.items()]
    lines = report.table(["", "x"], rows, digits=digits, best=best).split("\n")[2:]
    return {name: "**" in line for name, line in zip(columns, lines, strict=True)}


def test_the_best_and_all_that_are_not_shown_to_be_worse_are_bold():
    ours = {0: 0.80, 1: 0.90, 2: 0.85}
    worse = {2: 0.75, 1: 0.80, 0: 0.70}  # by 0.1 with every seed, in another order
    unsure = {0: 0.50, 1: 0.91, 2: 0.70}
    found = bold(max, ours=ours, worse=worse, unsure=unsure, paper=0.99, one={0: 0.95})
    assert found == {"ours": True, "worse": False, "unsure": True, "paper": False, "one": False}
    assert bold(min, ours=ours, worse=worse) == {"ours": False, "worse": True}
    assert bold(None, ours=ours, worse=worse) == {"ours": False, "worse": False}


def test_what_prints_alike_is_alike():
    ours = {0: 0.801, 1: 0.901, 2: 0.851}
    rounded = {seed: value - 1e-9 for seed, value in ours.items()}
    assert bold(max, ours=ours, rounded=rounded) == {"ours": True, "rounded": True}
    less = {seed: value - 0.05 for seed, value in ours.items()}
    assert bold(max, ours=ours, less=less) == {"ours": True, "less": False}


def test_nothing_is_bold_without_a_comparison():
    assert bold(max, ours={0: 0.5, 1: 0.7}, paper=0.1) == {"ours": False, "paper": False}
    assert bold(max, ours={0: 0.5}, theirs={0: 0.4}) == {"ours": False, "theirs": False}


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="expected 2 cells"):
        report.table(["a", "b"], [["only one"]])


def test_seeds_are_numbers_not_positions():
    """A record that is missing must not shift the others."""
    some = [record("PMA", 200, seed, 0.1 * seed) for seed in (2, 0)]
    assert report.metric(some, "accuracy") == {0: 0.0, 2: 0.2}
