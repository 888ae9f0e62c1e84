"""Counts and times of a service, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
HELP = {
    "requests_total": "Requests by path, method and status.",
    "request_seconds": "Time from the head of a request to the end of its answer.",
    "updates_total": "Batches by result.",
    "rows_total": "Rows of batches: those that count, and those that were dropped.",
    "group_updates": "Updates that shared a transaction.",
    "waiting_updates": "Updates that were accepted and are not applied yet.",
    "body_bytes": "Bytes of the bodies of requests in memory.",
    "listeners": "Clients that listen to changes.",
    "dropped_listeners_total": "Clients that were dropped because they were too slow.",
}

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """How often values fell below some bounds.

    Args:
        bounds: The bounds, ascending.

    >>> sizes = Histogram([1, 10])
    >>> sizes.observe(5)
    >>> sizes.lines("group", "")
    ['group_bucket{le="1"} 0', 'group_bucket{le="10"} 1', 'group_bucket{le="+Inf"} 1',
     'group_sum 5', 'group_count 1']
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum: float = 0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, name: str, labels: str) -> list[str]:
        """Return the lines of the text format; the labels are text without braces."""
        more, own = f"{labels}," if labels else "", f"{{{labels}}}" if labels else ""
        steps = zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts), strict=True)
        found = [f'{name}_bucket{{{more}le="{bound}"}} {count}' for bound, count in steps]
        return [*found, f"{name}_sum{own} {self.sum:g}", f"{name}_count{own} {sum(self.counts)}"]


class Metrics:
    """What a service has done, and what it is doing.

    >>> metrics = Metrics()
    >>> metrics.count("updates_total", status="applied")
    >>> print(metrics.text())
    # HELP setfold_updates_total Batches by result.
    # TYPE setfold_updates_total counter
    setfold_updates_total{status="applied"} 1
    """

    def __init__(self) -> None:
        self.counters: dict[str, Counter[Labels]] = {}
        self.histograms: dict[str, dict[Labels, Histogram]] = {}
        self.gauges: dict[str, Callable[[], float]] = {}

    def count(self, name: str, number: int = 1, **labels: str) -> None:
        """Add to a counter."""
        self.counters.setdefault(name, Counter())[tuple(labels.items())] += number

    def observe(self, name: str, value: float, bounds: Sequence[float], **labels: str) -> None:
        """Count a value of a histogram."""
        own = self.histograms.setdefault(name, {})
        found = own.get(key := tuple(labels.items()))
        if found is None:
            found = own[key] = Histogram(bounds)
        found.observe(value)

    def watch(self, name: str, read: Callable[[], float]) -> None:
        """Show what a function returns."""
        self.gauges[name] = read

    def text(self) -> str:
        """Return everything in the text format, version 0.0.4."""
        lines: list[str] = []
        for name, counts in sorted(self.counters.items()):
            lines += _head(name, "counter")
            for labels, number in counts.items():
                own = _format(labels)
                lines.append(f"setfold_{name}{f'{{{own}}}' if own else ''} {number}")
        for name, histograms in sorted(self.histograms.items()):
            lines += _head(name, "histogram")
            for labels, histogram in histograms.items():
                lines += histogram.lines(f"setfold_{name}", _format(labels))
        for name, read in sorted(self.gauges.items()):
            lines += [*_head(name, "gauge"), f"setfold_{name} {read():g}"]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str) -> list[str]:
    return [f"# HELP setfold_{name} {HELP[name]}", f"# TYPE setfold_{name} {kind}"]


def _format(labels: Labels) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels)
