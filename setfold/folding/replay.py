"""Gradients of a fold in the memory of one chunk: the backward pass looks at the chunks once more.

An encoding depends on the elements only through the state. So the forward pass needs no graph, and
the gradient of the state, handed to each chunk's own statistics, is the gradient of the whole set:
to all chunks for the exact one, to a few, in proportion, for one that is right on average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.absorb import Again, combine_with, mapped
from setfold.core.chunk import Chunk
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.state import SetState
from setfold.core.statistic import STATISTICS, Statistics, join, pull
from setfold.errors import InputError, StateMismatchError
from setfold.folding.piece import Piece
from setfold.folding.source import CHANGED, Sample, Source
from setfold.kernels.precision import accumulator_dtype, autocasts
from setfold.kernels.replay import differentiable_once, gradients_only

Begun = tuple[StreamingSetEncoder, SetState]
Begin = Callable[[int | None], Begun]  # of a number of sets; None where there are no chunks to tell
NOBODY = -1


def replayable_fold(begin: Begin, source: Source, samples: int | None = None) -> Begun:
    """Fold chunks without a graph, into a state whose gradients look at them once more.

    Args:
        begin: makes the encoder and its empty state, for a number of sets.
        source: the chunks; without `samples`, they are read again.
        samples: the number of chunks, drawn at random and kept, from which gradients are estimated.

    Returns:
        The encoder and the state.
    """
    replay: _Replay | None = None
    for number, piece in source.read():
        replay = replay or _Replay(*begin(source.sets_in(piece)), source, samples)
        replay.absorb(number, piece)
    replay = replay or _Replay(*begin(None), source, samples)
    return replay.encoder, replay.tracked()


def absorbed(encoder: StreamingSetEncoder, state: SetState, piece: Piece) -> SetState:
    """The state after one more piece."""
    return encoder.update(state, piece.elements, mask=piece.mask, index=piece.index)


class _Replay:
    """One fold, and what it takes to run it again."""

    def __init__(
        self, encoder: StreamingSetEncoder, empty: SetState, source: Source, samples: int | None
    ) -> None:
        self.encoder = encoder
        self.source = source
        self.empty = empty
        self.sample = None if samples is None else Sample(samples)
        self.wanting: dict[int, Tensor] = {}  # by number, elements that want gradients themselves
        self.modes = [(module, module.training) for module in encoder.modules()]
        self.autocast = _autocast_now(empty.device)
        self.epsilon = _epsilon(empty)
        self.parameters = _trained(encoder)
        # What is derived from weights and slots is derived once: its gradients are collected over
        # all chunks before they go on to the weights.
        self.prepared = encoder.prepare(empty.frame) if _prepares_at_once(encoder, empty) else None
        self.leaves = mapped(self.prepared, _leaf)
        self.blank = _with_leaves(encoder, empty)
        self.state = self.blank.with_statistics(self.blank.statistics, empty.count)
        self.state.prepared = mapped(self.prepared, Tensor.detach)
        # No gradient of a sum depends on the sum, and where elements meet nothing but what was prepared
        # nothing can come out otherwise. So the sums of chunks that are known again are not made.
        sums = set(empty.statistics) == {"sum"}
        self.only_sums = sums and encoder.defers and not encoder.has_features
        self.origins = {  # the chunk that a maximum was found in, the first of them
            name: tuple(torch.full_like(part, NOBODY, dtype=torch.long) for part in parts)
            for name, parts in empty.statistics.items()
            if STATISTICS[name].picks
        }

    # ---- forward -----------------------------------------------------------------------------

    def absorb(self, number: int | None, piece: Piece) -> None:
        """Add a chunk to the state, without a graph."""
        if piece.elements.requires_grad:
            self.wanting[_known(number)] = piece.elements
        with torch.no_grad(), self.source.same_draws(number, piece.elements.device):
            after = absorbed(self.encoder, self.state, piece)
        for name, origins in self.origins.items():
            parts = self.state.statistics[name], after.statistics[name]
            for origin, old, new in zip(origins, *parts, strict=True):
                origin.masked_fill_(new != old, _known(number))
        self.state = after
        if self.sample is not None:
            self.sample.offer(number, piece)

    def tracked(self) -> SetState:
        """The state at the end, as a differentiable function of all that shaped it."""
        self.state.prepared = None
        statistics = self.state.statistics
        flat = [part for parts in statistics.values() for part in parts]
        begun = [*self.empty.frame, *self.empty.context, *_tensors(self.prepared)]
        inputs = [*begun, *self.parameters, *self.wanting.values()]
        tracked = iter(_Tracked.apply(self, len(flat), *flat, *inputs))
        named = {name: tuple(next(tracked) for _ in parts) for name, parts in statistics.items()}
        return self.empty.with_statistics(named, self.state.count)

    # ---- backward ----------------------------------------------------------------------------

    def gradients(self, grads: Statistics) -> Iterator[Tensor | None]:
        """The gradients of all that `tracked` takes, from those of the statistics.

        Autograd calls this without a graph, so that chunks which are computed as they are read
        cost no more than they did.
        """
        self._refuse_other_weights()
        if self.sample is not None:  # few speak for all
            every = self.sample.seen / max(1, len(self.sample.kept))
            grads = {name: tuple(grad * every for grad in parts) for name, parts in grads.items()}
        shared = [*self.blank.frame, *self.blank.context, *_tensors(self.leaves), *self.parameters]
        totals: list[Tensor | None] = [None] * len(shared)
        of_chunks: dict[int, Tensor] = {}
        joined: Statistics | None = None
        skipped = strange = False
        with _in_modes(self.modes), _without_hooks(self.parameters):
            for number, piece in self._pieces():
                leaf, found = self._absorbed_again(number, piece)
                if found is None:
                    continue
                skipped, strange = skipped or self._skips(number), strange or number is None
                if joined is None:
                    _refuse_strangers(found, [*shared, leaf])
                values = _detached(found)
                joined = values if joined is None else join(joined, values)
                own = pull(self._claimed(number, grads), self.state.statistics, values)
                *added, of_leaf = _gradients_of(found, own, [*shared, leaf])
                totals = [_added(total, grad) for total, grad in zip(totals, added, strict=True)]
                if of_leaf is not None:
                    of_chunks[_known(number)] = of_leaf
        if skipped and strange:
            _known(None)
        if joined is not None and self.sample is None and not skipped:
            self._refuse_unfaithful(self.state.statistics, joined)
        for total, tensor in zip(totals, shared, strict=True):
            if joined is None:  # of nothing, all gradients are zero
                yield torch.zeros_like(tensor)
            else:
                yield None if total is None else total.to(tensor.dtype)
        yield from map(of_chunks.get, self.wanting)

    def _pieces(self) -> Iterator[tuple[int | None, Piece]]:
        """The chunks that matter: of a maximum, those that it was found in."""
        picks_only = len(self.origins) == len(self.state.statistics)
        found = [origin.unique().tolist() for parts in self.origins.values() for origin in parts]
        winners = set(chain(*found))
        for number, piece in self.source.read() if self.sample is None else self.sample.kept:
            if not picks_only or _known(number) in winners:
                yield number, piece

    def _absorbed_again(self, number: int | None, piece: Piece) -> tuple[Tensor, Statistics | None]:
        """A chunk's elements and its own statistics, as they were, with a graph; None of no elements."""
        wants = bool(self.wanting) and _known(number) in self.wanting
        if wants and not torch.equal(piece.elements, self.wanting[_known(number)]):
            _known(None)  # the same rows in another order, whose gradients would be mixed up
        leaf = piece.elements.detach().requires_grad_(wants)
        with (
            torch.enable_grad(),
            self.autocast(),
            self.source.same_draws(number, leaf.device),
            gradients_only() if self._skips(number) else nullcontext(),
        ):
            sets, width = len(self.blank), self.encoder.dim_in
            chunk = Chunk.checked(leaf, piece.mask, piece.index, sets=sets, width=width)
            if chunk.is_empty():
                return leaf, None
            return leaf, combine_with(self.encoder, self.blank, chunk, _alone, Again(self.leaves))

    def _skips(self, number: int | None) -> bool:
        """Whether a chunk's statistics need not be made, but for their gradients."""
        return self.only_sums and number is not None

    def _refuse_unfaithful(self, then: Statistics, now: Statistics) -> None:
        """Raise if chunks, seen again, are not what they were; rounding aside."""
        room = self.epsilon * max(1, int(self.state.count.max()))
        for name, parts in then.items():
            for old, new in zip(parts, now[name], strict=True):
                apart = torch.where(old == new, 0, old - new).abs().max()
                size = torch.where(old.isfinite(), old, 0).abs().max()
                if not float(apart) <= self.epsilon**0.5 * float(size) + room:
                    raise InputError(
                        "the backward pass does not find again what the fold found: the chunks or the model "
                        "were changed since, or something draws random numbers that are not torch's. Call "
                        'backward before changes, or use fold(..., gradient="autograd"), which keeps its graph.'
                    )

    def _claimed(self, number: int | None, grads: Statistics) -> Statistics:
        """The gradients, but of each maximum only where this chunk was the first to reach it."""
        claimed = dict(grads)
        for name, origins in self.origins.items():
            claimed[name] = tuple(
                grad.where(origin == _known(number), 0)
                for grad, origin in zip(grads[name], origins, strict=True)
            )
        return claimed

    def _refuse_other_weights(self) -> None:
        now = _trained(self.encoder)
        if len(now) != len(self.parameters) or any(
            a is not b for a, b in zip(now, self.parameters, strict=True)
        ):
            raise InputError(
                "the encoder trains other parameters in the backward pass than it did in the fold: they were "
                "exchanged, as torch.func.functional_call does, or requires_grad was switched. Call backward "
                'before that, or use fold(..., gradient="autograd"), which keeps its graph.'
            )
        if not self.empty.fingerprint.is_current():
            raise StateMismatchError(
                "the encoder's weights changed between the fold and its backward pass, which needs them "
                "as they were: call backward before the optimiser's step."
            )


