"""Interleaved timer: contenders run in turn, so that noise of the machine affects all of them."""

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
LONG_CALL = 0.3  # seconds; slower contenders need one warm-up call only


@dataclass(frozen=True)
class Timings:
    """CPU seconds per call of each contender, one number per round."""

    samples: dict[str, list[float]]

    @property
    def rounds(self) -> int:
        return len(next(iter(self.samples.values())))

    def seconds(self, name: str) -> float:
        """Return the median time of one call."""
        return median(self.samples[name])

    def ratio(self, slower: str, faster: str) -> float:
        """Return the time of one contender relative to another: the median over rounds.

        Both times of a ratio are from the same round.
        """
        pairs = zip(self.samples[slower], self.samples[faster], strict=True)
        return median(left / right for left, right in pairs)


def interleaved(contenders: Mapping[str, Contender], plan: Plan) -> Timings:
    """Time all contenders in turn, for several rounds.

    Args:
        contenders: functions to call, by name.
        plan: plan with the number of rounds, the budget and the duration of a sample.
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
            names.append(names.pop(0))  # rotate, so that the first place (cold cache) changes
    return Timings(samples)


def _calls(run: Contender, plan: Plan) -> int:
    """Return the number of calls per sample, such that the sample is longer than timer noise."""
    once = math.inf  # without warm-up, one call per sample
    for _ in range(plan.warm_up_calls):
        once = _seconds(run, 1)
        if once > LONG_CALL:
            break
    return max(1, math.ceil(plan.sample_seconds / max(once, 1e-9)))


def _seconds(run: Contender, calls: int) -> float:
    """Return CPU seconds per call in this thread, which also runs autograd on the CPU."""
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
