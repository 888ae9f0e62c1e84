"""Intervals and paired comparisons over seeds, and the rule that turns them into verdicts.

    interval([0.84, 0.85, 0.86])        # mean, and half the width of its 95% interval
    compared = Comparison("SSE", "Deep Sets", "100 points", ours, baseline, ACCURACY)
    compared.verdict                    # better, worse, no difference shown, one seed
    judge([compared, ...])              # whether a claim holds

A model of each method is trained with each seed, so methods are compared seed by seed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev
from typing import Any, TypeVar

from scipy.stats import t as student

from experiments.recipe import Outcome

LEVEL = 0.05  # chance of a false verdict if two methods are equal; intervals are 95% intervals

Seeds = Mapping[Any, float]  # {seed: value}; of cross-validations {(seed, fold): value}


class Verdict(StrEnum):
    """What a paired comparison shows."""

    BETTER = "better"
    WORSE = "worse"
    NEITHER = "no difference shown"
    ONE_SEED = "one seed"


class Part(StrEnum):
    """What a comparison counts for; the value is a cell of its table."""

    CLAIM = "claim"
    APART = "claim, slots apart"  # the same claim for our variant of the encoder
    ASIDE = "–"


@dataclass(frozen=True)
class Measure:
    """A measured quantity.

    Args:
        name: name in tables, with the unit if it has one.
        larger_is_better: whether larger values are better.
        digits: digits after the decimal point.
    """

    name: str
    larger_is_better: bool
    digits: int


LOG_LOSS = Measure("NLL", larger_is_better=False, digits=3)
ACCURACY = Measure("accuracy", larger_is_better=True, digits=4)
SQUARED_ERROR = Measure("squared error", larger_is_better=False, digits=4)


def mean(seeds: Seeds) -> float:
    """Return the mean over seeds."""
    return fmean(seeds.values())


def interval(values: Collection[float], overlap: float = 0.0) -> tuple[float, float | None]:
    """Return the mean and half the width of its 95% confidence interval, by Student's t.

    Args:
        values: independent values, such as one for each seed; with one value there is no interval.
        overlap: number of test items divided by number of training items, if the values come from
            cross-validations. Their training sets overlap, so the values are not independent
            (Nadeau and Bengio, 2003).

    >>> middle, half = interval([1.0, 2.0, 3.0])
    >>> middle, round(half, 4), interval([1.0])
    (2.0, 2.4841, (1.0, None))
    """
    if len(values) < 2:
        return fmean(values), None
    quantile = float(student.ppf(1 - LEVEL / 2, len(values) - 1))
    return fmean(values), quantile * _error(values, overlap)


def _error(values: Collection[float], overlap: float) -> float:
    """Return the standard error of the mean."""
    return stdev(values) * (1 / len(values) + overlap) ** 0.5


def error_of_proportion(proportion: float, items: int) -> float:
    """Return the standard error of a proportion of independent items, such as an accuracy.

    >>> round(error_of_proportion(0.84, 2446), 4)
    0.0074
    """
    return (proportion * (1 - proportion) / items) ** 0.5


@dataclass(frozen=True)
class Comparison:
    """A comparison of two methods that were run with the same seeds.

    Args:
        ours: method that a claim says is better.
        baseline: method that it is compared with.
        where: setting in which they are compared, such as "100 points".
        of_ours: value of `ours` for each seed.
        of_baseline: value of `baseline` for each seed.
        measure: what is compared.
        part: what the comparison counts for.
        overlap: see `interval`.

    >>> seeds = {0: 0.84, 1: 0.86}, {1: 0.84, 0: 0.82}
    >>> Comparison("SSE", "Deep Sets", "100 points", *seeds, ACCURACY).verdict
    <Verdict.BETTER: 'better'>
    """

    ours: str
    baseline: str
    where: str
    of_ours: Seeds
    of_baseline: Seeds
    measure: Measure
    part: Part = Part.CLAIM
    overlap: float = 0.0

    def __post_init__(self) -> None:
        if self.of_ours.keys() != self.of_baseline.keys():
            raise ValueError(
                f"expected the same seeds of {self.ours!r} and {self.baseline!r}, {self.where}; "
                f"got {sorted(map(str, self.of_ours))} and {sorted(map(str, self.of_baseline))}."
            )

    @property
    def differences(self) -> list[float]:
        """The difference `ours` - `baseline` of each seed."""
        return [value - self.of_baseline[seed] for seed, value in self.of_ours.items()]

    @property
    def interval(self) -> tuple[float, float | None]:
        """Mean difference, and half the width of its 95% interval."""
        return interval(self.differences, self.overlap)

    @property
    def in_favour(self) -> int:
        """Number of seeds with which `ours` is better."""
        sign = 1 if self.measure.larger_is_better else -1
        return sum(sign * difference > 0 for difference in self.differences)

    @property
    def verdict(self) -> Verdict:
        """Better or worse if the interval excludes zero.

        With up to four seeds it then follows that all seeds agree: if one of n differences has
        another sign, t is at most n - 1, and the interval contains zero.
        """
        difference, half = self.interval
        if half is None:
            return Verdict.ONE_SEED
        if abs(difference) <= half:
            return Verdict.NEITHER
        wins = (difference > 0) == self.measure.larger_is_better
        return Verdict.BETTER if wins else Verdict.WORSE

    @property
    def p(self) -> float:
        """Two-sided p-value: below 0.05 if and only if the interval excludes zero."""
        differences = self.differences
        if len(differences) < 2 or not any(differences):
            return 1.0
        error = _error(differences, self.overlap)
        size = abs(fmean(differences)) / error if error else float("inf")
        return float(2 * student.sf(size, len(differences) - 1))


def confirmed(comparisons: Sequence[Comparison]) -> list[bool]:
    """Return which differences remain after Holm's correction for several comparisons.

    If no two methods differ, the chance that any difference remains is at most 5%. Holm (1979): the
    smallest of m p-values is compared with 0.05 / m, the next one with 0.05 / (m - 1) and so on, up
    to the first that is larger.
    """
    p = [one.p for one in comparisons]
    remain = [False] * len(p)
    for rank, place in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        if p[place] * (len(p) - rank) >= LEVEL:
            break
        remain[place] = True
    return remain


def counted(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the comparisons that count for a claim."""
    return [one for one in comparisons if one.part is not Part.ASIDE]


