"""Target 14: encode the sets of a data frame, compared with the kernel on the same rows.

All contenders run in turn in one process of their own, with one thread wherever that can be set,
and with the allocator as users have it.

    python -m bench.frames ROWS ROUNDS     prints the CPU seconds of each contender, round by round
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np

from bench.machine import recycle_memory
from bench.memory import printed_by
from bench.plan import BOUNDS, FILE_SETS, Plan, Shape
from bench.results import FramesCost, Results, Target
from bench.timing import Timings

SHAPE = Shape(16, 16, 64)
KERNEL, QUERY = "kernel", "kernel, and reading the relation"
PANDAS, POLARS, ARROW, DUCKDB = "pandas", "polars", "Arrow", "DuckDB"
FRAMES_NOTES = (
    f"`encode_frame` on {SHAPE.dim_in} float32 columns and one column for the set, {FILE_SETS:,} "
    f"sets, rows in random order. {KERNEL}: `fold_rows` and `readout` on tensors that are ready.",
    f"A DuckDB relation is a query, which runs while it is read. {QUERY}: the kernel, and a loop "
    "that reads the relation and does nothing with it. The target is relative to the kernel alone.",
    "CPU time of the process over all threads.",
)


# ---- runs in the measured process ----------------------------------------------------------------


def contenders(rows: int) -> dict[str, Callable[[], object]]:
    """Return the kernel, and `encode_frame` on frames of each library."""
    import duckdb
    import pandas as pd
    import polars as pl
    import pyarrow as pa
    import torch

    import setfold

    torch.set_num_threads(1)
    torch.manual_seed(0)
    pa.set_cpu_count(1)
    encoder = setfold.SlotSetEncoder(SHAPE.dim_in, SHAPE.num_slots, 32, SHAPE.dim_out).eval()
    draw = np.random.default_rng(0)
    elements = draw.standard_normal((rows, SHAPE.dim_in), dtype=np.float32)
    sets = draw.integers(0, FILE_SETS, rows)
    columns = {f"f{place}": column.copy() for place, column in enumerate(elements.T)}
    table = pa.table({"event": sets, **columns})
    connection = duckdb.connect(config={"threads": 1})
    connection.register("registered", table)
    connection.execute("CREATE TABLE event AS SELECT * FROM registered")
    relation = connection.table("event")
    ready = torch.from_numpy(elements), torch.from_numpy(sets)

    @torch.no_grad()
    def kernel() -> object:
        return encoder.readout(encoder.fold_rows(*ready, FILE_SETS))

    def query() -> None:
        kernel()
        for _ in relation.to_arrow_reader(1 << 16):
            pass

    frames = {
        PANDAS: pd.DataFrame({"event": sets, **columns}),
        POLARS: pl.DataFrame({"event": sets, **columns}),
        ARROW: table,
        DUCKDB: relation,
    }
    encode = partial(setfold.encode_frame, encoder, set="event")
    return {
        KERNEL: kernel,
        QUERY: query,
        **{name: partial(encode, frame) for name, frame in frames.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Print CPU seconds of each contender.")
    parser.add_argument("rows", type=int)
    parser.add_argument("rounds", type=int)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    recycle_memory()
    found = contenders(arguments.rows)
    samples: dict[str, list[float]] = {name: [] for name in found}
    for number in range(1 + arguments.rounds):
        for name, run in found.items():
            begin = time.process_time()
            run()
            if number:  # the first round is the warm-up
                samples[name].append(time.process_time() - begin)
    print(json.dumps(samples))


# ---- runs in the benchmark's process -------------------------------------------------------------


def compare(results: Results, plan: Plan) -> None:
    """Measure all contenders, and compare them with the kernel."""
    settings = {"POLARS_MAX_THREADS": "1"}
    rounds = str(plan.frame_rounds)
    (line,) = printed_by("bench.frames", str(plan.frame_rows), rounds, **settings)
    cost = FramesCost(plan.frame_rows, Timings(json.loads(line)))
    results.frames.append(cost)
    for name in (PANDAS, POLARS, ARROW, DUCKDB):
        claim = f"time of encode_frame, {name} / time of the {KERNEL}"
        ratio = cost.timings.ratio(name, KERNEL)
        target = Target(14, claim, ratio, BOUNDS.frames, at_least=False, shape=SHAPE)
        results.targets.append(target)


if __name__ == "__main__":
    main()
