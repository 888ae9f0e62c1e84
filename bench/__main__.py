"""Run the benchmark: python -m bench [--quick] [--only PART] [--out DIR]."""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import (
    aggregations,
    disk,
    files,
    folds,
    frames,
    gradients,
    instructions,
    live,
    memory,
    plots,
    precision,
    report,
    roofline,
    speed,
    streams,
)
from bench.encoders import ENCODERS
from bench.machine import about, described, recycle_memory
from bench.peers import PEERS
from bench.plan import EXTREME_SHAPES, FULL, MIDDLE, NARROW, QUICK, SHAPES, SMALL_LENGTHS, Plan
from bench.results import Results, pass_name
from bench.stores import PostgresStores, SqliteStores

PARTS = (
    "peers",
    "sizes",
    "kernels",
    "encoders",
    "gradients",
    "files",
    "frames",
    "pyg",
    "live",
)
FILE_WIDTH = 145  # columns of output to a pipe or a file


class Step(NamedTuple):
    """A measurement and its name in the progress bar."""

    name: str
    run: Callable[[Results], None]


def steps(plan: Plan, directory: Path, only: str | None = None) -> list[Step]:
    """Return all measurements in order, or one part of them.

    Args:
        plan: sizes and effort.
        directory: folder with space for a large file.
        only: one of `PARTS`; None for all of them.
    """
    parts = {
        "peers": peer_steps(plan),
        "sizes": size_steps(plan),
        "kernels": kernel_steps(plan),
        "encoders": encoder_steps(plan),
        "gradients": gradient_steps(plan, directory),
        "files": file_steps(plan, directory),
        "frames": frame_steps(plan),
        "pyg": group_steps(plan),
        "live": live_steps(plan, directory),
    }
    chosen = parts.values() if only is None else [parts[only]]
    return [Step("load all libraries", _load), *chain(*chosen)]


def peer_steps(plan: Plan) -> list[Step]:
    """Return the measurements of the Slot Set Encoder, its peers and its states."""
    found = [RECYCLE, Step("check that outputs agree", _check)]
    for shape, backward, length in product(SHAPES, (False, True), plan.lengths):
        run = partial(speed.compare_peers, plan=plan, shape=shape, length=length, backward=backward)
        found.append(Step(f"peers, {shape}, {pass_name(backward)}, n = {length:,}", run))
    found.append(Step("sum and mean", partial(speed.judge_sums, plan=plan)))
    if memory.can_measure():
        found.append(Step("memory of peers", partial(memory.measure_peers, plan=plan)))
        found.append(Step("memory of peers", partial(memory.judge_peers, plan=plan)))
    for backward, shape in product((False, True), EXTREME_SHAPES):
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
    return found


def size_steps(plan: Plan) -> list[Step]:
    """Return the measurements of sets of all sizes, and of small calls."""
    found = [RECYCLE]
    for backward, shape in product((False, True), SHAPES):
        run = partial(speed.compare_attention, plan=plan, shape=shape, backward=backward)
        found.append(Step(f"attention at all sizes, {shape}, {pass_name(backward)}", run))
    for shape in SHAPES:
        run = partial(speed.compare_small_training, plan=plan, shape=shape)
        found.append(Step(f"gradients of small sets, {shape}", run))
    for length, shape in product(SMALL_LENGTHS, SHAPES):
        run = partial(streams.compare_small_updates, plan=plan, shape=shape, length=length)
        found.append(Step(f"small updates of {length}, {shape}", run))
    return found


def kernel_steps(plan: Plan) -> list[Step]:
    """Return the measurements of instruction sets and of the limits of the core."""
    found = [RECYCLE]
    for shape, backward in product(SHAPES, (False, True)):
        run = partial(instructions.compare, plan=plan, shape=shape, backward=backward)
        found.append(Step(f"instruction sets, {shape}, {pass_name(backward)}", run))
    for shape in SHAPES:
        run = partial(roofline.measure, plan=plan, shape=shape)
        found.append(Step(f"limits of the core, {shape}", run))
    return found


def encoder_steps(plan: Plan) -> list[Step]:
    """Return the measurements of every encoder of setfold."""
    found = [RECYCLE]
    for shape, backward, length in product(SHAPES, (False, True), plan.lengths):
        run = partial(
            speed.compare_encoders, plan=plan, shape=shape, length=length, backward=backward
        )
        found.append(Step(f"encoders, {shape}, {pass_name(backward)}, n = {length:,}", run))
    found.append(Step("modules of PyG", speed.judge_library_peers))
    for backward, shape in product((False, True), SHAPES):
        run = partial(speed.compare_softmax, plan=plan, shape=shape, backward=backward)
        found.append(Step(f"softmax over elements, {shape}, {pass_name(backward)}", run))
    found.append(Step("slots on grids", partial(speed.compare_grids, plan=plan)))
    for name in folds.passes():
        run = partial(folds.compare_fold, plan=plan, name=name)
        found.append(Step(f"fold and whole set, {name}", run))
    if memory.can_measure():
        found.append(Step("memory of encoders", partial(memory.measure_encoders, plan=plan)))
        found.append(Step("memory of encoders", partial(memory.judge_folds, plan=plan)))
    return found


