"""Gradients of a fold in the memory of one chunk: the backward pass reads the chunks once more.

An encoding depends on the elements only through the state. So the forward pass needs no graph, and
the gradient of the state, handed to each chunk's own statistics, is the gradient of the whole set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from setfold.encoder import StreamingSetEncoder
from setfold.errors import InputError
from setfold.kernels.precision import accumulator_dtype
from setfold.state import SetState
from setfold.statistic import STATISTICS, Statistics, pull

Begin = Callable[[int], tuple[StreamingSetEncoder, SetState]]  # of a number of sets
SEEDS = 2**62


def replayable_fold(
    begin: Begin, chunks: Iterable[Tensor]
) -> tuple[StreamingSetEncoder, SetState] | None:
    """Fold chunks without a graph, into a state whose gradients read them once more.

    Args:
        begin: makes the encoder and its empty state, for a number of sets.
        chunks: tensors (B, n_i, d); can be iterated over again.

    Returns:
        The encoder and the state; None if there are no chunks.
    """
    replay: _Replay | None = None
    for number, chunk in enumerate(chunks):
        replay = replay or _Replay(*begin(chunk.shape[0]), chunks)
        replay.absorb(number, chunk)
    if replay is None:
        return None
    return replay.encoder, replay.tracked()


class _Replay:
    """One fold, and what it takes to run it again."""

    def __init__(
        self, encoder: StreamingSetEncoder, empty: SetState, chunks: Iterable[Tensor]
    ) -> None:
        self.encoder = encoder
        self.chunks = chunks
        self.empty = empty
        self.blank = _with_leaves(encoder, empty)
        self.state = self.blank
        self.seen: list[Tensor] = []  # chunks that want gradients themselves
        parameters = chain(*(module.parameters() for module in encoder.shaping_modules()))
        # Each once: weights that two modules share would count twice.
        self.parameters = [p for p in dict.fromkeys(parameters) if p.requires_grad]
        self.seed = int(torch.randint(SEEDS, ())) if _is_random(encoder) else None
        self.autocast = _autocast_now(empty.device)
        # What is picked must be recognised in the replay to the last bit, so it is found alike.
        self.graph = any(STATISTICS[name].picks for name in empty.statistics)

    def absorb(self, number: int, chunk: Tensor) -> None:
        """Add a chunk to the state, without a graph that stays."""
        if chunk.requires_grad:
            self.seen.append(chunk)
        with torch.set_grad_enabled(self.graph), self._randomness(number):
            after = self.encoder.update(self.state, _leaf(chunk))
        if self.graph:
            after = after.with_statistics(_detached(after.statistics), after.count)
        self.state = after

    def tracked(self) -> SetState:
        """The state at the end, as a differentiable function of all that shaped it."""
        statistics = self.state.statistics
        flat = [part for parts in statistics.values() for part in parts]
        inputs = [*self.empty.frame, *self.empty.context, *self.parameters, *self.seen]
        tracked = iter(_Tracked.apply(self, len(flat), *flat, *inputs))
        named = {name: tuple(next(tracked) for _ in parts) for name, parts in statistics.items()}
        return self.empty.with_statistics(named, self.state.count)

    def gradients(self, grads: Statistics) -> Iterator[Tensor]:
        """The gradients of frame, context, parameters and chunks, from those of the state."""
        shared = [*self.blank.frame, *self.blank.context, *self.parameters]
        totals = [torch.zeros_like(t, dtype=accumulator_dtype(t.device)) for t in shared]
        of_chunks: list[Tensor] = []
        count = self.blank.count
        for number, chunk in enumerate(self.chunks):
            leaf = _leaf(chunk)
            with torch.enable_grad(), self.autocast(), self._randomness(number):
                after = self.encoder.update(self.blank, leaf)
            count = count + after.count
            own, grads = pull(grads, self.state.statistics, _detached(after.statistics))
            *found, of_chunk = _gradients_of(after.statistics, own, [*shared, leaf])
            for total, grad in zip(totals, found, strict=True):
                if grad is not None:
                    total += grad
            if leaf.requires_grad:
                of_chunks.append(torch.zeros_like(leaf) if of_chunk is None else of_chunk)
        self._refuse_other_chunks(count, grads)
        for total, tensor in zip(totals, shared, strict=True):
            yield total.to(tensor.dtype)
        yield from of_chunks

    def _refuse_other_chunks(self, count: Tensor, left: Statistics) -> None:
        """Raise if the replay saw something else than the fold did."""
        missing = any(
            bool(part.any())
            for name, parts in left.items()
            if STATISTICS[name].picks
            for part in parts
        )
        if missing or not torch.equal(count, self.state.count):
            raise InputError(
                "the chunks must be the same whenever they are read: in the backward pass they differ "
                "from those of the forward pass."
            )

    @contextmanager
    def _randomness(self, number: int) -> Iterator[None]:
        """For layers that draw: the same draws for the same chunk, whenever it is read."""
        if self.seed is None:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(self.seed + number)
            yield


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


def _leaf(tensor: Tensor) -> Tensor:
    """The same values at the beginning of a graph of their own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


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


def _detached(statistics: Statistics) -> Statistics:
    return {name: tuple(p.detach() for p in parts) for name, parts in statistics.items()}


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


def _is_random(encoder: StreamingSetEncoder) -> bool:
    """Whether something in it may draw: modules in evaluation mode do not."""
    return any(m.training for module in encoder.shaping_modules() for m in module.modules())


def _autocast_now(device: torch.device) -> Callable[[], Any]:
    """A context in which autocast is as it is now; the backward pass runs in another one."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext
    dtype = torch.get_autocast_dtype(device.type)
    return lambda: torch.autocast(device.type, dtype=dtype)
