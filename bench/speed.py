"""Targets 1, 3, 7, 11, 12 and 13: whole sets, forward and forward+backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from math import prod

import torch
from torch import Tensor, nn

from bench.encoders import ENCODERS, GRIDS, OF_PYG, SOFTMAX, on_grid
from bench.modules import Literal, slot_set
from bench.peers import ATTENTION, LITERAL, OURS, PEERS, Peer
from bench.plan import (
    BOUNDS,
    EXTREME_SHAPES,
    FLOAT_BYTES,
    GRAPH_LIMIT,
    SHAPES,
    SMALL_ENCODED,
    SMALL_TRAINED,
    Plan,
    Shape,
    power,
)
from bench.results import MEGABYTE, Cell, Results, Target, pass_name
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
        wanted = {"literal": bounds[cell.shape], "SDPA": BOUNDS.attention[cell.shape]}
        for whom, bound in wanted.items():
            claim = f"{pass_name(cell.backward)} vs {whom}, n = {power(cell.length)}"
            ratios = _advantages(cell.timings, SUMS, whom)
            results.targets.append(_worst(1, claim, ratios, bound, cell.shape))


def compare_attention(results: Results, plan: Plan, shape: Shape, backward: bool) -> None:
    """Target 11: attention is not faster at any set size; small calls are mostly overhead."""
    found = {
        length: _time((PEERS[OURS], PEERS[ATTENTION]), plan, shape, length, backward)
        for length in plan.attention_lengths
        if not backward or _attention_graph(shape, length) <= GRAPH_LIMIT
    }
    first, *_, last = found
    claim = f"{pass_name(backward)} vs SDPA, n = {power(first)} to {power(last)}"
    ratios = {f"n = {power(n)}:": timings.ratio(ATTENTION, OURS) for n, timings in found.items()}
    results.targets.append(_worst(11, claim, ratios, BOUNDS.attention_anywhere, shape))
    if not backward:
        claim = f"{pass_name(backward)} vs SDPA, n = {SMALL_ENCODED:,}"
        results.targets.append(
            _small(claim, found[SMALL_ENCODED], ATTENTION, BOUNDS.small_forward, shape)
        )


def _attention_graph(shape: Shape, length: int) -> float:
    """Return the megabytes of keys, values and their gradients."""
    return 4 * length * shape.dim_out * FLOAT_BYTES / MEGABYTE


def compare_small_training(results: Results, plan: Plan, shape: Shape) -> None:
    """Target 11: gradients of one small set."""
    timings = _time((PEERS[OURS], PEERS[LITERAL]), plan, shape, SMALL_TRAINED, backward=True)
    claim = f"{pass_name(True)} vs literal, n = {SMALL_TRAINED}"
    results.targets.append(_small(claim, timings, LITERAL, BOUNDS.small_training, shape))


def _small(claim: str, timings: Timings, peer: str, bound: float, shape: Shape) -> Target:
    ours, theirs = (timings.seconds(name) * 1e6 for name in (OURS, peer))
    detail = f"{ours:.0f} µs, {peer} {theirs:.0f} µs"
    return Target(11, claim, timings.ratio(peer, OURS), bound, shape=shape, detail=detail)


def judge_library_peers(results: Results) -> None:
    """Target 13: setfold's versions of PyG's modules, from the measured cells."""
    for (ours, theirs), shape in product(OF_PYG, SHAPES):
        ratios = {
            cell.column: cell.timings.ratio(theirs.name, ours.name)
            for cell in results.encoder_cells
            if cell.shape == shape and ours.name in cell.timings.samples
        }
        claim, bound = f"{ours.name} vs {theirs.name}", BOUNDS.library_peers
        results.targets.append(_worst(13, claim, ratios, bound, shape))


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
    elements = torch.randn(1, plan.extreme_length, shape.dim_in)
    modules: dict[str, nn.Module] = {}
    for name in EXTREMA:
        modules[f"setfold {name}"] = slot_set(shape, name)
        modules[f"literal {name}"] = Literal(shape, name)
    passes = {name: one_pass(module, elements, backward) for name, module in modules.items()}
    ratios = _advantages(interleaved(passes, plan), EXTREMA, "literal")
    claim = f"{pass_name(backward)} vs literal, n = {power(plan.extreme_length)}"
    bounds = BOUNDS.extreme_training if backward else BOUNDS.extreme_forward
    results.targets.append(_worst(3, claim, ratios, bounds[shape], shape))


def _advantages(timings: Timings, aggregates: tuple[str, ...], whom: str) -> dict[str, float]:
    """Return the speed of setfold relative to a peer, by aggregate."""
    peer = {name: ATTENTION if whom == "SDPA" else f"literal {name}" for name in aggregates}
    return {name: timings.ratio(peer[name], f"setfold {name}") for name in aggregates}


def check_agreement() -> None:
    """Raise unless setfold and the literal algorithm compute the same."""
    for shape in EXTREME_SHAPES:
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


def _worst(number: int, claim: str, ratios: dict[str, float], bound: float, shape: Shape) -> Target:
    detail = ", ".join(f"{name} {ratio:.2f}×" for name, ratio in ratios.items())
    return Target(number, claim, min(ratios.values()), bound, shape=shape, detail=detail)
