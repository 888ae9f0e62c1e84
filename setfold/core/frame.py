"""What a state fixes at its beginning, where a caller gives it: slots and context, checked."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from setfold.errors import InputError


def checked_slots(
    given: Tensor | Sequence[Tensor], dims: tuple[int, ...], batch_size: int, like: Tensor | None
) -> tuple[Tensor, ...]:
    """The slots of each level as (1, K, h) or (B, K, h).

    Args:
        given: (K, h) or (B, K, h), one for each level; for one level just that.
        dims: the slot size h of each level.
        batch_size: the number B of sets.
        like: a weight, whose dtype and device the slots must share.
    """
    levels = (given,) if isinstance(given, Tensor) else tuple(given)
    if len(levels) != len(dims):
        raise InputError(f"expected slots for {len(dims)} levels; got {len(levels)}.")
    return tuple(
        _checked_level(slots, dim, batch_size, like)
        for slots, dim in zip(levels, dims, strict=True)
    )


def _checked_level(slots: Tensor, dim: int, batch_size: int, like: Tensor | None) -> Tensor:
    if not isinstance(slots, Tensor):
        raise InputError(f"slots must be a tensor; got {type(slots).__name__}.")
    if like is not None and (slots.dtype, slots.device) != (like.dtype, like.device):
        raise InputError(
            f"slots must be {like.dtype} on {like.device}, as the encoder is; got "
            f"{slots.dtype} on {slots.device}."
        )
    slots = slots.unsqueeze(0) if slots.dim() == 2 else slots
    if slots.dim() != 3 or slots.shape[0] not in (1, batch_size) or slots.shape[2] != dim:
        raise InputError(
            f"slots must be (K, {dim}) or ({batch_size}, K, {dim}); got {tuple(slots.shape)}."
        )
    return slots.clone()  # a state must not live off the caller's memory


def checked_context(
    context: Tensor | Sequence[Tensor] | None, batch_size: int, wanted: bool
) -> tuple[Tensor, ...]:
    """What earlier passes found, each (B, ...) in memory of its own; nothing for None.

    Args:
        context: (B, ...), or several such tensors.
        batch_size: the number B of sets.
        wanted: whether there are features that could look at it.
    """
    if context is None:
        return ()
    parts = (context,) if isinstance(context, Tensor) else tuple(context)
    for part in parts:
        if not isinstance(part, Tensor):
            raise InputError(f"context must be a tensor or several; got {type(part).__name__}.")
        if part.shape[:1] != (batch_size,):
            raise InputError(
                f"context must be ({batch_size}, ...), one per set; got {tuple(part.shape)}."
            )
    if parts and not wanted:
        raise InputError("this encoder has no features that could look at a context: leave it out.")
    return tuple(part.clone() for part in parts)
