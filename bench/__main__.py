"""Run the benchmark: python -m bench [--quick] [--out DIR]."""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import folds, memory, plots, precision, report, speed, streams
from bench.encoders import ENCODERS
from bench.machine import about, described, recycle_memory
from bench.peers import PEERS
from bench.plan import FULL, MIDDLE, NARROW, QUICK, SHAPES, SMALL_LENGTHS, Plan
from bench.results import Results, pass_name

FILE_WIDTH = 145  # columns of what is printed into a pipe or a file


class Step(NamedTuple):
    """One thing to measure, and what to say meanwhile."""

    name: str
    run: Callable[[Results], None]


def steps(plan: Plan) -> list[Step]:
    """Everything that is measured, in order; the order of targets in the tables follows from it."""
    found = [Step("load all libraries", _load), Step("do all compute the same?", _check)]
    for shape, backward in product(SHAPES, (False, True)):
        run = partial(speed.compare_by_default, plan=plan, shape=shape, backward=backward)
        found.append(Step(f"default allocator, {shape}, {pass_name(backward)}", run))
    found.append(Step("from here on, memory is recycled", _recycle))
    for shape, backward, length in product(SHAPES, (False, True), plan.lengths):
        run = partial(speed.compare_peers, plan=plan, shape=shape, length=length, backward=backward)
        found.append(Step(f"peers, {shape}, {pass_name(backward)}, n = {length:,}", run))
    found.append(Step("sum and mean", partial(speed.judge_sums, plan=plan)))
    if memory.can_measure():
        found.append(Step("memory (a few minutes)", partial(memory.measure, plan=plan)))
        found.append(Step("memory", partial(memory.judge, plan=plan)))
    for backward, shape in product((False, True), SHAPES):
        run = partial(speed.compare_extrema, plan=plan, shape=shape, backward=backward)
        found.append(Step(f"max and min, {shape}, {pass_name(backward)}", run))
    for shape in SHAPES:
        run = partial(precision.compare_states, plan=plan, shape=shape)
        found.append(Step(f"float64 and float32 states, {shape}", run))
    found.append(
        Step("rounding errors of a long stream", partial(precision.measure_error, plan=plan))
    )
    for shape in (MIDDLE, NARROW):
        run = partial(streams.compare_ragged, plan=plan, shape=shape)
        found.append(Step(f"short sets, {shape}", run))
    for length, shape in product(SMALL_LENGTHS, SHAPES):
        run = partial(streams.compare_small_updates, plan=plan, shape=shape, length=length)
        found.append(Step(f"small updates of {length}, {shape}", run))
    return found + encoder_steps(plan)


def encoder_steps(plan: Plan) -> list[Step]:
    """What is measured on every encoder of setfold."""
    found = []
    for shape, backward, length in product(SHAPES, (False, True), plan.lengths):
        run = partial(
            speed.compare_encoders, plan=plan, shape=shape, length=length, backward=backward
        )
        found.append(Step(f"encoders, {shape}, {pass_name(backward)}, n = {length:,}", run))
    for backward, shape in product((False, True), SHAPES):
        run = partial(speed.compare_softmax, plan=plan, shape=shape, backward=backward)
        found.append(Step(f"softmax over elements, {shape}, {pass_name(backward)}", run))
    for name in folds.passes():
        run = partial(folds.compare_fold, plan=plan, name=name)
        found.append(Step(f"fold and whole set, {name}", run))
    return found


def _load(results: Results) -> None:
    """Import what peers need, and have garbage collections, of which there are many, pass it over."""
    for peer in (PEERS | ENCODERS).values():
        peer.build(NARROW)
    gc.freeze()


def _check(results: Results) -> None:
    speed.check_agreement()


def _recycle(results: Results) -> None:
    results.recycling = recycle_memory()


def measured(plan: Plan, console: Console) -> Results:
    """Take all steps, showing which one is under way."""
    results = Results(plan)
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    todo = steps(plan)
    # drawn once per step and by no thread of its own, which would compete with what is timed
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=len(todo))
        for step in todo:
            progress.update(task, description=step.name, refresh=True)
            step.run(results)
            progress.update(task, advance=1)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where results go")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # what peers' libraries deprecate is not this run's concern
    torch.set_num_threads(1)
    torch.manual_seed(0)
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    facts = about(sys.argv[1:])
    console.print(described(facts), highlight=False)
    begin = time.monotonic()
    results = measured(QUICK if arguments.quick else FULL, console)
    facts["minutes"] = round((time.monotonic() - begin) / 60, 1)
    report.show(results, facts, console)
    arguments.out.mkdir(parents=True, exist_ok=True)
    written = [*report.write(results, facts, arguments.out), *plots.write(results, arguments.out)]
    if arguments.quick:
        console.print("Quick run: sizes are too small for the verdicts to mean anything.")
    what = f"{', '.join(written)} in {arguments.out}"
    console.print(f"{what}, after {facts['minutes']} minutes.", highlight=False)


if __name__ == "__main__":
    main()
