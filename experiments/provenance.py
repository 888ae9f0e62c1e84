"""What the runs behind RESULTS.md were, took and came from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from experiments.progress import duration
from experiments.recipe import Size
from experiments.records import Record
from experiments.report import by, table, wrap


def costs(records: Sequence[Record]) -> str:
    """Make a table of each method's parameters and run time."""
    rows = []
    for (method,), own in by(records, "method").items():
        sizes = {one.parameters for one in own if one.parameters is not None}
        if sizes:
            time = duration(median(one.seconds for one in own))
            rows.append([method, _distinct(sizes), time])
    return table(["method", "parameters", "median time per run"], rows) if rows else ""


def settings(records: Sequence[Record], wanted: int) -> str:
    """Summarise the settings of the runs; `wanted` is the number of seeds that there should be."""
    seeds = len({record.seed for record in records})
    trainings = [record.training for record in records if record.training]
    settings = {
        "runs": f"{len(records):,}",
        "seeds": f"{seeds}" if seeds >= wanted else f"{seeds} of {wanted}",
        "epochs": _distinct(training["epochs"] for training in trainings),
        "batch size": _distinct(training["batch_size"] for training in trainings),
        "learning rate": _distinct(training["rate"] for training in trainings),
    }
    return "; ".join(f"{name}: {value}" for name, value in settings.items() if value)


def origin(records: Sequence[Record], size: Size) -> str:
    """Describe the commits, the machine and the versions behind the numbers."""
    if not records:
        return ""
    lines = [
        f"Size `{size}`: {len(records):,} runs took about {duration(_seconds(records))}; a "
        "training that several runs share is counted once. The last run finished at "
        f"{max(one.finished for one in records)}.",
        f"Commits: {_counted(_commit(record) for record in records)}.",
        f"Machine: {_counted(_spelled(record.machine) for record in records)}.",
        f"Versions: {_counted(_spelled(record.versions) for record in records)}.",
    ]
    return "\n".join(
        ["## How the experiments were run", "", *(wrap(f"- {x}", "  ") for x in lines)]
    )


def _seconds(records: Sequence[Record]) -> float:
    """Return the total time of all runs; a training that runs share is counted once."""
    longest: dict[str, float] = {}
    for number, record in enumerate(records):
        key = json.dumps(record.training, sort_keys=True) if record.training else str(number)
        longest[key] = max(record.seconds, longest.get(key, 0))
    return sum(longest.values())


def _commit(record: Record) -> str:
    """Shorten the commits of a record; there are several if another commit resumed the training."""
    several = record.commit.split(", ")
    return ", ".join(c[:12] + " with local changes" * c.endswith("+") for c in several)


def _spelled(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _counted(texts: Iterable[str]) -> str:
    """List distinct texts, with the number of runs for each if there is more than one."""
    counts = Counter(texts)
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(
        f"{text} ({count:,} {'run' if count == 1 else 'runs'})"
        for text, count in sorted(counts.items())
    )


def _distinct(values: Iterable[float]) -> str:
    """List distinct values: up to four in full, more as a range.

    >>> _distinct([256, 64, 64]), _distinct([1000, 2000, 3000, 4000, 5000]), _distinct([])
    ('64 / 256', '1,000 to 5,000', '')
    """
    texts = [f"{value:,}" for value in sorted(set(values))]
    return " / ".join(texts) if len(texts) <= 4 else f"{texts[0]} to {texts[-1]}"
