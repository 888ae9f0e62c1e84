"""Gradients of a fold in the memory of one chunk: the backward pass reads the chunks once more.

An encoding depends on the elements only through the state. So the forward pass needs no graph, and
the gradient of the state, handed to each chunk's own statistics, is the gradient of the whole set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from setfold.encoder import StreamingSetEncoder
from setfold.errors import InputError, StateMismatchError
from setfold.kernels.precision import accumulator_dtype, autocasts
from setfold.source import Source
from setfold.state import SetState
from setfold.statistic import STATISTICS, Statistics, pull

Begin = Callable[[int], tuple[StreamingSetEncoder, SetState]]  # of a number of sets


def replayable_fold(begin: Begin, source: Source) -> tuple[StreamingSetEncoder, SetState] | None:
    """Fold chunks without a graph, into a state whose gradients read them once more.

    Args:
        begin: makes the encoder and its empty state, for a number of sets.
        source: chunks (B, n_i, d) that can be read again.

    Returns:
        The encoder and the state; None if there are no chunks.
    """
    replay: _Replay | None = None
    for number, chunk in source.read():
        replay = replay or _Replay(*begin(chunk.shape[0]), source)
        replay.absorb(number, chunk)
    if replay is None:
        return None
    return replay.encoder, replay.tracked()


class _Replay:
    """One fold, and what it takes to run it again."""

    def __init__(self, encoder: StreamingSetEncoder, empty: SetState, source: Source) -> None:
        self.encoder = encoder
        self.source = source
        self.empty = empty
        self.blank = _with_leaves(encoder, empty)
        self.state = self.blank
        self.wanting: dict[int, Tensor] = {}  # by number, chunks that want gradients themselves
        self.parameters = _trained(encoder)
        self.modes = [(module, module.training) for module in encoder.modules()]
        self.autocast = _autocast_now(empty.device)
        # What is picked must be recognised in the replay to the last bit, so it is found alike.
        self.with_graph = any(STATISTICS[name].picks for name in empty.statistics)

    def absorb(self, number: int, chunk: Tensor) -> None:
        """Add a chunk to the state, without a graph that stays."""
        if chunk.requires_grad:
            self.wanting[number] = chunk
        leaf = chunk.detach().requires_grad_(chunk.requires_grad)
        with (
            torch.set_grad_enabled(self.with_graph),
            self.source.same_draws(number, chunk.device),
        ):
            after = self.encoder.update(self.state, leaf)
        if self.with_graph:
            after = after.with_statistics(_detached(after.statistics), after.count)
        self.state = after

    def tracked(self) -> SetState:
        """The state at the end, as a differentiable function of all that shaped it."""
        statistics = self.state.statistics
        flat = [part for parts in statistics.values() for part in parts]
        begun = [*self.empty.frame, *self.empty.context]
        inputs = [*begun, *self.parameters, *self.wanting.values()]
        tracked = iter(_Tracked.apply(self, len(flat), *flat, *inputs))
        named = {name: tuple(next(tracked) for _ in parts) for name, parts in statistics.items()}
        return self.empty.with_statistics(named, self.state.count)

    def gradients(self, grads: Statistics) -> Iterator[Tensor | None]:
        """The gradients of frame, context, parameters and chunks, from those of the state.

        Autograd calls this without a graph, so that chunks which are computed as they are read
        cost no more than they did.
        """
        shared = [*self.blank.frame, *self.blank.context, *self.parameters]
        totals: list[Tensor | None] = [None] * len(shared)
        of_chunks: dict[int, Tensor | None] = {}
        places = {id(chunk): number for number, chunk in self.wanting.items()}
        for number, chunk in self.source.read():
            place = places.pop(id(chunk), number)  # the same tensors may come in another order
            leaf = chunk.detach().requires_grad_(place in self.wanting)
            with self._as_it_was(number, chunk.device):
                after = self.encoder.update(self.blank, leaf)
            own, grads = pull(grads, self.state.statistics, _detached(after.statistics))
            *found, of_chunks[place] = _gradients_of(after.statistics, own, [*shared, leaf])
            totals = [_added(total, grad) for total, grad in zip(totals, found, strict=True)]
        _refuse_unclaimed(grads)
        for total, tensor in zip(totals, shared, strict=True):
            yield None if total is None else total.to(tensor.dtype)
        yield from (of_chunks.get(number) for number in self.wanting)

    @contextmanager
    def _as_it_was(self, number: int, device: torch.device) -> Iterator[None]:
        """The circumstances of the forward pass: weights, modes, autocast and random numbers."""
        now = _trained(self.encoder)
        if len(now) != len(self.parameters) or any(
            a is not b for a, b in zip(now, self.parameters, strict=True)
        ):
            raise InputError(
                "the encoder has other parameters in the backward pass than it had in the fold, as under "
                "torch.func.functional_call: give fold an iterator, which keeps its graph, instead."
            )
        modes = [module.training for module, _ in self.modes]
        try:
            for module, training in self.modes:
                module.training = training
            with torch.enable_grad(), self.autocast(), self.source.same_draws(number, device):
                yield
        except StateMismatchError as error:
            raise StateMismatchError(
                "the encoder's weights changed between the fold and its backward pass, which needs them "
                "as they were: call backward before the optimiser's step."
            ) from error
        finally:
            for (module, _), training in zip(self.modes, modes, strict=True):
                module.training = training


class _Tracked(torch.autograd.Function):
    """Statistics that were found without a graph; their gradients come from a replay."""

    @staticmethod
    def forward(ctx: Any, replay: _Replay, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.replay = replay
        ctx.number = number
        return tuple(tensor.clone() for tensor in tensors[:number])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat = iter(grads)
        statistics = ctx.replay.state.statistics
        named = {name: tuple(next(flat) for _ in parts) for name, parts in statistics.items()}
        return None, None, *[None] * ctx.number, *ctx.replay.gradients(named)


def _with_leaves(encoder: StreamingSetEncoder, empty: SetState) -> SetState:
    """An empty state whose slots and context begin a graph of their own."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)

    frame = tuple(map(leaf, empty.frame))
    return SetState(
        encoder.identity(len(empty), frame),
        empty.count,
        frame=frame,
        context=tuple(map(leaf, empty.context)),
        aggregate=empty.aggregate,
        fingerprint=empty.fingerprint,
    )


def _trained(encoder: StreamingSetEncoder) -> list[nn.Parameter]:
    """The parameters that shape states and want gradients, each once, though two may share it."""
    parameters = chain(*(module.parameters() for module in encoder.shaping_modules()))
    return [p for p in dict.fromkeys(parameters) if p.requires_grad]


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


def _refuse_unclaimed(left: Statistics) -> None:
    """Raise if no chunk of the replay holds a maximum that the fold found."""
    for name, parts in left.items():
        if STATISTICS[name].picks and any(bool(part.any()) for part in parts):
            raise InputError(
                "the chunks must be the same whenever they are read, and are not: in the backward pass "
                f"none of them holds the {name} that the fold found."
            )


def _autocast_now(device: torch.device) -> Callable[[], Any]:
    """A context in which autocast is as it is now; the backward pass runs in another one."""
    if not autocasts(device):
        return nullcontext
    dtype = torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype=dtype)
