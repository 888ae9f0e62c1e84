"""Arguments of constructors and of `initial_state`, and kinds of tensors, validated."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.masked import MaskedTensor

from setfold.errors import InputError, NonFiniteError
from setfold.kernels.modes import needs_plain_formula

MAX_SIZE = 2**31 - 1


# ---- constructors ------------------------------------------------------------------------------


def check_sizes(least: int = 1, **sizes: object) -> None:
    """Raise InputError unless every named size is an integer of at least `least`.

    >>> check_sizes(dim_in=3, num_slots=4)
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise InputError(f"{name} must be an integer of at least {least}; got {size!r}.")
        if size > MAX_SIZE:
            raise InputError(f"{name} must be an integer of at most {MAX_SIZE}; got {size!r}.")


def check_positive(**numbers: object) -> None:
    """Raise InputError unless every named number is positive and finite.

    >>> check_positive(epsilon=1e-5)
    """
    for name, number in numbers.items():
        real = isinstance(number, int | float) and not isinstance(number, bool)
        if not real or not 0 < number < math.inf:  # type: ignore[operator]  # mypy forgets `real`
            raise InputError(f"{name} must be a positive number; got {number!r}.")


def check_flags(**flags: object) -> None:
    """Raise InputError unless every named flag is True or False.

    >>> check_flags(bias=True)
    """
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"{name} must be True or False; got {flag!r}.")


def check_modules(**modules: object) -> None:
    """Raise InputError unless every named module is a torch.nn.Module or None.

    >>> check_modules(features=nn.Linear(3, 4), head=None)
    """
    for name, module in modules.items():
        if not isinstance(module, nn.Module | None):
            raise InputError(f"{name} must be a torch.nn.Module or None; got {module!r}.")


def check_choice(allowed: tuple[str, ...], **choices: object) -> None:
    """Raise InputError unless every named choice is one of the allowed words.

    >>> check_choice(("max", "mean"), subtract="max")
    """
    for name, choice in choices.items():
        if choice not in allowed:
            words = ", ".join(map(repr, allowed))
            raise InputError(f"{name} must be one of {words}; got {choice!r}.")


def words_of(allowed: Sequence[str], name: str, given: Any) -> list[str]:
    """One word or several different ones, in order, each of them allowed.

    Raises:
        InputError: it is something else.

    >>> words_of(("max", "mean"), "aggregate", "max")
    ['max']
    """
    alone = isinstance(given, str) or not isinstance(given, Sequence)
    words = [given] if alone else [*given]
    if not words or any(word not in allowed for word in words) or len({*words}) < len(words):
        raise InputError(
            f"{name} must be one of {', '.join(allowed)}, or a list of different ones; got "
            f"{given!r}."
        )
    return words


def numbers_of(name: str, given: Any) -> tuple[float, ...]:
    """One finite number or several.

    Raises:
        InputError: it is something else.

    >>> numbers_of("low", 0), numbers_of("high", [1, 2.5])
    ((0.0,), (1.0, 2.5))
    """
    alone = isinstance(given, str) or not isinstance(given, Sequence)
    numbers = [given] if alone else [*given]
    for number in numbers:
        real = isinstance(number, int | float) and not isinstance(number, bool)
        if not real or not abs(number) <= sys.float_info.max:
            raise InputError(f"{name} must be finite numbers; got {given!r:.200}.")
    return tuple(float(number) for number in numbers)


def check_heads(num_heads: int, **widths: int) -> None:
    """Raise InputError unless the number of heads divides every named width.

    >>> check_heads(4, dim=64)
    """
    for name, width in widths.items():
        if width % num_heads:
            raise InputError(f"num_heads must divide {name}={width}; got {num_heads}.")


# ---- tensors -------------------------------------------------------------------------------------


