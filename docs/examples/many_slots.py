"""Measure what many slots with places cost: time per element, and memory of states in tables.

    python docs/examples/many_slots.py [ELEMENTS [SETS]]

Times are CPU times of one thread, the shortest of five. It needs `pip install pyarrow`.
"""

import math
import sys
import time
from collections.abc import Callable
from functools import partial

import pyarrow as pa
import torch

import setfold

GRIDS = {(512,): (65_536,), (16, 32): (256, 256), (8, 8, 8): (64, 64, 16)}  # few: many slots
ROUNDS = 5


def encoder_on(shape: tuple[int, ...]) -> setfold.PlacedSlotEncoder:
    """An encoder of elements with one feature, on a grid over the unit box."""
    axes = len(shape)
    grid = setfold.Grid((0,) * axes, (1,) * axes, shape)
    return setfold.PlacedSlotEncoder(axes + 1, grid, aggregate=["density", "weighted_mean"]).eval()


def shortest(*calls: Callable[[], object]) -> list[float]:
    """The shortest CPU time of each call; the calls take turns."""
    found = [math.inf] * len(calls)
    for _ in range(ROUNDS):
        for place, call in enumerate(calls):
            begin = time.process_time()
            call()
            found[place] = min(found[place], time.process_time() - begin)
    return found


def compare_times(count: int) -> None:
    """Print the time per element with few and with many slots."""
    for shapes in GRIDS.items():
        elements = torch.rand(1, count, len(shapes[0]) + 1)
        few, many = shortest(*(partial(encoder_on(shape), elements) for shape in shapes))
        slots = [f"{math.prod(shape):,} slots" for shape in shapes]
        print(
            f"{len(shapes[0])}-D: {1e9 * few / count:.0f} ns per element with {slots[0]}, "
            f"{1e9 * many / count:.0f} ns with {slots[1]}: {many / few:.2f} times"
        )


def measure_tables(sets: int) -> None:
    """Print the size of a table of states, and the time of merging two."""
    encoder = encoder_on((256, 256))
    columns = dict(zip("xyz", torch.rand(3, sets).numpy(), strict=True))
    rows = pa.table({"set": range(sets), **columns})
    states = setfold.partial_states(encoder, rows, set="set")
    (merging,) = shortest(lambda: setfold.merge_partials([states, states]))
    whole = sets * encoder.num_slots * 2 * 8  # a density and a sum for each slot, in float64
    print(
        f"{sets:,} sets of one element on {encoder.num_slots:,} slots: {states.nbytes / 1e6:.2f} MB "
        f"instead of {whole / 1e9:.2f} GB; two such tables merge in {1e3 * merging:.1f} ms"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.no_grad():
        compare_times(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000)
        measure_tables(int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
