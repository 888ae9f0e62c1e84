"""Target 4: what a float64 state costs, and how little it errs after a long stream."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

import setfold
from bench.modules import slot_set
from bench.plan import BOUNDS, CHUNK, NARROW, Plan, Shape, power
from bench.results import Results, Target
from bench.timing import Contender, interleaved

UPDATES = 50  # of one chunk each, in a chain, so that a call is longer than its overhead
HOLDERS = (  # the modules that look up the precision of totals under their own name
    "setfold.kernels.precision",
    "setfold.kernels.sums",
    "setfold.kernels.replay",
    "setfold.core.statistic",
)


class Accumulator:
    """Stands in for setfold's choice of the totals' precision, so that it can be changed."""

    dtype = torch.float64

    def __call__(self, device: torch.device) -> torch.dtype:
        return self.dtype


@contextmanager
def chosen_accumulator() -> Iterator[Accumulator]:
    """The library has float64 states only; within this context any precision can be chosen."""
    accumulator = Accumulator()
    with ExitStack() as stack:
        for holder in HOLDERS:
            stack.enter_context(mock.patch(f"{holder}.accumulator_dtype", accumulator))
        yield accumulator


def compare_states(results: Results, plan: Plan, shape: Shape) -> None:
    """Time the same updates with float64 and with float32 totals."""
    encoder = slot_set(shape, "mean")
    few = torch.randn(UPDATES, 1, CHUNK, shape.dim_in).unbind()
    many = torch.randn(1, 1, plan.state_length, shape.dim_in).unbind()
    sizes = {f"updates of {power(CHUNK)}": few, f"update of {power(plan.state_length)}": many}
    for what, chunks in sizes.items():
        with chosen_accumulator() as accumulator:
            contenders = {
                str(dtype): _chain(encoder, chunks, accumulator, dtype)
                for dtype in (torch.float64, torch.float32)
            }
            timings = interleaved(contenders, plan)
        ratio = timings.ratio(str(torch.float64), str(torch.float32))
        claim = f"float64 vs float32, {what}"
        target = Target(4, claim, ratio, BOUNDS.state_cost, at_least=False, shape=shape)
        results.targets.append(target)


def _chain(
    encoder: setfold.SlotSetEncoder,
    chunks: tuple[Tensor, ...],
    accumulator: Accumulator,
    dtype: torch.dtype,
) -> Contender:
    accumulator.dtype = dtype
    empty = encoder.initial_state()

    def run() -> None:
        accumulator.dtype = dtype
        state = empty
        with torch.no_grad():
            for chunk in chunks:
                state = encoder.update(state, chunk)
        if state.statistics["sum"][0].dtype != dtype:
            raise RuntimeError(
                f"the state is not {dtype}: {HOLDERS} no longer decide its precision."
            )

    return run


def measure_error(results: Results, plan: Plan) -> None:
    """Stream many chunks through a float32 model and compare with the same in float64.

    A pool of chunks is visited in random order, each chunk equally often: then the float64
    reference is the pool's sums times the number of visits, but the float32 model takes every step.
    """
    encoder = slot_set(NARROW, ["sum", "mean"])  # one state, read twice
    pool = torch.empty(plan.pool_chunks, 1, CHUNK, NARROW.dim_in).uniform_()
    order = torch.arange(plan.pool_chunks).repeat(plan.pool_visits)
    order = order[torch.randperm(len(order))]
    with torch.no_grad():
        state = encoder.initial_state()
        for number in order.tolist():
            state = encoder.update(state, pool[number])
        found = encoder.readout(state).double()
        wanted = _reference(encoder, pool, plan.pool_visits)
    halves = {"sum": slice(None, NARROW.dim_out), "mean": slice(NARROW.dim_out, None)}
    elements = len(order) * CHUNK
    for name, half in halves.items():
        error = (found - wanted)[..., half].abs().max() / wanted[..., half].abs().max()
        claim = f"error of the {name}, {power(elements)} in {power(CHUNK)}s"
        bound = BOUNDS.relative_error
        results.targets.append(
            Target(4, claim, float(error), bound, unit="", at_least=False, shape=NARROW)
        )


def _reference(encoder: setfold.SlotSetEncoder, pool: Tensor, visits: int) -> Tensor:
    """The readout in float64 of a stream in which each chunk of the pool comes `visits` times."""
    precise = copy.deepcopy(encoder).double()
    state = precise.initial_state()
    for chunk in pool:
        state = precise.update(state, chunk.double())
    totals = {name: tuple(p * visits for p in parts) for name, parts in state.statistics.items()}
    return precise.readout(state.with_statistics(totals, state.count * visits))
