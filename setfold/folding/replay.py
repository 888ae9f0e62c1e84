"""Gradients of a fold in the memory of one chunk: the backward pass reads the chunks once more.

An encoding depends on the elements only through the state. So the forward pass needs no graph. The
backward pass pulls the gradient of the state back to the statistics of each chunk: of all chunks
for the exact gradient, of a random sample, scaled up, for an unbiased estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from setfold.core.absorb import absorb_dense, absorb_for_gradients, arrivals, concatenated
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.inputs import Chunk
from setfold.core.state import SetState
from setfold.core.statistic import Statistic, Statistics, identity, join, pull
from setfold.errors import InputError, StateMismatchError
from setfold.folding.messages import report_failure
from setfold.folding.source import Sample, Source
from setfold.kernels.modes import accumulator_dtype, autocasts, differentiable_once

Begun = tuple[StreamingSetEncoder, SetState]
Begin = Callable[[int | None], Begun]  # takes a number of sets; None if there are no chunks
NOBODY = -1


def replayable_fold(
    begin: Begin,
    source: Source,
    samples: int | None = None,
    group: ProcessGroup | None = None,
) -> Begun:
    """Fold chunks without a graph, into a state whose gradients read them once more.

    Args:
        begin: creates the encoder and its empty state, for a number of sets.
        source: the chunks; without `samples`, they are read again.
        samples: the number of chunks, drawn at random and kept, that estimate the gradients.
        group: processes over which the sets are spread; None for this one alone.

    Returns:
        The encoder and the state.
    """
    replay: _Replay | None = None
    for number, chunk in source.read():
        replay = replay or _Replay(*begin(source.sets_in(chunk)), source, samples, group)
        replay.absorb(number, chunk)
    replay = replay or _Replay(*begin(None), source, samples, group)
    return replay.encoder, replay.tracked()


class _Replay:
    """One fold, and what it takes to run it again."""

    def __init__(
        self,
        encoder: StreamingSetEncoder,
        empty: SetState,
        source: Source,
        samples: int | None,
        group: ProcessGroup | None,
    ) -> None:
        self.encoder = encoder
        self.group = group
        self.source = source
        self.empty = empty
        self.fields = empty.fields
        self.sample = None if samples is None else Sample(samples)
        self.wanting: dict[int, Tensor] = {}  # by chunk, elements that require gradients
        self.modes = [(module, module.training) for module in encoder.modules()]
        self.autocast = _autocast_now(empty.device)
        self.epsilon = _epsilon(empty)
        self.parameters = _trained(encoder)
        # What is derived from weights and slots is derived once: its gradients are summed over all
        # chunks before they flow on to the weights.
        together = encoder.batched_slots or not empty.has_own_slots
        self.prepared = encoder.prepare(empty.frame) if together else None
        self.leaves = _map_tensors(self.prepared, _leaf)
        self.blank = _with_leaves(empty)
        self.state = self.blank.with_statistics(self.blank.statistics, empty.count)
        self.state.prepared = _map_tensors(self.prepared, Tensor.detach)
        # The gradient of a sum does not depend on its value. Without features, nothing else does
        # either, and the checksums of the chunks show that they are the same.
        sums = all(_pulls_without_values(f.statistic) for f in self.fields.values())
        self.gradients_only = sums and not encoder.has_features and together
        self.origins = {  # the chunk in which each maximum was found first
            name: tuple(torch.full_like(part, NOBODY, dtype=torch.long) for part in parts)
            for name, parts in empty.statistics.items()
            if self.fields[name].statistic.picks
        }

    # ---- forward -----------------------------------------------------------------------------

    def absorb(self, number: int, chunk: Chunk) -> None:
        """Add a chunk to the state, without a graph."""
        if chunk.elements.requires_grad:
            self.wanting[number] = chunk.elements
        with torch.no_grad(), self.source.same_draws(number, chunk.elements.device):
            after = self.encoder.update(
                self.state, chunk.elements, mask=chunk.mask, index=chunk.index
            )
        for name, origins in self.origins.items():
            parts = self.state.statistics[name], after.statistics[name]
            for origin, old, new in zip(origins, *parts, strict=True):
                origin.masked_fill_(new != old, number)
        self.state = after
        if self.sample is not None:
            self.sample.offer(number, chunk)

    def tracked(self) -> SetState:
        """The final state, as a differentiable function of everything that shaped it."""
        self.state.prepared = None
        statistics = self.state.statistics
        flat = [part for parts in statistics.values() for part in parts]
        begun = [*self.empty.frame, *self.empty.context, *_tensors(self.prepared)]
        inputs = [*begun, *self.parameters, *self.wanting.values()]
        tracked = iter(_Tracked.apply(self, len(flat), *flat, *inputs))
        named = {name: tuple(next(tracked) for _ in parts) for name, parts in statistics.items()}
        return self.empty.with_statistics(named, self.state.count)

    # ---- backward ----------------------------------------------------------------------------

    def failing(self) -> AbstractContextManager[None]:
        """Return a context that tells the other processes of an exception, if they listen.

        They do if an earlier pass follows in their backward passes, too.
        """
        listen = any(tensor.requires_grad for tensor in self.empty.context)
        if self.group is None or not listen:
            return nullcontext()
        return report_failure(self.group, self.empty.device)

    def gradients(self, grads: Statistics) -> Iterator[Tensor | None]:
        """The gradients of all inputs of `tracked`, given those of the statistics.

        Autograd calls this without a graph, so that chunks that are computed while they are read
        cost no more than before.
        """
        self._check_weights()
        if self.sample is not None:  # scale the sample up to all chunks
            factor = self.sample.seen / max(1, len(self.sample.kept))
            grads = {name: tuple(grad * factor for grad in parts) for name, parts in grads.items()}
        shared = [*self.blank.frame, *self.blank.context, *_tensors(self.leaves), *self.parameters]
        totals: list[Tensor | None] = [None] * len(shared)
        of_chunks: dict[int, Tensor] = {}
        joined: Statistics | None = None
        with _in_modes(self.modes), _without_hooks(self.parameters):
            for number, chunk in self._chunks():
                leaf, found = self._absorb_again(number, chunk)
                if found is None:
                    continue
                if joined is None:
                    _check_leaves(found, [*shared, leaf])
                values = _detached(found)
                joined = values if joined is None else join(self.fields, joined, values)
                claimed = self._claimed(number, grads)
                own = pull(self.fields, claimed, self.state.statistics, values)
                *added, of_leaf = _gradients_of(found, own, [*shared, leaf])
                totals = [_add(total, grad) for total, grad in zip(totals, added, strict=True)]
                if of_leaf is not None:
                    of_chunks[number] = of_leaf
        if joined is not None and self.sample is None and not self.gradients_only:
            self._check_replay(self.state.statistics, joined)
        for total, tensor in zip(totals, shared, strict=True):
            if joined is None:  # without elements, all gradients are zero
                yield torch.zeros_like(tensor)
            else:
                yield None if total is None else total.to(tensor.dtype)
        yield from map(of_chunks.get, self.wanting)

    def _chunks(self) -> Iterator[tuple[int, Chunk]]:
        """The chunks that matter: if there are only maxima, those in which they were found."""
        picks_only = len(self.origins) == len(self.fields)
        found = [origin.unique().tolist() for parts in self.origins.values() for origin in parts]
        winners = set(chain(*found))
        for number, chunk in self.source.read() if self.sample is None else self.sample.kept:
            if not picks_only or number in winners:
                yield number, chunk

    def _absorb_again(self, number: int, chunk: Chunk) -> tuple[Tensor, Statistics | None]:
        """A chunk's elements and statistics, now with a graph; None for an empty chunk."""
        leaf = chunk.elements.detach().requires_grad_(number in self.wanting)
        with (
            torch.enable_grad(),
            self.autocast(),
            self.source.same_draws(number, leaf.device),
        ):
            sets, width = len(self.blank), self.encoder.dim_in
            chunk = Chunk(leaf, chunk.mask, chunk.index).validate(sets, width)
            if chunk.is_empty():
                return leaf, None
            return leaf, self._absorb_alone(chunk)

    def _absorb_alone(self, chunk: Chunk) -> Statistics:
        """The statistics of one chunk alone."""
        encoder, blank = self.encoder, self.blank
        absorb = partial(absorb_for_gradients, encoder) if self.gradients_only else encoder.absorb
        if chunk.index is None and (encoder.batched_slots or not blank.has_own_slots):
            given = chunk.elements, chunk.mask, blank.context, self.leaves
            return absorb_dense(encoder, self.fields, *given, split=True, absorb=absorb)
        found = {name: tuple(p.clone() for p in ps) for name, ps in blank.statistics.items()}
        added = arrivals(encoder, blank, chunk, self.leaves, split=True, absorb=absorb)
        for sets, own in concatenated(added):
            for name, parts in own.items():
                held = found[name]
                found[name] = tuple(
                    part.to(whole.dtype)
                    if sets is None
                    else whole.index_copy(0, sets, part.to(whole.dtype))
                    for whole, part in zip(held, parts, strict=True)
                )
        return found

    def _check_replay(self, then: Statistics, now: Statistics) -> None:
        """Raise InputError if the chunks gave other statistics than before, up to rounding."""
        room = self.epsilon * max(1, int(self.state.count.max()))
        for name, parts in then.items():
            for old, new in zip(parts, now[name], strict=True):
                apart = torch.where(old == new, 0, old - new).abs().max()
                size = torch.where(old.isfinite(), old, 0).abs().max()
                if not float(apart) <= self.epsilon**0.5 * float(size) + room:
                    raise InputError(
                        "the backward pass computed other statistics than the fold: the chunks or "
                        "the model have changed, or something draws random numbers that are not "
                        "torch's. Call backward before you change them, or use "
                        'fold(..., gradient="autograd"), which keeps the graph.'
                    )

    def _claimed(self, number: int, grads: Statistics) -> Statistics:
        """The gradients; those of a maximum only where this chunk was the first to reach it."""
        claimed = dict(grads)
        for name, origins in self.origins.items():
            claimed[name] = tuple(
                grad.where(origin == number, 0)
                for grad, origin in zip(grads[name], origins, strict=True)
            )
        return claimed

    def _check_weights(self) -> None:
        now = _trained(self.encoder)
        if len(now) != len(self.parameters) or any(
            a is not b for a, b in zip(now, self.parameters, strict=True)
        ):
            raise InputError(
                "the encoder has other trainable parameters than during the fold: they were "
                "replaced, as torch.func.functional_call does, or requires_grad was changed. Call "
                'backward before that, or use fold(..., gradient="autograd"), which keeps the graph.'
            )
        if not self.empty.weights.are_of(self.encoder):
            raise StateMismatchError(
                "the encoder's weights changed between the fold and its backward pass: call "
                "backward before the optimizer's step."
            )


