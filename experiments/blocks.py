"""Which records a section shows while others are missing: a block of methods and seeds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from experiments.recipe import Recipe, Run, Size, as_json
from experiments.records import Record

ENOUGH = 3  # seeds; more are welcome, but not at the price of a method


def complete(recipe: Recipe, records: Sequence[Record], size: Size) -> list[Record]:
    """Return the records of the largest block of methods and seeds without gaps.

    So all methods of a section have the same seeds. A record counts only if its training has the
    settings that the recipe has now, and a method only if all of its runs are recorded.
    """
    done: dict[str, dict[int, list[Record]]] = {}
    for seed in sorted({one.seed for one in records}):
        own = [one for one in records if (one.size, one.seed) == (size, seed)]
        for method, runs in _by_method(recipe.runs(size, seed)).items():
            wanted = [(method, dict(run.settings), as_json(run.training)) for run in runs]
            counting = [one for one in own if (one.method, one.settings, one.training) in wanted]
            if len(counting) == len(wanted):
                done.setdefault(method, {})[seed] = counting
    methods, seeds = largest({method: set(of_seed) for method, of_seed in done.items()})
    return [one for seed in seeds for method in methods for one in done[method][seed]]


def missing(recipe: Recipe, shown: Sequence[Record]) -> list[str]:
    """Return the methods of a recipe that are not among the records that its section shows."""
    first, there = shown[0], {one.method for one in shown}
    wanted = _by_method(recipe.runs(Size(first.size), first.seed))
    return [method for method in wanted if method not in there]


def _by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.method, []).append(run)
    return found


def largest(done: Mapping[str, Collection[int]]) -> tuple[list[str], list[int]]:
    """Return the methods and seeds of the largest block in which each method has each seed.

    More than `ENOUGH` seeds count as `ENOUGH`. Of blocks that are equally large, the one with the
    most seeds is chosen, then the one with the first seeds.

    Args:
        done: seeds with which each method was run.

    >>> largest({"old": {0, 1, 2}, "older": {0, 1, 2}, "new": {0}})
    (['old', 'older'], [0, 1, 2])
    >>> largest({"old": {0, 1, 2, 3, 4}, "new": {0, 1, 2}})
    (['old', 'new'], [0, 1, 2])
    """

    def methods(seeds: Collection[int]) -> list[str]:
        return [method for method, own in done.items() if set(seeds) <= set(own)]

    def rank(seeds: Sequence[int]) -> tuple[int, int, list[int]]:
        area = len(methods(seeds)) * min(len(seeds), ENOUGH)
        return area, len(seeds), [-seed for seed in seeds]

    together: set[frozenset[int]] = set()  # the seeds that some methods have in common
    for own in done.values():
        together |= {frozenset(own), *(others.intersection(own) for others in together)}
    seeds = max(map(sorted, together), key=rank, default=[])
    return methods(seeds) if seeds else [], seeds