def gradient_steps(plan: Plan, directory: Path) -> list[Step]:
    """Return the measurements of training steps; none if memory cannot be measured.

    Measured memory decides up to which size autograd on the whole set is tried.
    """
    if not memory.can_measure():
        return []
    found = [RECYCLE, Step("check that gradients agree", _check_gradients)]
    for length in plan.gradient_lengths:
        run = partial(gradients.measure_memory, plan=plan, length=length)
        found.append(Step(f"memory of training steps, n = {length:,}", run))
    for model, length in product(gradients.MODELS, plan.gradient_lengths):
        run = partial(gradients.compare_steps, plan=plan, model=model, length=length)
        found.append(Step(f"training steps, {model.title}, n = {length:,}", run))
    found.append(Step("training steps", partial(gradients.judge, plan=plan)))
    run = partial(disk.measure, plan=plan, directory=directory)
    found.append(Step(f"a training step from disk, n = {plan.disk_length:,}", run))
    return found


def file_steps(plan: Plan, directory: Path) -> list[Step]:
    """Return the measurements of sets in files; none if memory cannot be measured."""
    if not memory.can_measure():
        return []
    run = partial(files.compare, plan=plan, directory=directory)
    return [Step(f"sets in files, n = {plan.file_rows:,}", run)]


def frame_steps(plan: Plan) -> list[Step]:
    """Return the measurements of sets in data frames."""
    run = partial(frames.compare, plan=plan)
    return [Step(f"sets in data frames, n = {plan.frame_rows:,}", run)]


def group_steps(plan: Plan) -> list[Step]:
    """Return the measurements of groups of rows, as in graphs."""
    found = [RECYCLE]
    for layout, backward in product(aggregations.LAYOUTS, (False, True)):
        run = partial(aggregations.compare, plan=plan, layout=layout, backward=backward)
        found.append(Step(f"aggregations of PyG, {layout}, {pass_name(backward)}", run))
    if memory.can_measure():
        run = partial(memory.measure_groups, plan=plan)
        found.append(Step("memory of aggregations", run))
    return [*found, Step("aggregations of PyG", partial(aggregations.judge, plan=plan))]


def live_steps(plan: Plan, directory: Path) -> list[Step]:
    """Return the measurements of live sets. Those of a database share its stores."""
    bench, found = live.LiveBench(plan, directory), []
    for make in (SqliteStores, PostgresStores):
        sets, title = f"{plan.live_sets:,} sets", make.title
        steps = [(f"fill stores with {sets}", partial(bench.open, make=make))]
        for touched in plan.live_batches:
            run = partial(bench.compare, touched=touched)
            steps.append((f"batches of {touched:,} of {sets}", partial(bench.with_stores, run=run)))
        runs = [("reads", bench.read), ("work of a core", bench.work)]
        runs += [("rewriting", bench.rewrite)] if make is SqliteStores else []
        runs += [("writers", bench.write_together)] if make is PostgresStores else []
        steps += [(name, partial(bench.with_stores, run=run)) for name, run in runs]
        found += [Step(f"live sets, {title}, {name}", run) for name, run in steps]
        found.append(Step(f"live sets, {title}, remove stores", lambda _: bench.close()))
    found.append(Step("live sets, JSON", bench.parse))
    found.append(Step(f"live sets, a service and {plan.live_clients} clients", bench.serve))
    return found


def _load(results: Results) -> None:
    """Import all libraries, and exclude their objects from garbage collection."""
    for peer in (PEERS | ENCODERS).values():
        peer.build(NARROW)
    gc.freeze()


def _check(results: Results) -> None:
    speed.check_agreement()


def _check_gradients(results: Results) -> None:
    gradients.check_agreement()


def _recycle(results: Results) -> None:
    results.recycling = recycle_memory()


RECYCLE = Step("make the allocator keep freed memory", _recycle)


def measured(plan: Plan, todo: list[Step], console: Console) -> Results:
    """Run all steps and show progress."""
    results = Results(plan)
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    # no refresh thread, because it would compete with the measured code
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=len(todo))
        for step in todo:
            progress.update(task, description=step.name, refresh=True)
            begin = time.monotonic()
            step.run(results)
            results.durations.append((step.name, round(time.monotonic() - begin, 1)))
            progress.update(task, advance=1)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="use tiny sizes, as a test")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="output folder")
    parser.add_argument("--only", choices=PARTS, help="measure one part")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers and files are removed
    warnings.simplefilter("ignore")  # deprecation warnings of other libraries
    torch.set_num_threads(1)
    torch.manual_seed(0)
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    facts = about(sys.argv[1:])
    console.print(described(facts), highlight=False)
    arguments.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    plan = QUICK if arguments.quick else FULL
    results = measured(plan, steps(plan, arguments.out, arguments.only), console)
    facts["minutes"] = round((time.monotonic() - begin) / 60, 1)
    report.show(results, facts, console)
    pictures = plots.write(results, arguments.out)
    written = [*report.write(results, facts, pictures, arguments.out), *pictures]
    if arguments.quick:
        console.print("Quick run: the sizes are too small for meaningful verdicts.")
    files_written = f"{', '.join(written)} to {arguments.out}"
    console.print(f"Wrote {files_written} after {facts['minutes']} minutes.", highlight=False)


if __name__ == "__main__":
    main()
