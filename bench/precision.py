"""Target 4: cost of float64 states, and their error after a long stream."""

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
from bench.results import TORCH_KERNELS, Results, Target
from bench.timing import Contender, interleaved
from setfold.native import library

UPDATES = 50  # updates per call, so that the overhead of a call is small
HOLDERS = (  # modules that import the function for the precision of totals
    "setfold.kernels.modes",
    "setfold.kernels.sums",
    "setfold.kernels.replay",
    "setfold.core.statistic",
)


class Accumulator:
    """Replaces setfold's function for the precision of totals, so that it can be changed."""

    dtype = torch.float64

    def __call__(self, device: torch.device) -> torch.dtype:
        return self.dtype


@contextmanager
def chosen_accumulator() -> Iterator[Accumulator]:
    """Allow other precisions than float64, the only one in the library, for totals.

    Plain torch computes both: the compiled kernels add up in float64 alone.
    """
    accumulator = Accumulator()
    with ExitStack() as stack:
        stack.enter_context(library.using(None))
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
        claim = f"float64 vs float32, {TORCH_KERNELS}, {what}"
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
                f"the state is not {dtype}: {HOLDERS} no longer determine its precision."
            )

    return run


def measure_error(results: Results, plan: Plan) -> None:
    """Stream many chunks through a float32 model and compare with float64.

    Each chunk of a pool occurs equally often, in random order. The float64 reference is the sum
    over the pool times the number of visits, while the float32 model processes every chunk.
    """
    encoder = slot_set(NARROW, ["sum", "mean"])  # one state with two readouts
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
        claim = f"error of the {name}, {power(elements)} elements in chunks of {power(CHUNK)}"
        bound = BOUNDS.relative_error
        results.targets.append(
            Target(4, claim, float(error), bound, unit="", at_least=False, shape=NARROW)
        )


def _reference(encoder: setfold.SlotSetEncoder, pool: Tensor, visits: int) -> Tensor:
    """Return the float64 readout of a stream with `visits` copies of each chunk of the pool."""
    precise = copy.deepcopy(encoder).double()
    state = precise.initial_state()
    for chunk in pool:
        state = precise.update(state, chunk.double())
    totals = {name: tuple(p * visits for p in parts) for name, parts in state.statistics.items()}
    return precise.readout(state.with_statistics(totals, state.count * visits))
