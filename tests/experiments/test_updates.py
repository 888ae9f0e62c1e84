"""The cost of an update: what is kept, and that memory and time are those of the update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.recipe import Size
from experiments.recipes.neural_processes import DATA
from experiments.tasks import updates
from experiments.tasks.updates import cost_of_update, update_costs

FACES = DATA["CelebA, 32 × 32"]
TASK, READERS = FACES.training(Size.SMOKE, 0).task, FACES.readers()


@pytest.mark.parametrize(("method", "kept"), [("CMANP", 8704), ("LBANP", 32 * 2500)])
def test_the_numbers_are_those_before_the_update(method, kept):
    found, cost = cost_of_update(replace(TASK, reader=READERS[method]), 2500, 10, 20)
    assert found == kept
    assert cost.seconds > 0


def test_an_update_leaves_the_set_as_it_was(monkeypatch):
    """Each of the repetitions begins with as many pixels."""
    held, encode = [], updates.encode

    def noted(encoder, kept):
        held.append(updates.numbers(kept) // 64)
        return encode(encoder, kept)

    monkeypatch.setattr(updates, "encode", noted)
    cost_of_update(replace(TASK, reader=READERS["All pixels attended"]), 100, 10, 20)
    assert held == [110] * updates.TIMES


@pytest.mark.long
def test_memory_is_that_of_what_is_kept_and_read():
    task = replace(TASK, reader=READERS["All pixels attended"])
    found = update_costs(None, task, (100_000,), 10, 20)
    assert found["held"] == [100_000.0]
    assert found["numbers"] == [64 * 100_000.0]
    assert 2 * 64 * 4 * 0.1 < found["megabytes"][0] < 500  # the features before and after it
