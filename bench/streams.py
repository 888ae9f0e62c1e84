"""Targets 5 and 6: many short sets at once, and many small updates of one set."""

from __future__ import annotations

import torch

from bench.instructions import with_kernels
from bench.modules import Literal, slot_set
from bench.plan import BOUNDS, LONGEST_SHORT_SET, NARROW, Plan, Shape, power
from bench.results import TORCH_KERNELS, Results, Target
from bench.timing import Contender, interleaved


def compare_ragged(results: Results, plan: Plan, shape: Shape) -> None:
    """Target 5: one ragged update of many short sets, compared with one update per set.

    For narrow sets, it is also compared with the same call of the torch kernels.
    The rows of the ragged call are in random order. The loop gets its sets already separated, and
    all its updates start from the same empty state, so that derived tensors are computed once.
    """
    encoder = slot_set(shape, "mean")
    lengths = torch.randint(0, LONGEST_SHORT_SET + 1, (plan.short_sets,))
    index = torch.arange(plan.short_sets).repeat_interleave(lengths)
    elements = torch.randn(len(index), shape.dim_in)
    sets = [part.unsqueeze(0) for part in elements.split(lengths.tolist())]
    order = torch.randperm(len(index))
    shuffled, index = elements[order], index[order]
    one, all_sets = encoder.initial_state(), encoder.initial_state(plan.short_sets)

    def ragged() -> None:
        with torch.no_grad():
            encoder.update(all_sets, shuffled, index=index)

    def loop() -> None:
        with torch.no_grad():
            for part in sets:
                encoder.update(one, part)

    rivals: dict[str, tuple[Contender, float]] = {"a loop": (loop, BOUNDS.ragged)}
    if shape == NARROW:
        rivals[TORCH_KERNELS] = (with_kernels(None, ragged), BOUNDS.ragged_kernel)
    runs = {name: run for name, (run, _) in rivals.items()}
    timings = interleaved({"ragged": ragged, **runs}, plan)
    for name, (_, bound) in rivals.items():
        claim = f"{power(plan.short_sets)} sets of 0-{LONGEST_SHORT_SET} vs {name}"
        ratio = timings.ratio(name, "ragged")
        ours, theirs = (timings.seconds(run) * 1e3 for run in ("ragged", name))
        detail = f"{ours:.3g} ms, {name} {theirs:.3g} ms"
        results.targets.append(Target(5, claim, ratio, bound, shape=shape, detail=detail))


def compare_small_updates(results: Results, plan: Plan, shape: Shape, length: int) -> None:
    """Target 6: a chain of small updates, compared with the literal algorithm and a running sum."""
    encoder, literal = slot_set(shape, "sum"), Literal(shape, "sum")
    literal.load_state_dict(encoder.state_dict())
    chunks = torch.randn(plan.small_updates, 1, length, shape.dim_in).unbind()
    empty = encoder.initial_state()

    def ours() -> None:
        state = empty
        with torch.no_grad():
            for chunk in chunks:
                state = encoder.update(state, chunk)

    def theirs() -> None:
        total = torch.zeros(1, shape.num_slots, shape.dim_out)
        with torch.no_grad():
            for chunk in chunks:
                total = total + literal(chunk)

    timings = interleaved({"ours": ours, "theirs": theirs}, plan)
    claim = f"update of {length} vs literal step"
    micro = 1e6 / plan.small_updates
    times = {name: timings.seconds(name) * micro for name in ("ours", "theirs")}
    detail = f"{times['ours']:.0f} µs, literal {times['theirs']:.0f} µs"
    ratio = timings.ratio("theirs", "ours")
    results.targets.append(Target(6, claim, ratio, BOUNDS.small_update, shape=shape, detail=detail))