def check_kind(name: str, given: object) -> None:
    """Raise InputError unless a value is a tensor of ordinary memory: dense, unnamed, unmasked."""
    if not isinstance(given, Tensor):
        raise InputError(f"{name} must be a tensor; got {type(given).__name__}.")
    if torch.compiler.is_compiling():
        return
    if isinstance(given, MaskedTensor):
        raise InputError(
            f"{name} must not be a masked tensor: pass tensor.get_data(), and a mask (B, n) that is "
            "True where an element is present."
        )
    if given.is_nested:
        raise InputError(
            f"{name} must not be a nested tensor: pass torch.cat(tensor.unbind()) with an index, "
            "the set of each row, or pad the sets and pass a mask."
        )
    if given.layout != torch.strided:
        raise InputError(
            f"{name} must be a dense tensor; got {given.layout}. Convert it with .to_dense()."
        )
    if given.is_quantized:
        raise InputError(
            f"{name} must not be quantized; got {given.dtype}. Convert it with .dequantize()."
        )
    if any(getattr(given, "names", ())):  # until torch 2.12
        raise InputError(
            f"{name} must not have named dimensions: drop the names with .rename(None)."
        )


# ---- what a state begins with ------------------------------------------------------------------


def check_batch_size(batch_size: object) -> None:
    """Raise InputError unless it is a number of sets; it may be symbolic in an exported program."""
    if not isinstance(batch_size, torch.SymInt):
        check_sizes(0, batch_size=batch_size)


def check_generator(generator: object) -> None:
    """Raise InputError unless it is a torch.Generator or None."""
    if not isinstance(generator, torch.Generator | None):
        raise InputError(
            "generator must be a torch.Generator, such as torch.Generator().manual_seed(0); got "
            f"{generator!r}."
        )


def validate_slots(
    given: Tensor | Sequence[Tensor], dims: tuple[int, ...], batch_size: int, like: Tensor | None
) -> tuple[Tensor, ...]:
    """The slots of each level as (1, K, h) or (B, K, h), copied.

    Args:
        given: (K, h) or (B, K, h), one for each level; a single tensor for one level.
        dims: the slot size h of each level.
        batch_size: the number B of sets.
        like: a weight, whose dtype and device the slots must share.
    """
    if not isinstance(given, Tensor | Sequence) or isinstance(given, str):
        raise InputError(
            f"slots must be a tensor, or a list with a tensor for each level; got {given!r}."
        )
    levels = (given,) if isinstance(given, Tensor) else tuple(given)
    if len(levels) != len(dims):
        raise InputError(f"expected slots for {len(dims)} levels; got {len(levels)}.")
    return tuple(
        _validate_level(slots, dim, batch_size, like)
        for slots, dim in zip(levels, dims, strict=True)
    )


def _validate_level(slots: Tensor, dim: int, batch_size: int, like: Tensor | None) -> Tensor:
    check_kind("slots", slots)
    if like is not None and (slots.dtype, slots.device) != (like.dtype, like.device):
        raise InputError(
            f"slots must be {like.dtype} on {like.device}, like the encoder; got {slots.dtype} on "
            f"{slots.device}."
        )
    slots = slots.unsqueeze(0) if slots.dim() == 2 else slots
    if slots.dim() != 3 or slots.shape[0] not in (1, batch_size) or slots.shape[2] != dim:
        raise InputError(
            f"slots must be (K, {dim}) or ({batch_size}, K, {dim}); got {tuple(slots.shape)}."
        )
    if slots.shape[1] == 0:
        raise InputError(f"slots must be at least one; got {tuple(slots.shape)}.")
    if not (needs_plain_formula() or slots.is_meta or bool(slots.isfinite().all())):
        raise NonFiniteError("slots must be finite; found NaN or infinity.")
    return slots.clone()  # the state must not share memory with the caller


def validate_context(
    context: Tensor | Sequence[Tensor] | None, batch_size: int, wanted: bool
) -> tuple[Tensor, ...]:
    """The readouts of earlier passes, each (B, ...), copied; empty for None.

    Args:
        context: (B, ...), or several such tensors.
        batch_size: the number B of sets.
        wanted: whether the encoder has features that could use it.
    """
    if context is None:
        return ()
    if not isinstance(context, Tensor | Sequence) or isinstance(context, str):
        raise InputError(f"context must be a tensor or several tensors; got {context!r}.")
    parts = (context,) if isinstance(context, Tensor) else tuple(context)
    for part in parts:
        check_kind("context", part)
        if part.shape[:1] != (batch_size,):
            raise InputError(
                f"context must be ({batch_size}, ...), one per set; got {tuple(part.shape)}."
            )
    if parts and not wanted:
        raise InputError("this encoder has no features that could use a context: leave it out.")
    return tuple(part.clone() for part in parts)
