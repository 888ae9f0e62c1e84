"""Compare training on subsets with unbiased and exact gradients of whole sets (beyond the paper).

    python -m experiments run gradients --size small     # about 15 minutes on two cores

Paper: trains on gradients of random subsets and leaves better approximations to future work.
Measured: exact 0.141; whole set at once 0.142; unbiased 0.153; subset 0.167. A step on 4,000 pixels
takes 203 MB at once, 52 MB with exact gradients in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from experiments import report, style
from experiments.memory import cost_of_step
from experiments.recipe import Metrics, Recipe, Run, Size, Task, Training
from experiments.recipes.common import in_pairs, measured, ranking, tested, was_run, with_task
from experiments.recipes.settings import ABLATION, NLL
from experiments.records import Record
from experiments.report import Section
from experiments.statistics import LOG_LOSS, Comparison, Part, Seeds, mean
from experiments.tasks.reconstruction import Reconstruction

# (pixels per set, pixels per chunk)
SETS = {Size.SMOKE: (60, 20), Size.SMALL: (800, 100), Size.PAPER: (1000, 100)}
LARGE = {
    Size.SMOKE: (32, 120),
    Size.SMALL: (64, 4000),
    Size.PAPER: (64, 4000),
}  # (image side, pixels)
BATCH = 16
GRADIENTS = {
    "whole set at once": None,
    "exact": "exact",
    "unbiased": "unbiased",
    "subset": "subset",
}
# CPU milliseconds of a training step of size "small", optimizer included, on one core
MILLISECONDS = {"whole set at once": 23.5, "exact": 32.2, "unbiased": 15.2, "subset": 6.0}
TIMED = "equal time"  # ending of the methods that are trained for as long as "exact"
NOTES = """\
*Whole set at once*: ordinary backpropagation through the whole set. *Exact*: the same gradient,
computed chunk by chunk. *Unbiased*: an unbiased estimate from one chunk, while the forward pass
sees all chunks. *Subset*: forward and backward pass see one chunk only. Peak memory is above the
memory at the start of the process.

The first table compares equally many steps. The second one compares equal CPU time: the cheaper
gradients are trained for more epochs, and the learning rate falls over all of them. A training step
takes {steps}.
The CPU times in the table include validations, and leave out records that have none."""


def measure(model: nn.Module, task: Task, large: Task) -> Metrics:
    """Measure NLL with the whole set, and time and memory of a step on larger sets."""
    cost = cost_of_step(large, BATCH)
    return {**task.evaluate(model, "test"), **cost._asdict()}


def training_of(size: Size, seed: int, gradient: str | None) -> Training[Reconstruction]:
    """Return the training with one kind of gradient."""
    pixels, chunk = SETS[size]
    base = with_task(replace(ABLATION[size], seed=seed), side=32, context=pixels)
    if gradient is None:
        return base
    return with_task(base, gradient=gradient, chunk=chunk)


def longer(training: Training[Reconstruction], method: str) -> Training[Reconstruction]:
    """Return the same training for as much CPU time as exact gradients take."""
    epochs = int(training.epochs * MILLISECONDS["exact"] / MILLISECONDS[method])
    return replace(training, epochs=epochs)


def runs(size: Size, seed: int) -> list[Run]:
    """Train with each kind of gradient, for equally many steps and for equal time."""
    side, pixels = LARGE[size]
    found = []
    shown = dict(list(GRADIENTS.items())[:2]) if size is Size.SMOKE else GRADIENTS
    for method, gradient in shown.items():
        training = training_of(size, seed, gradient)
        large = with_task(training, side=side, context=pixels).task
        found.append(measured(method, training, measure, large=large))
        if method != "exact":
            found.append(tested(f"{method}, {TIMED}", longer(training, method)))
    return found


def values_of(records: Sequence[Record], name: str) -> dict[str, Seeds]:
    """Return {gradient: {seed: value}}."""
    own = report.by(records, "method")
    return {method: report.metric(own[method,], name) for method in GRADIENTS if (method,) in own}


def at_equal_time(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return {gradient: records}, each with about the CPU time of exact gradients."""
    own = report.by(records, "method")
    names = {method: method if method == "exact" else f"{method}, {TIMED}" for method in GRADIENTS}
    return {method: own[name,] for method, name in names.items() if (name,) in own}