class _Tracked(torch.autograd.Function):
    """Statistics that were computed without a graph; their gradients come from a replay."""

    @staticmethod
    def forward(ctx: Any, replay: _Replay, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.replay = replay
        ctx.number = number
        return tuple(tensor.clone() for tensor in tensors[:number])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = iter(grads)
        statistics = ctx.replay.state.statistics
        named = {name: tuple(next(flat) for _ in parts) for name, parts in statistics.items()}
        with ctx.replay.failing():
            return None, None, *[None] * ctx.number, *ctx.replay.gradients(named)


def _with_leaves(empty: SetState) -> SetState:
    """An empty state whose slots and context are the leaves of a new graph."""
    return SetState(
        empty.fields,
        identity(empty.fields, len(empty), empty.device),
        empty.count,
        frame=tuple(map(_leaf, empty.frame)),
        context=tuple(map(_leaf, empty.context)),
        weights=empty.weights,
    )


def _pulls_without_values(statistic: Statistic) -> bool:
    """Whether gradients pass through unchanged, so that the values of a piece do not matter."""
    return type(statistic).pull is Statistic.pull and not statistic.picks


def _map_tensors(prepared: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """What an encoder prepared, with a function applied to each tensor in it."""
    if isinstance(prepared, Tensor):
        return function(prepared)
    if isinstance(prepared, dict):
        return {name: _map_tensors(item, function) for name, item in prepared.items()}
    if isinstance(prepared, tuple | list):
        items = [_map_tensors(item, function) for item in prepared]
        return type(prepared)(*items) if hasattr(prepared, "_fields") else type(prepared)(items)
    return prepared


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _tensors(prepared: Any) -> list[Tensor]:
    """The tensors of what an encoder prepared, in a fixed order."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _map_tensors(prepared, take)
    return found


def _trained(encoder: StreamingSetEncoder) -> list[nn.Parameter]:
    """The parameters that shape states and require gradients, each once, even if it is shared."""
    parameters = chain(*(module.parameters() for module in encoder.shaping_modules()))
    return [p for p in dict.fromkeys(parameters) if p.requires_grad]


def _detached(statistics: Statistics) -> Statistics:
    return {name: tuple(p.detach() for p in parts) for name, parts in statistics.items()}


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """Add a gradient to a running total in float64; None if there is none yet."""
    if grad is None:
        return total
    if total is None:
        return grad.to(accumulator_dtype(grad.device), copy=True)
    return total.add_(grad)


def _gradients_of(
    statistics: Statistics, grads: Statistics, wanted: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    outputs, weights = [], []
    for name, parts in statistics.items():
        for part, grad in zip(parts, grads[name], strict=True):
            if part.requires_grad:
                outputs.append(part)
                weights.append(grad.to(part.dtype))
    inputs = [tensor for tensor in wanted if tensor.requires_grad]
    if not (outputs and inputs):
        return (None,) * len(wanted)
    found = iter(torch.autograd.grad(outputs, inputs, weights, allow_unused=True))
    return tuple(next(found) if tensor.requires_grad else None for tensor in wanted)


def _check_leaves(found: Statistics, known: Sequence[Tensor]) -> None:
    """Raise InputError if statistics depend on a leaf that would not get its gradient."""
    ours = {id(tensor) for tensor in known}
    waiting = [part.grad_fn for parts in found.values() for part in parts]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of the end of a graph
        if variable is not None and id(variable) not in ours:
            raise InputError(
                f"the encoder uses a tensor {tuple(variable.shape)} that requires a gradient and is "
                "not one of its parameters, so that a replay cannot compute it: make it a parameter "
                'or a context, detach it, or use fold(..., gradient="autograd"), which keeps the '
                "graph."
            )
        waiting += [following for following, _ in getattr(node, "next_functions", ())]


def _epsilon(state: SetState) -> float:
    """The relative precision with which statistics are computed."""
    if autocasts(state.device):
        return torch.finfo(torch.get_autocast_dtype(state.device.type)).eps
    return torch.finfo(state.weights.dtype or torch.float32).eps


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """A context without gradient hooks: they must see only the sum over all chunks."""
    hooks = [parameter._backward_hooks for parameter in parameters]
    try:
        for parameter in parameters:
            parameter._backward_hooks = None
        yield
    finally:
        for parameter, own in zip(parameters, hooks, strict=True):
            parameter._backward_hooks = own


@contextmanager
def _in_modes(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """A context in which modules are in the modes that they had during the fold."""
    changed = [(module, then) for module, then in modes if module.training != then]
    try:
        for module, then in changed:
            module.training = then
        yield
    finally:
        for module, then in changed:
            module.training = not then


def _autocast_now(device: torch.device) -> Callable[[], Any]:
    """A function that returns a context with today's autocast settings, for the backward pass."""
    if device.type == "meta":  # there is none
        return nullcontext
    on, dtype = autocasts(device), torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=on)
