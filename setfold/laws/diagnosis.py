"""Why a model may not learn: what its encodings, weights, slots and gradients look like."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from setfold.core.composition import Composition, SlotPool
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.primitives import SetEncoder
from setfold.errors import InputError

LEAST_SETS = 4
WEAK = 0.05  # spread of encodings, relative to that of the mean of the features
ALIKE = 0.01  # spread of encodings, relative to their size
FEW_DIMENSIONS, MANY_DIMENSIONS = 1.01, 3.0
UNIFORM = 0.995  # entropy of the weights, relative to that of equal weights
CONSTANT = 1e-5  # deviation of the weights over elements, relative to their size
DUPLICATE = 1e-4  # squared difference of two slots, relative to their squares
DEAD = 0.01  # mass of a slot, relative to an equal share
VANISHING = 5e-3  # gradients of a part of the model, relative to the largest ones
ROUNDING = 1e-12  # gradients that are smaller than this share of the largest are 0
TINY = 1e-30
MODEL = "(model)"  # name of the weights that belong to no part of a model
PREPARED = (nn.Flatten, nn.LayerNorm, nn.Identity, SlotPool)  # what a head may begin with


@dataclass(frozen=True)
class Symptom:
    """One thing that was measured.

    Attributes:
        name: what was measured.
        value: the number.
        problem: what to change, in one sentence; empty if nothing is wrong.
    """

    name: str
    value: float
    problem: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What was measured. It prints as a table.

    Attributes:
        symptoms: everything that was measured.
        gradients: by module, the size of the gradients of its weights, relative to the weights.
    """

    symptoms: tuple[Symptom, ...]
    gradients: dict[str, float]

    @property
    def problems(self) -> tuple[str, ...]:
        """What to change, one sentence for each problem."""
        return tuple(symptom.problem for symptom in self.symptoms if symptom.problem)

    def __getitem__(self, name: str) -> float:
        return next(symptom.value for symptom in self.symptoms if symptom.name == name)

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as a dict that json.dumps accepts."""
        return {
            "problems": list(self.problems),
            "symptoms": {symptom.name: symptom.value for symptom in self.symptoms},
            "gradients": self.gradients,
        }

    def __str__(self) -> str:
        width = max(map(len, (*self.gradients, *(symptom.name for symptom in self.symptoms))))
        lines = [f"{s.name:<{width}}  {s.value:.3g}" for s in self.symptoms]
        lines += [f"{name:<{width}}  {size:.1e}" for name, size in self.gradients.items()]
        return "\n".join([*lines, "", *(self.problems or ("No problem found.",))])


def diagnose(
    model: SetEncoder,
    sets: Tensor | Sequence[Tensor | np.ndarray],
    loss: Callable[[Tensor], Tensor] | None = None,
) -> Diagnosis:
    """Measure why a model may not learn, before or after training.

    It reports the spread of the encodings over sets, their effective dimensions, the entropy of the
    weights, slots that are duplicates or dead, and the gradients layer by layer. The model is not
    changed.

    Args:
        model: any set encoder, such as a `Composition` of features, encoder and head.
        sets: (B, n, d), or B tensors or arrays (n_i, d); at least 4, better 32, that fit in memory.
        loss: a function of the model's output, for the gradients; None for a random projection.

    Raises:
        InputError: there are too few sets, or a set is empty.

    >>> import setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=3, num_slots=32, dim_slot=16, dim_out=16)
    >>> diagnosis = setfold.diagnose(encoder, torch.randn(32, 100, 3))
    >>> diagnosis["spread of encodings / spread of means"] < 0.05  # 32 slots share the elements
    True
    >>> "weighted_mean" in diagnosis.problems[0]  # instead of a mean over all elements
    True
    """
    if not isinstance(model, SetEncoder):
        raise InputError(f"model must be a set encoder; got {type(model).__name__}.")
    elements, mask = _padded(sets)
    exact = deepcopy(model).double().eval()  # in float64, gradients that cancel are nearly 0
    with torch.no_grad():
        seen = _look(exact, elements, mask)
        symptoms = [*_encoding_symptoms(seen), *_weight_symptoms(seen), *_slot_symptoms(seen)]
    gradients = _gradients(exact, elements, mask, loss)
    return Diagnosis((*symptoms, *_gradient_symptoms(gradients)), gradients)


class _Seen(NamedTuple):
    """What a model makes of some sets."""

    means: Tensor  # (B, d), of the features of each set
    slots: Tensor | None  # (B, K, p), if the encoding has a slot axis
    encoding: Tensor  # (B, ...), as the layers of the head see it
    weights: Tensor | None  # (B, n, K)
    mask: Tensor  # (B, n)


def _look(model: SetEncoder, elements: Tensor, mask: Tensor) -> _Seen:
    if not isinstance(model, StreamingSetEncoder):
        return _Seen(_means(elements, mask), None, model(elements, mask), None, mask)
    state = model.update(model.initial_state(len(elements)), elements, mask=mask)
    features = model.featurize(elements, mask, ())
    inner, heads = model, []
    while isinstance(inner, Composition):
        heads.append(inner.head)
        inner = inner.encoder
    encoding = inner.finish(state.statistics, state.count, inner.prepare(state.frame))
    slots = encoding if inner.slot_dims and encoding.dim() == 3 else None
    for module in _leading(heads[-1] if heads else None):
        encoding = module(encoding)
    weights = model.weights(state, elements) if model.has_weights else None
    return _Seen(_means(features, mask), slots, encoding, weights, mask)


def _leading(head: nn.Module | None) -> Iterator[nn.Module]:
    """The modules of a head that come before its first layer with a choice of scale."""
    for module in head if isinstance(head, nn.Sequential) else [head]:
        if not isinstance(module, PREPARED):
            return
        yield module


# ---- what is measured --------------------------------------------------------------------------


def _encoding_symptoms(seen: _Seen) -> Iterator[Symptom]:
    encoding = seen.encoding.flatten(1)
    spread, size = _spread(encoding), float(encoding.square().mean().sqrt())
    relative = spread / max(_spread(seen.means), TINY)
    problem = ""
    if relative < WEAK:
        problem = (
            f"Encodings vary {1 / max(relative, TINY):.0f} times less over sets than the mean of "
            'the features: use aggregate="weighted_mean" instead of "mean", sum slots instead of '
            "averaging them, or begin the head with nn.LayerNorm."
        )
    yield Symptom("spread of encodings / spread of means", relative, problem)
    share, problem = spread / max(size, TINY), ""
    if share < ALIKE:
        problem = (
            f"Encodings of different sets are nearly the same: they differ by {share:.1e} of their "
            "size. Normalize between the levels of a hierarchy, and standardize the encoding."
        )
    yield Symptom("spread of encodings / their size", share, problem)
    found, wanted = _dimensions(encoding), _dimensions(seen.means)
    problem = ""
    if found < FEW_DIMENSIONS and wanted > MANY_DIMENSIONS:
        problem = (
            f"Encodings vary in {found:.1f} dimensions only, the means of the features in "
            f"{wanted:.1f}: look for a layer that is too narrow, or for saturated activations."
        )
    yield Symptom("effective dimensions of encodings", found, problem)


def _weight_symptoms(seen: _Seen) -> Iterator[Symptom]:
    if seen.weights is None or seen.weights.shape[-1] < 2:
        return
    shown = seen.weights[seen.mask]  # (N, K)
    over_slots = bool((shown.sum(1) - 1).abs().max() < 1e-3)
    if not over_slots:
        return
    entropy = float(-(shown * shown.clamp_min(TINY).log()).sum(1).mean()) / math.log(shown.shape[1])
    varies = float(shown.std(0).mean() / shown.mean())
    problem = ""
    if varies < CONSTANT:
        problem = (
            "Attention is constant: every element has the same weights. Use wider keys (dim_key), "
            "and elements or features that differ."
        )
    elif entropy > UNIFORM:
        problem = (
            f"Attention is nearly uniform (entropy {entropy:.4f} of at most 1), so slots begin as "
            'duplicates: use similarity="cosine" with attention="softmax", or standardize elements.'
        )
    yield Symptom("entropy of the weights over slots", entropy, problem)


def _slot_symptoms(seen: _Seen) -> Iterator[Symptom]:
    if seen.slots is None or seen.slots.shape[1] < 2:
        return
    slots = seen.slots
    count = slots.shape[1]
    varying = (slots - slots.mean(0)).transpose(0, 1).flatten(1)  # (K, B p)
    squares = varying.square().sum(1)
    apart = torch.cdist(varying, varying).square() / (squares[:, None] + squares).clamp_min(TINY)
    same = (apart < DUPLICATE).triu(1).any(0)
    different, problem = count - int(same.sum()), ""
    if different == 1:
        problem = (
            f"All {count} slots are the same up to {math.sqrt(DUPLICATE):.0%}: use learned slots, "
            'similarity="cosine" and attention="softmax", or fewer slots.'
        )
    yield Symptom("different slots", different, problem)
    if seen.weights is None or seen.weights.shape[-1] != count:
        return
    mass = seen.weights[seen.mask].mean(0) * count
    dead, problem = int((mass < DEAD).sum()), ""
    if dead:
        problem = f"{dead} of {count} slots get almost no weight: use fewer slots."
    yield Symptom("dead slots", dead, problem)


def _gradient_symptoms(gradients: dict[str, float]) -> Iterator[Symptom]:
    if not gradients:
        return
    without = [name for name, size in gradients.items() if size == 0]
    problem = ""
    if without:
        problem = (
            f"No gradient reaches {', '.join(without)}. If these are keys, queries or slots, "
            "attention cancels: keep slots apart (nn.Flatten as the head), and use residual=True "
            "in a hierarchy, whose slots become alike otherwise."
        )
    yield Symptom("modules without gradient", len(without), problem)
    parts = _parts(gradients)
    weakest = min(parts, key=lambda part: parts[part])
    ratio, problem = parts[weakest] / max(*parts.values(), TINY), ""
    if ratio < VANISHING:
        problem = (
            f"Gradients vanish: those of {weakest} are {1 / max(ratio, TINY):.0f} times smaller "
            "than the largest, relative to its weights. Normalize between the layers, or use fewer "
            "levels."
        )
    yield Symptom("smallest gradient / largest", ratio, problem)


def _parts(gradients: dict[str, float]) -> dict[str, float]:
    """The largest gradient of each part: a module with its children, or with its siblings.

    Within a part, sizes differ for good reasons: keys learn more slowly than values.
    """
    if MODEL in gradients:  # weights of the model itself, an encoder without features and head
        return {MODEL: max(gradients.values())}
    found = {}
    for name in gradients:
        has_children = any(other.startswith(f"{name}.") for other in gradients)
        part = name if has_children else name.rpartition(".")[0] or name
        inside = (s for other, s in gradients.items() if f"{other}.".startswith(f"{part}."))
        found[part] = max(inside)
    return found


def _gradients(
    model: SetEncoder, elements: Tensor, mask: Tensor, loss: Callable[[Tensor], Tensor] | None
) -> dict[str, float]:
    """By module, the size of the gradients relative to that of the weights."""
    owners = {
        name: [p for p in module.parameters(recurse=False) if p.requires_grad]
        for name, module in model.named_modules()
    }
    owners = {name or MODEL: own for name, own in owners.items() if own}
    weights = list({id(p): p for own in owners.values() for p in own}.values())
    if not weights:
        return {}
    with torch.enable_grad():
        output = model(elements, mask)
        value = _projected(output) if loss is None else loss(output)
        found = torch.autograd.grad(value, weights, allow_unused=True)
    by_weight = {id(p): g for p, g in zip(weights, found, strict=True)}
    sizes = {}
    for name, own in owners.items():
        grads = [by_weight[id(p)] for p in own]
        total = sum(float(g.square().sum()) for g in grads if g is not None)
        size = sum(float(p.detach().square().sum()) for p in own)
        sizes[name] = math.sqrt(total / size) if size else math.sqrt(total)
    least = ROUNDING * max(sizes.values())
    return {name: size if size > least else 0.0 for name, size in sizes.items()}


def _projected(output: Tensor) -> Tensor:
    """A random linear function of an output, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(output.shape[1:], generator=generator, dtype=torch.float64)
    return (output * direction.to(output)).sum(tuple(range(1, output.dim()))).square().mean()


