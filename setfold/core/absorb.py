"""How a chunk becomes statistics: all sets at once, sets of one length at a time, or one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from setfold.core.chunk import Chunk
from setfold.core.state import SetState
from setfold.core.statistic import STATISTICS, Statistics, join, spread
from setfold.kernels.ragged import Group, group_by_length

Groups = Iterator[Group]
Arrivals = Iterator[tuple[Tensor, Statistics]]  # the numbers of some sets, and what comes for them

FEATURE_ROWS = 1 << 16  # elements that go through a feature network at once when no graph is kept


class Again(NamedTuple):
    """What is known when a chunk that was absorbed without a graph is absorbed again with one."""

    prepared: Any  # what the encoder derived from the state's frame


class Absorber(Protocol):
    """What of an encoder is needed here; encoder.py says what each does."""

    @property
    def has_features(self) -> bool: ...
    @property
    def own_slots_at_once(self) -> bool: ...
    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics: ...
    def absorb_groups(self, elements: Tensor, groups: Groups, prepared: Any) -> Arrivals | None: ...
    def featurize(
        self, elements: Tensor, mask: Tensor | None, context: tuple[Tensor, ...]
    ) -> Tensor: ...
    def prepare(self, frame: tuple[Tensor, ...]) -> Any: ...
    def prepared_for(self, state: SetState) -> Any: ...


def combine_with(
    encoder: Absorber,
    state: SetState,
    chunk: Chunk,
    combine: Callable[[Statistics, Statistics], Statistics],
    again: Again | None = None,
) -> Statistics:
    """The state's statistics joined with a chunk's, or relieved of them.

    Args:
        encoder: whose state it is.
        state: what was seen before.
        chunk: what comes.
        combine: the two statistics into one.
        again: of a chunk that was absorbed before, without a graph, what is known.

    Raises:
        NonFiniteError: the result is not finite. The state is as it was.
    """
    if chunk.index is None and (encoder.own_slots_at_once or not state.has_own_slots):
        prepared = encoder.prepared_for(state) if again is None else again.prepared
        found = absorb_dense(
            encoder, chunk.elements, chunk.mask, state.context, prepared, cut=again is not None
        )
        statistics = combine(state.statistics, found)
        chunk.refuse_broken(statistics)
        return statistics
    if state.has_own_slots:
        arrivals = _set_by_set(encoder, state, chunk, cut=again is not None)
    else:
        prepared = encoder.prepared_for(state) if again is None else again.prepared
        arrivals = _ragged(encoder, state, chunk, prepared, cut=again is not None)
    statistics = {name: tuple(p.clone() for p in ps) for name, ps in state.statistics.items()}
    for sets, found in arrivals:
        held = {k: tuple(p.index_select(0, sets) for p in ps) for k, ps in statistics.items()}
        combined = combine(held, found)
        chunk.refuse_broken(combined)
        for name, parts in combined.items():
            for whole, part in zip(statistics[name], parts, strict=True):
                whole.index_copy_(0, sets, part)
    return statistics


def absorb_dense(
    encoder: Absorber,
    elements: Tensor,
    mask: Tensor | None,
    context: tuple[Tensor, ...],
    prepared: Any,
    cut: bool = False,
) -> Statistics:
    """Featurize and absorb; without a graph, some rows at a time, so that memory stays flat.

    Args:
        encoder: whose features and statistics they are.
        elements: (B, n, ...).
        mask: (B, n), True where present, or None.
        context: what features look at besides.
        prepared: what the encoder derived from the frame.
        cut: whether to do the same with a graph, so that what is drawn for each row is the same.
    """
    step = max(1, FEATURE_ROWS // elements.shape[0])
    whole = torch.compiler.is_compiling() or (torch.is_grad_enabled() and not cut)
    if whole or elements.shape[1] <= step or not encoder.has_features:
        return encoder.absorb(encoder.featurize(elements, mask, context), mask, prepared)
    pieces = elements.split(step, 1)
    masks = [None] * len(pieces) if mask is None else mask.split(step, 1)
    absorbed = (
        encoder.absorb(encoder.featurize(piece, shown, context), shown, prepared)
        for piece, shown in zip(pieces, masks, strict=True)
        if shown is None or bool(shown.any())
    )
    return reduce(join, absorbed)


def _set_by_set(encoder: Absorber, state: SetState, chunk: Chunk, cut: bool) -> Arrivals:
    """What a chunk adds to each set, where each has slots of its own."""
    for number in range(state.batch_size):
        alone, elements, mask = state[number], *chunk.one_set(number)
        if elements.numel():
            prepared = encoder.prepare(alone.frame)
            found = absorb_dense(encoder, elements, mask, alone.context, prepared, cut)
            yield torch.tensor([number], device=elements.device), found


def _ragged(encoder: Absorber, state: SetState, chunk: Chunk, prepared: Any, cut: bool) -> Arrivals:
    """What a ragged chunk adds to its sets."""
    assert chunk.index is not None
    elements, context = chunk.elements, state.context
    if encoder.has_features and not context:  # each row on its own, so before they are sorted
        whole = torch.is_grad_enabled() and not cut
        step = elements.shape[0] if whole else FEATURE_ROWS
        pieces = elements.unsqueeze(0).split(step, 1)
        elements = torch.cat([encoder.featurize(p, None, ()) for p in pieces], 1).squeeze(0)
    groups = group_by_length(chunk.index, state.batch_size)
    plain = elements.device.type == "cpu" and elements.dtype in (torch.float32, torch.float64)
    if plain and not (context or torch.is_grad_enabled() or torch.compiler.is_compiling()):
        at_once = encoder.absorb_groups(elements, groups, prepared)
        if at_once is not None:
            yield from at_once
            return
    for sets, rows, mask in groups:
        some = elements[rows]  # (b, length, d)
        if context:
            some = encoder.featurize(some, mask, tuple(part[sets] for part in context))
        yield sets, encoder.absorb(some, mask, prepared)


def emptied(statistics: Statistics, where: Tensor) -> Statistics:
    """Statistics in which some sets, where (B,) is True, are exactly empty.

    >>> emptied({"sum": (torch.tensor([1e-17, 2.0]),)}, torch.tensor([True, False]))
    {'sum': (tensor([0., 2.]),)}
    """
    return {
        name: tuple(
            part.masked_fill(spread(where, part), empty)
            for part, empty in zip(parts, STATISTICS[name].empty, strict=True)
        )
        for name, parts in statistics.items()
    }


def mapped(prepared: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """What an encoder prepared, with a function applied to each tensor of it, in tuples or not."""
    if isinstance(prepared, Tensor):
        return function(prepared)
    if isinstance(prepared, dict):
        return {name: mapped(item, function) for name, item in prepared.items()}
    if isinstance(prepared, tuple | list):
        items = [mapped(item, function) for item in prepared]
        return type(prepared)(*items) if hasattr(prepared, "_fields") else type(prepared)(items)
    return prepared


def copied(prepared: Any) -> Any:
    """What an encoder prepared, as copies that no optimiser step changes."""
    return mapped(prepared, lambda tensor: tensor.detach().clone())