class _Tracked(torch.autograd.Function):
    """Statistics that were found without a graph; their gradients come from a replay."""

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
        return None, None, *[None] * ctx.number, *ctx.replay.gradients(named)


def _with_leaves(encoder: StreamingSetEncoder, empty: SetState) -> SetState:
    """An empty state whose slots and context begin a graph of their own."""
    frame = tuple(map(_leaf, empty.frame))
    return SetState(
        encoder.identity(len(empty), frame),
        empty.count,
        frame=frame,
        context=tuple(map(_leaf, empty.context)),
        aggregate=empty.aggregate,
        fingerprint=empty.fingerprint,
    )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _tensors(prepared: Any) -> list[Tensor]:
    """The tensors of what an encoder prepared, in a fixed order."""
    found: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(prepared, take)
    return found


def _prepares_at_once(encoder: StreamingSetEncoder, empty: SetState) -> bool:
    """Whether what is prepared is the same for all sets."""
    return encoder.own_slots_at_once or not empty.has_own_slots


def _trained(encoder: StreamingSetEncoder) -> list[nn.Parameter]:
    """The parameters that shape states and want gradients, each once, though two may share it."""
    parameters = chain(*(module.parameters() for module in encoder.shaping_modules()))
    return [p for p in dict.fromkeys(parameters) if p.requires_grad]