# ---- helpers -----------------------------------------------------------------------------------


def _padded(sets: Tensor | Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Elements (B, n, d) and the mask (B, n) of the present ones."""
    found = [torch.as_tensor(part) for part in sets]
    if len(found) < LEAST_SETS:
        raise InputError(f"diagnose needs at least {LEAST_SETS} sets; got {len(found)}.")
    if any(part.dim() < 2 or len(part) == 0 for part in found):
        raise InputError("diagnose needs sets (n_i, d) with at least one element each.")
    lengths = torch.tensor([len(part) for part in found])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    padded = nn.utils.rnn.pad_sequence(found, batch_first=True).double()
    return padded, mask.to(padded.device)


def _means(features: Tensor, mask: Tensor) -> Tensor:
    shown = features * mask.unsqueeze(-1)
    return shown.sum(1) / mask.sum(1, keepdim=True)


def _spread(rows: Tensor) -> float:
    """The standard deviation over rows, averaged over columns."""
    return float((rows - rows.mean(0)).square().mean().sqrt())


def _dimensions(rows: Tensor) -> float:
    """How many directions the rows vary in: (sum of eigenvalues)^2 / sum of their squares."""
    centred = rows - rows.mean(0)
    values = torch.linalg.svdvals(centred).square()
    return float(values.sum().square() / values.square().sum().clamp_min(TINY))
