"""What a fold begins with: slots, declared fields, and what is derived from the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from setfold.core.absorb import PRIMITIVES, shows_non_finite, takes_shortcut
from setfold.core.arguments import check_sizes
from setfold.core.inputs import (
    check_batch_size,
    check_generator,
    check_kind,
    owned,
    validate_slots,
)
from setfold.core.state import SetState
from setfold.core.statistic import Fields, is_finite, join
from setfold.core.weights import Weights, can_be_kept, kept_for, known_weights_of, weights_of
from setfold.errors import InputError, StateMismatchError
from setfold.kernels.modes import needs_plain_formula, transforms

if TYPE_CHECKING:
    from setfold.core.encoder import StreamingSetEncoder

FEW = 512  # elements of a set for which calls take longer than arithmetic
FEW_TRACKED = 4096  # with a graph
PLAIN = (Tensor, nn.Parameter)  # subclasses may do anything
SMALL_DTYPES = (torch.float32, torch.float64)  # others overflow or need more care


class Setup(NamedTuple):
    """What a fold begins with, apart from its elements."""

    frame: tuple[Tensor, ...]  # the slots of each level
    fields: Fields
    prepared: Any  # from StreamingSetEncoder.prepare
    weight: Tensor | None  # the first one, whose dtype and device the elements must share


def setup_of(encoder: StreamingSetEncoder) -> Setup:
    """The default beginning of a fold. Without a graph it is kept as long as it is valid.

    In training mode random slots are drawn by each call, so nothing is kept.
    """
    if encoder.training or torch.is_grad_enabled() or needs_plain_formula():
        return _new_setup(encoder)
    kept: Setup | None = kept_for(encoder)
    if kept is not None:
        return kept
    if not may_keep(encoder) or not can_be_kept((*encoder.parameters(), *encoder.buffers())):
        return _new_setup(encoder)
    weights = weights_of(encoder, encoder.shaping_modules())
    if weights.has_hooks:
        return _new_setup(encoder)
    with torch.inference_mode(False), torch.no_grad():  # states may outlive inference mode
        setup = _new_setup(encoder)
        frame = tuple(slots.clone() for slots in setup.frame)  # no optimizer may change it
    kept = weights.kept = setup._replace(frame=frame)
    return kept


def begin(
    encoder: StreamingSetEncoder,
    batch_size: int,
    num_slots: int | None,
    generator: torch.Generator | None,
    slots: Tensor | Sequence[Tensor] | None,
) -> tuple[tuple[Tensor, ...], Fields, Any]:
    """The slots of a new state, its fields, and what was derived from the slots, if it was kept.

    The arguments are those of `initial_state`, not validated yet.
    """
    check_batch_size(batch_size)
    check_generator(generator)
    if num_slots is not None:
        check_sizes(num_slots=num_slots)
    if slots is None and num_slots is None and generator is None and may_keep(encoder):
        return setup_of(encoder)[:3]
    if slots is None:
        frame = encoder.draw_frame(num_slots, generator)
    elif num_slots is not None or generator is not None:
        raise InputError("pass slots, or num_slots and generator to draw them, not both.")
    else:
        frame = validate_slots(slots, encoder.slot_dims, batch_size, encoder.first_weight)
    return frame, encoder.fields(frame), None


def _new_setup(encoder: StreamingSetEncoder) -> Setup:
    frame = encoder.draw_frame(None, None)
    return Setup(frame, encoder.fields(frame), encoder.prepare(frame), encoder.first_weight)


def current_weights_of(encoder: StreamingSetEncoder) -> Weights:
    """The weights that shape the states which the encoder creates now."""
    if torch.compiler.is_compiling():
        return Weights.unknown()
    if transforms():  # which cannot read weights
        return known_weights_of(encoder) or Weights.unknown()
    return weights_of(encoder, encoder.shaping_modules())


def recognize(encoder: StreamingSetEncoder, state: SetState) -> SetState:
    """The state, if the encoder's current weights have shaped it.

    Raises:
        StateMismatchError: it is not a state, or one of another model.
    """
    if torch.compiler.is_compiling():
        return state
    if not isinstance(state, SetState):
        raise StateMismatchError(f"expected a state; got {type(state).__name__}.")
    state = state.trackable()
    if state.weights.are_of(encoder) or (transforms() and state.weights.is_unknown):
        return state
    mine = current_weights_of(encoder)
    frame = state.frame
    alike = _has_slots_for(encoder, frame) and state.fields == encoder.fields(frame)
    if not (alike and state.weights.match(mine)):
        raise StateMismatchError(
            f"this state does not belong to this {type(encoder).__name__}: its fields "
            f"({', '.join(state.fields)}) or its weights differ. A state is valid for the weights "
            "that created it; after a training step fold the set again, from "
            "encoder.initial_state(). (BatchNorm and spectral_norm change their buffers with every "
            "chunk in training mode: call model.eval(). Plain attributes of modules are settings: "
            "give counters a name that begins with an underscore.)"
        )
    return SetState(
        state.fields,
        state.statistics,
        state.count,
        frame=frame,
        context=state.context,
        weights=mine,
    )


def _has_slots_for(encoder: StreamingSetEncoder, frame: tuple[Tensor, ...]) -> bool:
    """Whether slots, which may come from a file, have the sizes and a dtype of the encoder."""
    dtypes = {weight.dtype for weight in (*encoder.parameters(), *encoder.buffers())}
    return tuple(slots.shape[-1] for slots in frame) == tuple(encoder.slot_dims) and all(
        slots.dtype in dtypes for slots in frame
    )


def encode_small(encoder: StreamingSetEncoder, elements: Any, setup: Setup | None) -> Tensor | None:
    """The encoding by `encoder.encode_small`; None if anything is unusual.

    Args:
        encoder: the encoder.
        elements: (1, n, d), not validated yet.
        setup: of the fold; None with a graph.
    """
    if type(elements) not in PLAIN or elements.dtype not in SMALL_DTYPES or needs_plain_formula():
        return None
    try:
        shape = elements.shape
        most = FEW_TRACKED if setup is None else FEW
        small = len(shape) == 3 and shape[0] == 1 and 0 < shape[1] <= most
        if not small or shape[2] != encoder.dim_in or not takes_shortcut(encoder, "encode_small"):
            return None
        prepared, weight = (None, encoder.first_weight) if setup is None else setup[2:]
        if weight is None or elements.dtype != weight.dtype or elements.device != weight.device:
            return None
        if setup is None:
            check_kind("elements", elements)
            elements = owned(elements)
        found = encoder.encode_small(elements, prepared)
        if found is None or _is_own(encoder):  # setfold's own are finite
            return found
        return found if math.isfinite(found.detach().sum().item()) else None
    except RuntimeError:  # a sparse, nested or meta tensor
        return None


def update_small(encoder: StreamingSetEncoder, state: Any, elements: Any) -> SetState | None:
    """The state after one small chunk, by `encoder.absorb_small`; None if anything is unusual.

    Args:
        encoder: the encoder.
        state: of one set, not recognized yet.
        elements: (1, n, d), not validated yet.
    """
    if torch.is_grad_enabled() or needs_plain_formula():
        return None
    if type(elements) not in PLAIN or not isinstance(state, SetState):
        return None
    try:
        count, prepared, weights, shape = state.count, state.prepared, state.weights, elements.shape
        if prepared is None or state.context or len(shape) != 3 or shape[0] != 1 or len(count) != 1:
            return None
        if not 0 < shape[1] <= FEW or shape[2] != encoder.dim_in or elements.dtype != weights.dtype:
            return None
        if elements.device != count.device or not takes_shortcut(encoder, "absorb_small"):
            return None
        if not (weights.are_of(encoder) and shows_non_finite(encoder, state.frame)):
            return None
        found = encoder.absorb_small(elements, prepared)
        if found is None:
            return None
        statistics = join(state.fields, state.statistics, found)
        if not is_finite(statistics):
            return None
        return state.with_statistics(statistics, count + _number(shape[1], count.device))
    except RuntimeError:  # a sparse, nested or meta tensor
        return None


@cache
def _number(number: int, device: torch.device) -> Tensor:
    """A number as a tensor; adding it takes less time than adding a Python number."""
    with torch.inference_mode(False):
        return torch.tensor(number, device=device)


def may_keep(encoder: StreamingSetEncoder) -> bool:
    """Whether what is derived from the weights may be used again.

    With a graph, each call must derive its own. All weights of the encoder must shape its states,
    because only those are compared. And it must be one of setfold's, with the methods of its class,
    which derive nothing from other attributes.
    """
    if torch.is_grad_enabled() or needs_plain_formula():
        return False
    own = _is_own(encoder) and vars(encoder).keys().isdisjoint(PRIMITIVES)
    return own and encoder.shaping_modules() == (encoder,)


def _is_own(encoder: StreamingSetEncoder) -> bool:
    """Whether the class of an encoder is one of setfold's."""
    return type(encoder).__module__.startswith("setfold.")
