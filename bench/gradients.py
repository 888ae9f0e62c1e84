"""Target 9: one training step on sets of any size, for each kind of gradient.

Ordinary autograd uses the whole set and keeps a graph of all elements; it is tried up to a memory
limit. Folds read chunks: from a list where time is measured, and from a stream that generates
chunks on demand where memory is measured, so that the set is never in memory.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench import memory
from bench.folds import GRADIENTS, one_fold
from bench.modules import FEATURES
from bench.peers import LITERAL, LITERAL_ON_FEATURES, ON_FEATURES, OURS, OURS_ON_FEATURES, PEERS
from bench.plan import BOUNDS, GRADIENT_CHUNK, GRAPH_LIMIT, NARROW, Plan, power
from bench.results import MemoryCase, Results, StepCost, Target, Way
from bench.speed import AGREEMENT, one_pass
from bench.timing import Contender, interleaved

ALL_AT_ONCE = "autograd, model(elements)"
BY_HAND = "autograd, literal formula"
ON_LONG_SETS = (
    Way.EXACT,
    Way.TENSOR,
    Way.UNBIASED_1,
    Way.UNBIASED_16,
    Way.SUBSET,
)  # these steps can take a minute
AGREEMENT_LENGTH = 1_000


class Model(NamedTuple):
    """A trained model.

    Attributes:
        title: name in tables.
        ours, literal: names of setfold's module and of the same in plain PyTorch.
        rivals: variants of autograd that exact gradients are compared with.
        bound: largest allowed time of exact gradients, as a multiple of each rival's time.
    """

    title: str
    ours: str
    literal: str
    rivals: tuple[str, ...]
    bound: float

    @property
    def lines(self) -> dict[str, tuple[str, Way]]:
        """Rows of the tables and lines of the plot: {label: (module name, way)}."""
        autograd = {ALL_AT_ONCE: (self.ours, Way.WHOLE), BY_HAND: (self.literal, Way.WHOLE)}
        return autograd | {str(way): (self.ours, way) for way in GRADIENTS}


ALONE = Model("encoder alone", OURS, LITERAL, (BY_HAND,), BOUNDS.exact_alone)
ON_NETWORK = Model(
    "encoder on features",
    OURS_ON_FEATURES,
    LITERAL_ON_FEATURES,
    (ALL_AT_ONCE, BY_HAND),
    BOUNDS.exact_on_features,
)
MODELS = (ALONE, ON_NETWORK)

GRADIENT_NOTES = (
    "A training step encodes one set and computes the gradients of all weights. The feature "
    f"network is Linear(d, {FEATURES}), ReLU, Linear({FEATURES}, {FEATURES}). Literal is Algorithm "
    "1 in plain PyTorch with the same network, which is what one would write without setfold.",
    f"Folds read chunks of {GRADIENT_CHUNK:,} elements: from a list where time is measured, and "
    "from a stream that generates chunks on demand where memory is measured. One tensor is split "
    "by setfold. Its memory and autograd's are in addition to the whole set, which takes "
    f"{NARROW.dim_in * 4} MB for a million elements.",
    f"Whole sets whose graph would exceed {GRAPH_LIMIT / 1e3:.0f} GB, extrapolated from a smaller "
    "set, are omitted. Unbiased is omitted if a set has fewer chunks than it draws.",
    "Exact computes the same gradient as autograd without the graph, and reads the set twice. "
    "Unbiased is correct in expectation. Subset uses one chunk for the encoding, too, so it "
    "computes a different gradient.",
)


# ---- measurements --------------------------------------------------------------------------------


def check_agreement() -> None:
    """Raise unless autograd, the literal formula and a fold give the same gradients."""
    elements = torch.randn(1, AGREEMENT_LENGTH, NARROW.dim_in)
    chunks = elements.split(AGREEMENT_LENGTH // 3, 1)
    for model in MODELS:
        ours, literal = _built(model)
        literal.load_state_dict(ours.state_dict())
        wanted = _gradients(ours, one_pass(ours, elements, True))
        for name, module, step in (
            (BY_HAND, literal, one_pass(literal, elements, True)),
            (Way.EXACT, ours, one_fold(ours, chunks, True)),
        ):
            found = _gradients(module, step)
            error = float((found - wanted).abs().max() / wanted.abs().max())
            if error > AGREEMENT:
                raise RuntimeError(
                    f"{model.title}: gradients of '{name}' and '{ALL_AT_ONCE}' differ by "
                    f"{error:.1e}, so their times are not comparable."
                )


def _gradients(module: nn.Module, step: Contender) -> Tensor:
    """Run one step and return the gradients of all weights as one vector, sorted by name."""
    step()
    named = sorted(module.named_parameters())
    return torch.cat([p.grad.flatten() for _, p in named if p.grad is not None])


def measure_memory(results: Results, plan: Plan, length: int) -> None:
    """Measure the peak memory of all planned steps; smaller sets must be measured first."""
    cases = [
        MemoryCase(name, way, length) for model in MODELS for name, way in model.lines.values()
    ]
    memory.measure(results, [case for case in cases if asked_for(case, results, plan)])


def asked_for(case: MemoryCase, results: Results, plan: Plan) -> bool:
    """Return whether to measure a step: it must fit into the limits of time and memory."""
    if case.way is Way.WHOLE:
        return _predicted(case, results, plan) <= GRAPH_LIMIT
    if GRADIENTS[case.way].samples > math.ceil(case.length / GRADIENT_CHUNK):
        return False
    return case.length <= plan.gradient_limit or case.way in ON_LONG_SETS


def _predicted(case: MemoryCase, results: Results, plan: Plan) -> float:
    """Extrapolate megabytes from the next smaller set; NaN if that was not measured."""
    shorter = max((n for n in plan.gradient_lengths if n < case.length), default=None)
    if shorter is None:
        return 0.0
    return results.megabytes(case.name, case.way, shorter) * case.length / shorter


def compare_steps(results: Results, plan: Plan, model: Model, length: int) -> None:
    """Time all steps of one model whose memory was measured."""
    elements = torch.randn(1, length, NARROW.dim_in)
    chunks = elements.split(GRADIENT_CHUNK, 1)
    modules = dict(zip((model.ours, model.literal), _built(model), strict=True))
    steps: dict[str, Contender] = {}
    for label, (name, way) in model.lines.items():
        if MemoryCase(name, way, length) not in results.memory:
            continue
        if way is Way.WHOLE:
            steps[label] = one_pass(modules[name], elements, True)
        else:
            source = elements if way is Way.TENSOR else chunks
            steps[label] = one_fold(modules[name], source, True, GRADIENTS[way])
    timings = interleaved(steps, plan.for_gradients(length))
    results.training_steps.append(StepCost(model.title, length, timings))


def _built(model: Model) -> tuple[nn.Module, nn.Module]:
    peers = PEERS | ON_FEATURES
    return peers[model.ours].build(NARROW), peers[model.literal].build(NARROW)


# ---- targets -------------------------------------------------------------------------------------


def judge(results: Results, plan: Plan) -> None:
    """Target 9: time of exact gradients compared with autograd, and constant memory."""
    for model, cost in product(MODELS, results.training_steps):
        judged = cost.model == model.title and cost.length in plan.gradient_judged
        if judged and any(label in cost.timings.samples for label in model.rivals):
            results.targets.append(_time_target(model, cost))
    filled = tuple(n for n in plan.gradient_lengths if n >= GRADIENT_CHUNK)
    for model in MODELS:
        found = [results.megabytes(model.ours, Way.EXACT, n) for n in filled]
        results.targets.append(memory.growth(9, model.title, filled, found))


def _time_target(model: Model, cost: StepCost) -> Target:
    """Return the target for the time of exact gradients, relative to the fastest rival."""
    autograd = [label for label in (ALL_AT_ONCE, BY_HAND) if label in cost.timings.samples]
    ratios = {label: cost.timings.ratio(Way.EXACT, label) for label in autograd}
    worst = max(ratio for label, ratio in ratios.items() if label in model.rivals)
    whom = model.rivals[0] if len(model.rivals) == 1 else "the faster autograd"
    claim = f"time, exact / {whom}, {model.title}, n = {power(cost.length)}"
    detail = ", ".join(f"{label} {ratio:.2f}×" for label, ratio in ratios.items())
    return Target(9, claim, worst, model.bound, at_least=False, shape=NARROW, detail=detail)
