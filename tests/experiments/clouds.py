"""Records of a made-up recipe, for the tests of reports."""

from __future__ import annotations

import dataclasses

from experiments.records import Record


def record(method: str, points: int, seed: int, accuracy: float, **changes) -> Record:
    made = Record(
        recipe="clouds",
        size="small",
        method=method,
        settings={"points": points},
        seed=seed,
        metrics={"accuracy": accuracy, "seen": [10.0, 20.0], "after": [accuracy, accuracy + 1]},
        history={"epoch": [1.0, 2.0], "loss": [accuracy, accuracy / 2]},
        training={"epochs": 20, "batch_size": 64, "rate": 0.001, "seed": seed, "of": method},
        parameters=1234,
        command="python -m experiments run clouds",
        commit="0123456789abcdef",
        versions={"python": "3.12", "torch": "2.9"},
        machine={"cpu": "fast", "cores": 2},
        seconds=30.0,
        finished="2026-01-02T03:04:05+00:00",
    )
    return dataclasses.replace(made, **changes)


RECORDS = [
    record("SSE, slots apart", 1000, 1, 0.5),
    record("SSE, slots apart", 1000, 0, 0.3),
    record("SSE, slots apart", 200, 0, 0.2),
    record("SSE, slots apart", 200, 1, 0.4),
    record("Deep Sets", 1000, 0, 0.1),
    record("Deep Sets", 1000, 1, 0.29),
    record("Deep Sets", 200, 1, 0.15),
    record("Deep Sets", 200, 0, 0.05),
]