def _time_table(records: Sequence[Record]) -> str:
    rows: list[list[report.Cell]] = []
    for method, own in at_equal_time(records).items():
        times = {one.seed: one.cpu_seconds for one in own if one.cpu_seconds is not None}
        assert own[0].training is not None
        cells = [own[0].training["epochs"], f"{mean(times):.0f}" if times else None]
        rows.append([method, *cells, report.metric(own, "nll")])
    headers = ["gradient, equal CPU time", "epochs", "CPU seconds of training", NLL]
    return report.table(headers, rows, digits=3, best=min)


def section(records: Sequence[Record]) -> Section:
    """Plot NLL, and time and memory of a training step."""
    found, seconds, megabytes = (
        values_of(records, name) for name in ("nll", "seconds", "megabytes")
    )
    rows = [
        [
            method,
            report.summary(found[method], 3),
            report.summary(seconds[method], 3),
            report.summary(megabytes[method], 1),
        ]
        for method in found
    ]
    step = f"one step, {_pixels(records):,} pixels"
    headers = ["gradient, equal steps", NLL, f"{step}: CPU seconds", f"{step}: peak memory (MB)"]
    drawing, panels = style.figure(columns=3, height=2.8, titles=["after training", step, step])
    style.dots(panels[0], {"": found}, NLL)
    style.bars(panels[1], {"": seconds}, "CPU seconds")
    style.bars(panels[2], {"": megabytes}, "peak memory (MB)")
    style.legend(drawing)
    tables = [report.table(headers, rows), _time_table(records)]
    times = ", ".join(f"{time:g} ms ({method})" for method, time in MILLISECONDS.items())
    return Section("\n\n".join(tables), {"": drawing}, NOTES.format(steps=times))


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Compare exact and unbiased gradients with those of subsets, and exact ones with the others.

    After equally many steps, and after equal CPU time: a step on a subset is cheaper, so it must be
    allowed more of them.
    """
    pairs = {
        ("exact", "subset"): Part.CLAIM,
        ("unbiased", "subset"): Part.CLAIM,
        ("exact", "unbiased"): Part.ASIDE,
        ("exact", "whole set at once"): Part.ASIDE,
    }
    timed = {method: report.metric(own, "nll") for method, own in at_equal_time(records).items()}
    return [
        *in_pairs(values_of(records, "nll"), pairs, LOG_LOSS, "equal steps"),
        *in_pairs(timed, pairs, LOG_LOSS, "equal CPU time"),
    ]


def headline(records: Sequence[Record]) -> str:
    """Rank the gradients by NLL, and compare the memory of the whole set with exact chunks."""
    memory, told = values_of(records, "megabytes"), ranking(values_of(records, "nll"), best=min)
    if not was_run(memory, "whole set at once", "exact"):
        return told
    whole, exact = (mean(memory[name]) for name in ("whole set at once", "exact"))
    return (
        f"{told}. A step on {_pixels(records):,} pixels takes {whole:.0f} MB at once, {exact:.0f} MB "
        "with exact gradients in chunks"
    )


def _pixels(records: Sequence[Record]) -> int:
    return LARGE[Size(records[0].size)][1]


RECIPE = Recipe(
    number=16,
    name="gradients",
    title="Subset, unbiased and exact gradients",
    claim="""The paper trains on gradients of random subsets and leaves better approximations of the
    whole set's gradient to future work. Ours: exact and unbiased gradients of whole sets, computed
    in chunks, lead to a lower NLL.""",
    runs=runs,
    section=section,
    headline=headline,
    comparisons=comparisons,
    new=True,
    summary="Gradients of whole sets, in chunks, are better than those of random subsets",
    verdict="""Models trained on subsets generalise to whole sets, as the paper says. After equally
    many steps they are worse than models trained on gradients of whole sets, by 0.026 for exact and
    0.014 for unbiased ones, with every seed. At equal CPU time it is the other way round: a step on
    a subset takes a fifth of the time of an exact one, and subsets are better by 0.183 than exact
    and by 0.088 than unbiased gradients, with every seed. We think that the models are far from
    converged, so that more steps are worth more than better gradients. So train on subsets if time
    is the limit, and on whole sets if the number of steps is. Exact gradients in chunks are the
    same as those of the whole set at once, and after equally many steps no difference in NLL is
    shown; they take a quarter of the memory and half more time. Unbiased gradients from one of
    eight chunks take about half the time of the whole set. They are worse than exact ones by 0.012
    after equally many steps and better by 0.094 at equal time.""",
    cut="""The paper has no such experiment. The task is image completion from 800 of the 1024
    pixels of 32 x 32 images, in chunks of 100; 3 epochs on 8,000 images.""",
    minutes=15,
)
