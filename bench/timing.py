"""An interleaved stop-watch: contenders take turns, so that a noisy machine is unfair to nobody."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from bench.plan import Plan

Contender = Callable[[], object]
LONG_CALL = 0.3  # seconds; whoever takes longer is warm after one call


@dataclass(frozen=True)
class Timings:
    """CPU seconds per call of each contender, one number per round."""

    samples: dict[str, list[float]]

    @property
    def rounds(self) -> int:
        return len(next(iter(self.samples.values())))

    def seconds(self, name: str) -> float:
        """The median time of one call."""
        return median(self.samples[name])

    def ratio(self, slower: str, faster: str) -> float:
        """How many times longer one contender takes than another: the median over rounds.

        Both times of a quotient come from the same round, a moment apart.
        """
        pairs = zip(self.samples[slower], self.samples[faster], strict=True)
        return median(left / right for left, right in pairs)


def interleaved(contenders: Mapping[str, Contender], plan: Plan) -> Timings:
    """Time all contenders, one after the other, round after round.

    Args:
        contenders: what to call, by name.
        plan: how many rounds, for how long, and how long a turn lasts at least.
    """
    with _without_garbage_collection():
        calls = {name: _calls(run, plan) for name, run in contenders.items()}
        samples: dict[str, list[float]] = {name: [] for name in contenders}
        names = list(contenders)
        begin = time.monotonic()
        fewest, most = plan.rounds
        for number in range(most):
            if number >= fewest and time.monotonic() - begin > plan.budget:
                break
            for name in names:
                samples[name].append(_seconds(contenders[name], calls[name]))
            names.append(names.pop(0))  # nobody always comes first, into a cold cache
    return Timings(samples)


def _calls(run: Contender, plan: Plan) -> int:
    """Calls per turn: enough of them to be longer than the clock's and the caller's noise."""
    once = math.inf  # whoever needs no warm-up is long
    for _ in range(plan.warm_up_calls):
        once = _seconds(run, 1)
        if once > LONG_CALL:
            break
    return max(1, math.ceil(plan.sample_seconds / max(once, 1e-9)))


def _seconds(run: Contender, calls: int) -> float:
    """CPU seconds per call in this thread, in which autograd runs too when all is on the CPU."""
    begin = time.thread_time()
    for _ in range(calls):
        run()
    return (time.thread_time() - begin) / calls


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