def judge(comparisons: Sequence[Comparison]) -> Outcome | None:
    """Return whether a claim holds, by the comparisons that count for it; None if there are none.

    "Holds" needs no correction for several comparisons: all must be better, so each further one
    makes it harder. "In part" needs one that is better, and each further one makes that easier, so
    it must remain after Holm's correction. The same goes for "does not hold".
    """
    if not counted(comparisons):
        return None
    claim, apart = (
        {one.verdict for one in comparisons if one.part is part}
        for part in (Part.CLAIM, Part.APART)
    )
    remaining = {
        one.verdict
        for one, remains in zip(comparisons, confirmed(comparisons), strict=True)
        if remains and one.part is not Part.ASIDE
    }
    if Verdict.ONE_SEED in claim | apart:
        return Outcome.ONE_SEED
    if claim == {Verdict.BETTER}:
        return Outcome.HOLDS
    if apart == {Verdict.BETTER}:
        return Outcome.WITH_SLOTS_APART
    if Verdict.BETTER in remaining:
        return Outcome.PARTLY
    return Outcome.FAILS if Verdict.WORSE in remaining else Outcome.NOT_SHOWN


Key = TypeVar("Key", bound=Hashable)


def leaders(values: Mapping[Key, Seeds], larger_is_better: bool, digits: int) -> set[Key]:
    """Return the best mean and all that are not shown to be worse.

    Means that print alike with this many digits are alike: rounding is no difference. Values of a
    single seed show nothing and are left out.
    """
    several = {key: seeds for key, seeds in values.items() if len(seeds) > 1}
    if len(several) < 2:
        return set()
    best = (max if larger_is_better else min)(several, key=lambda key: mean(several[key]))
    top, measure = round(mean(several[best]), digits), Measure("", larger_is_better, digits)
    return {
        key
        for key, seeds in several.items()
        if round(mean(seeds), digits) == top
        or Comparison(str(key), str(best), "", seeds, several[best], measure).verdict
        is not Verdict.WORSE
    }