def _known(number: int | None) -> int:
    if number is None:
        raise InputError(
            f"{CHANGED}: one of them holds other numbers now, or is cut in another place, and a maximum, a "
            "minimum or elements that want gradients must be found again where they were. Leave "
            "shuffling and random augmentation out."
        )
    return number


def _alone(_: Statistics, found: Statistics) -> Statistics:
    """What a chunk found, joined with nothing."""
    return found


def _detached(statistics: Statistics) -> Statistics:
    return {name: tuple(p.detach() for p in parts) for name, parts in statistics.items()}


def _added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """A running total in float64; None as long as there was nothing to add."""
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


def _refuse_strangers(found: Statistics, known: Sequence[Tensor]) -> None:
    """Raise if statistics depend on something that wants gradients and would not get them."""
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
                f"the elements meet a tensor {tuple(variable.shape)} that wants a gradient and is no parameter of "
                "the encoder, so a replay cannot give it one: make it a parameter or a context, detach it, or use "
                'fold(..., gradient="autograd"), which keeps its graph.'
            )
        waiting += [following for following, _ in getattr(node, "next_functions", ())]


def _epsilon(state: SetState) -> float:
    """How far apart neighbouring numbers are, of those that statistics are computed from."""
    if autocasts(state.device):
        return torch.finfo(torch.get_autocast_dtype(state.device.type)).eps
    return torch.finfo(state.fingerprint.dtype or torch.float32).eps


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """A context in which hooks on gradients wait: they are for the sum over all chunks, which follows."""
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
    """A context in which modules train or not as they once did."""
    now = [module.training for module, _ in modes]
    try:
        for module, training in modes:
            module.training = training
        yield
    finally:
        for (module, _), training in zip(modes, now, strict=True):
            module.training = training


def _autocast_now(device: torch.device) -> Callable[[], Any]:
    """A context in which autocast is as it is now; the backward pass runs in another one."""
    if device.type == "meta":  # there is none
        return nullcontext
    on, dtype = autocasts(device), torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype=dtype, enabled=on)
