"""The tables of paired differences in RESULTS.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from experiments.recipe import Outcome
from experiments.report import plus_minus, table, wrap
from experiments.statistics import (
    Comparison,
    Part,
    Verdict,
    confirmed,
    counted,
    error_of_proportion,
    judge,
    mean,
)


def table_of(comparisons: Sequence[Comparison], test_items: int | None) -> str:
    """Make the table of paired differences.

    Args:
        comparisons: the rows; if they have several measures, larger is better for all or none.
        test_items: number of items of the test split, if the measure is an accuracy.
    """
    if not comparisons:
        return ""
    (larger,) = {one.measure.larger_is_better for one in comparisons}
    measures = " or ".join(dict.fromkeys(one.measure.name for one in comparisons))
    order = "higher" if larger else "lower"
    headers = [
        "counts for",
        "ours",
        "baseline",
        "where",
        f"difference in {measures} ({order} is better)",
        "in favour",
        "verdict",
    ]
    rows = [
        [
            one.part,
            one.ours,
            one.baseline,
            one.where,
            _difference(one),
            f"{one.in_favour} of {len(one.differences)}",
            f"**{one.verdict}**" if remains else one.verdict,
        ]
        for one, remains in zip(comparisons, confirmed(comparisons), strict=True)
    ]
    parts = ["**Paired differences**", table(headers, rows)]
    if test_items is not None:
        first = mean(comparisons[0].of_baseline)
        error = error_of_proportion(first, test_items)
        parts.append(
            wrap(
                f"The test set has {test_items:,} items. An accuracy of {first:.2f} has a standard "
                f"error of {error:.4f} for the choice of the test set, which the intervals do not "
                "contain."
            )
        )
    return "\n\n".join(parts)


def result_of(comparisons: Sequence[Comparison]) -> str:
    """Tell the first comparison that counts, and how many are better and worse; "" if none does."""
    several, outcome = counted(comparisons), judge(comparisons)
    if outcome is Outcome.WITH_SLOTS_APART:
        several = [one for one in several if one.part is Part.APART]
    if not several:
        return ""
    first = several[0]
    text = f"{first.ours} against {first.baseline} ({first.where})"
    verdicts = Counter(one.verdict for one in several)
    if outcome is not Outcome.ONE_SEED:
        text += f"; {verdicts[Verdict.BETTER]} of {len(several)} better"
    if verdicts[Verdict.WORSE]:
        text += f", {verdicts[Verdict.WORSE]} worse"
    return f"{_difference(first)} {first.measure.name}: {text}"


def _difference(comparison: Comparison) -> str:
    return plus_minus(comparison.interval, comparison.measure.digits, sign="+")
