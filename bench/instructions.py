"""The Slot Set Encoder with the kernels of each instruction set, and with those of torch."""

from __future__ import annotations

import torch

from bench.modules import slot_set
from bench.plan import Plan, Shape
from bench.results import TORCH_KERNELS, Cell, Results
from bench.speed import one_pass
from bench.timing import Contender, interleaved
from setfold.native import library

INSTRUCTION_NOTES = (
    f"{TORCH_KERNELS} are setfold's kernels without compiled code; they run wherever no compiled "
    "kernel fits. The other columns are compiled kernels for the instruction sets of this CPU: "
    "base is x86-64 without extensions, v3 has AVX2 and FMA, v4 has AVX-512.",
)


def contenders() -> dict[str, str | None]:
    """Return the instruction sets of this CPU by name, the fastest last; None is plain torch."""
    return {TORCH_KERNELS: None} | {name: name for name in library.available()}


def with_kernels(isa: str | None, run: Contender) -> Contender:
    """Return a function that calls another with the kernels of one instruction set."""

    def chosen() -> None:
        with library.using(isa):
            run()

    return chosen


def compare(results: Results, plan: Plan, shape: Shape, backward: bool) -> None:
    """Time the same passes with each instruction set; there is no target for this."""
    length = max(plan.lengths)
    elements = torch.randn(1, length, shape.dim_in)
    run = one_pass(slot_set(shape, "mean"), elements, backward)
    runs = {name: with_kernels(isa, run) for name, isa in contenders().items()}
    timings = interleaved(runs, plan)
    results.instruction_sets.append(Cell(shape, length, backward, timings, base=TORCH_KERNELS))
