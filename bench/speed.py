"""Targets 1, 3 and 7: peers and encoders on whole sets, forward and forward+backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from bench.encoders import ENCODERS, GRIDS, SOFTMAX, on_grid
from bench.modules import Literal, slot_set
from bench.peers import ATTENTION, LITERAL, OURS, PEERS, Peer
from bench.plan import BOUNDS, SHAPES, Plan, Shape, power
from bench.results import Cell, Results, Target, pass_name
from bench.timing import Contender, Timings, interleaved

SUMS, EXTREMA = ("sum", "mean"), ("max", "min")
AGREEMENT = 1e-4  # largest relative difference of outputs of comparable modules


def one_pass(module: nn.Module, elements: Tensor, backward: bool) -> Contender:
    """Return a function that calls a module; with backward, also computes all gradients."""
    return one_encoding(module, partial(module, elements), backward)


def one_encoding(module: nn.Module, encode: Callable[[], Tensor], backward: bool) -> Contender:
    """Return a function that calls `encode`; with backward, also computes all gradients."""
    module.train(backward)

    def forward() -> None:
        with torch.no_grad():
            encode()

    def train() -> None:
        module.zero_grad(set_to_none=True)
        encode().square().sum().backward()

    return train if backward else forward


def compare_peers(results: Results, plan: Plan, shape: Shape, length: int, backward: bool) -> None:
    """Time all peers that can process n elements."""
    timings = _time(PEERS.values(), plan, shape, length, backward)
    results.cells.append(Cell(shape, length, backward, timings))


def compare_encoders(
    results: Results, plan: Plan, shape: Shape, length: int, backward: bool
) -> None:
    """Time every encoder that can process n elements, right before its library peer."""
    timings = _time(ENCODERS.values(), plan.for_encoders, shape, length, backward)
    results.encoder_cells.append(Cell(shape, length, backward, timings))


def compare_softmax(results: Results, plan: Plan, shape: Shape, backward: bool) -> None:
    """Target 7: cost of a softmax over elements, which rescales its sums; slots need not."""
    length = max(plan.lengths)
    timings = _time((PEERS[OURS], ENCODERS[SOFTMAX]), plan, shape, length, backward)
    claim = f"{SOFTMAX}'s time / {OURS}'s, {pass_name(backward)}, n = {power(length)}"
    ratio = timings.ratio(SOFTMAX, OURS)
    results.targets.append(Target(7, claim, ratio, BOUNDS.softmax, at_least=False, shape=shape))


def _time(peers: Iterable[Peer], plan: Plan, shape: Shape, length: int, backward: bool) -> Timings:
    elements = torch.randn(1, length, shape.dim_in)
    passes = {
        peer.name: one_pass(peer.build(shape), elements, backward)
        for peer in peers
        if peer.bears(shape, length)
    }
    return interleaved(passes, plan)


def judge_sums(results: Results, plan: Plan) -> None:
    """Target 1: sum and mean on the largest sets, from the measured cells."""
    longest = [cell for cell in results.cells if cell.length == max(plan.lengths)]
    for cell in sorted(longest, key=lambda cell: cell.backward):
        bounds = BOUNDS.training if cell.backward else BOUNDS.forward
        wanted = {"literal": bounds[cell.shape], "SDPA": BOUNDS.attention}
        for whom, bound in wanted.items():
            claim = f"{pass_name(cell.backward)} vs {whom}, n = {power(cell.length)}"
            ratios = _advantages(cell.timings, SUMS, whom)
            by_default = results.defaults.get((f"sums, {whom}", cell.shape, cell.backward))
            results.targets.append(_worst(1, claim, ratios, bound, cell.shape, by_default))


def compare_small(results: Results, plan: Plan, shape: Shape) -> None:
    """Target 11: small sets, where calls take longer than arithmetic."""
    for length in plan.small_lengths:
        timings = _time((PEERS[OURS], PEERS[ATTENTION]), plan, shape, length, backward=False)
        claim = f"forward vs SDPA, n = {length:,}"
        bound = BOUNDS.small_forward[length > min(plan.small_lengths)]
        ratio = timings.ratio(ATTENTION, OURS)
        micro = {name: timings.seconds(name) * 1e6 for name in (OURS, ATTENTION)}
        detail = f"{micro[OURS]:.0f} µs, SDPA {micro[ATTENTION]:.0f} µs"
        results.targets.append(Target(11, claim, ratio, bound, shape=shape, detail=detail))
    length = min(plan.small_lengths)
    timings = _time((PEERS[OURS], PEERS[LITERAL]), plan, shape, length, backward=True)
    claim = f"forward+backward vs literal, n = {length:,}"
    micro = {name: timings.seconds(name) * 1e6 for name in (OURS, LITERAL)}
    detail = f"{micro[OURS]:.0f} µs, literal {micro[LITERAL]:.0f} µs"
    ratio = timings.ratio(LITERAL, OURS)
    results.targets.append(
        Target(11, claim, ratio, BOUNDS.small_training, shape=shape, detail=detail)
    )


def compare_grids(results: Results, plan: Plan) -> None:
    """Target 12: an element on a grid touches a few slots, however many there are."""
    length = max(plan.lengths)
    for few, many in GRIDS:
        elements = torch.rand(1, length, len(few) + 1)
        passes = {str(shape): one_pass(on_grid(shape), elements, False) for shape in (few, many)}
        timings = interleaved(passes, plan)
        claim = (
            f"time with {prod(many):,} slots / with {prod(few):,}, {len(few)}-D, {power(length)}"
        )
        nanos = [timings.seconds(str(shape)) / length * 1e9 for shape in (few, many)]
        detail = f"{nanos[1]:.0f} ns and {nanos[0]:.0f} ns per element"
        ratio = timings.ratio(str(many), str(few))
        results.targets.append(
            Target(12, claim, ratio, BOUNDS.many_slots, at_least=False, detail=detail)
        )


def compare_extrema(results: Results, plan: Plan, shape: Shape, backward: bool) -> None:
    """Target 3: max and min compared with the literal form, which stores n x K x d_out numbers."""
    timings = _time_aggregates(EXTREMA, plan, shape, plan.extreme_length, backward)
    claim = f"{pass_name(backward)} vs literal, n = {power(plan.extreme_length)}"
    bound = BOUNDS.extreme_training if backward else BOUNDS.extreme_forward
    by_default = results.defaults.get(("extrema, literal", shape, backward))
    ratios = _advantages(timings, EXTREMA, "literal")
    results.targets.append(_worst(3, claim, ratios, bound, shape, by_default))


def compare_by_default(results: Results, plan: Plan, shape: Shape, backward: bool) -> None:
    """Measure targets 1 and 3 with the default allocator, for information only."""
    fewest, most = plan.rounds
    plan = replace(plan, rounds=(min(fewest, 3), min(most, 5)), budget=plan.budget / 2)
    sums = _time_aggregates(SUMS, plan, shape, max(plan.lengths), backward)
    extrema = _time_aggregates(EXTREMA, plan, shape, plan.extreme_length, backward)
    for kind, timings, aggregates, whom in (
        ("sums", sums, SUMS, "literal"),
        ("sums", sums, SUMS, "SDPA"),
        ("extrema", extrema, EXTREMA, "literal"),
    ):
        ratios = _advantages(timings, aggregates, whom)
        results.defaults[f"{kind}, {whom}", shape, backward] = min(ratios.values())


def _time_aggregates(
    aggregates: tuple[str, ...], plan: Plan, shape: Shape, length: int, backward: bool
) -> Timings:
    """Time setfold and the literal algorithm; for sums also attention."""
    elements = torch.randn(1, length, shape.dim_in)
    modules: dict[str, nn.Module] = {}
    for name in aggregates:
        modules[f"setfold {name}"] = slot_set(shape, name)
        modules[f"literal {name}"] = Literal(shape, name)
    if aggregates == SUMS:
        modules[ATTENTION] = PEERS[ATTENTION].build(shape)
    passes = {name: one_pass(module, elements, backward) for name, module in modules.items()}
    return interleaved(passes, plan)


def _advantages(timings: Timings, aggregates: tuple[str, ...], whom: str) -> dict[str, float]:
    """Return the speed of setfold relative to a peer, by aggregate."""
    peer = {name: ATTENTION if whom == "SDPA" else f"literal {name}" for name in aggregates}
    return {name: timings.ratio(peer[name], f"setfold {name}") for name in aggregates}


def check_agreement() -> None:
    """Raise unless setfold and the literal algorithm compute the same."""
    for shape in SHAPES:
        for aggregate in (*SUMS, *EXTREMA):
            encoder, literal = slot_set(shape, aggregate), Literal(shape, aggregate)
            literal.load_state_dict(encoder.state_dict())
            elements = torch.randn(1, 300, shape.dim_in)
            with torch.no_grad():
                found, wanted = encoder(elements), literal(elements)
            error = float((found - wanted).abs().max() / wanted.abs().max())
            if error > AGREEMENT:
                raise RuntimeError(
                    f"setfold and the literal algorithm differ by {error:.1e} in {aggregate}, "
                    f"shape {shape}, so their times are not comparable."
                )


def _worst(
    number: int,
    claim: str,
    ratios: dict[str, float],
    bound: float,
    shape: Shape,
    by_default: float | None,
) -> Target:
    detail = ", ".join(f"{name} {ratio:.2f}×" for name, ratio in ratios.items())
    worst = min(ratios.values())
    return Target(number, claim, worst, bound, shape=shape, by_default=by_default, detail=detail)
