"""What users pass in, validated: chunks of elements, slots, context and constructor arguments."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setfold.core.readout import Count
from setfold.errors import InputError, NonFiniteError

Array = Tensor | np.ndarray
CHUNK_FORMS = (
    "chunks are tensors or arrays (B, n, d), or pairs (elements, mask) or (elements, index)"
)


class Chunk:
    """Some elements of B sets: dense (B, n, d) with an optional mask, or ragged (N, d) with an index.

    Attributes:
        elements: (B, n, d), or (N, d) with an index.
        mask: (B, n) bool, True where an element is present; None if all are.
        index: (N,), the set of each row; None for dense elements.
    """

    __slots__ = ("elements", "index", "mask")

    def __init__(
        self, elements: Tensor, mask: Tensor | None = None, index: Tensor | None = None
    ) -> None:
        self.elements = elements
        self.mask = mask
        self.index = index

    def clone(self) -> Chunk:
        """A copy in memory of its own; gradients flow through, as through any clone."""
        beside = (None if part is None else part.clone() for part in (self.mask, self.index))
        return Chunk(self.elements.clone(), *beside)

    def count(self, sets: int) -> Count:
        """The number of elements, by set (B,) or the same for all sets."""
        if self.index is not None:
            return torch.bincount(self.index, minlength=sets)
        return self.elements.shape[1] if self.mask is None else self.mask.sum(1)

    def is_empty(self) -> bool:
        """Whether there is nothing to absorb."""
        if self.mask is None or torch.compiler.is_compiling():
            return self.elements.numel() == 0
        return not bool(self.mask.any())

    def one_set(self, number: int) -> tuple[Tensor, Tensor | None]:
        """The elements (1, n, d) and mask (1, n) of one set."""
        if self.index is not None:
            return self.elements[self.index == number].unsqueeze(0), None
        mask = None if self.mask is None else self.mask[number : number + 1]
        return self.elements[number : number + 1], mask

    # ---- validation --------------------------------------------------------------------------

    def validate(
        self,
        sets: int | None,
        width: int | None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Chunk:
        """Check shapes, dtypes, devices and ranges; zero the elements that the mask hides.

        Args:
            sets: the number B of sets; None for any number, if the chunk is dense.
            width: the width d that the encoder takes; None for any trailing shape.
            device: where the elements must be; None for anywhere.
            dtype: what the elements must be; None for any floating-point type.

        Raises:
            InputError: something does not fit.
        """
        elements, mask, index = self.elements, self.mask, self.index
        if mask is None and index is None and width is not None and isinstance(elements, Tensor):
            shape = elements.shape  # the common case first
            fits = len(shape) == 3 and shape[2] == width and (sets is None or shape[0] == sets)
            if fits and elements.device == device and elements.dtype == dtype:
                return self
        _check_tensors(elements, mask, index)
        if index is not None:
            index = _check_ragged(elements, mask, index, sets or 0, width)
        else:
            shape = elements.shape
            fits = len(shape) >= 3 if width is None else len(shape) == 3 and shape[2] == width
            if not fits or (sets is not None and shape[0] != sets):
                raise InputError(_shape_message(elements, sets, width))
            if mask is not None:
                _check_mask(elements, mask)
                hidden = ~mask.reshape(*shape[:2], *(1,) * (len(shape) - 2))
                elements = elements.masked_fill(hidden, 0)  # padding may hold anything, even NaN
        if device is not None and elements.device != device:
            raise InputError(
                f"elements are on {elements.device}, the encoder or state on {device}: move one of "
                "them with .to(...)."
            )
        if dtype is None or elements.dtype != dtype:
            _check_dtype(elements, dtype)
        return Chunk(elements, mask, index)

    def check_finite(self) -> None:
        """Raise NonFiniteError if an element is not finite, judged by their sum first."""
        if torch.compiler.is_compiling() or self.elements.is_meta:
            return
        if not math.isfinite(self.elements.detach().sum().item()):
            self.find_non_finite()

    def find_non_finite(self) -> None:
        """Raise NonFiniteError that names the first element that is not finite, if there is one."""
        wrong = ~torch.isfinite(self.elements)
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            raise NonFiniteError(
                f"elements must be finite; elements{list(place)} is {self.elements[place].item()} "
                f"({int(wrong.sum())} such numbers in the chunk). Clean the chunk or mask those "
                "elements; the state is unchanged."
            ) from None


def validate_whole_sets(
    elements: Tensor,
    mask: Tensor | None,
    index: Tensor | None,
    batch_size: int | None,
    width: int | None,
    like: Tensor | None,
) -> tuple[Chunk, int]:
    """Check the arguments of a `forward`; returns the chunk and the number of sets.

    Args:
        elements: (B, n, d) or, with an index, (N, d).
        mask: (B, n) bool, True where present.
        index: (N,) integers in [0, batch_size).
        batch_size: the number of sets of a ragged batch.
        width: the width d that the encoder takes; None for any trailing shape.
        like: a weight, whose dtype and device the elements must share.
    """
    if index is not None and batch_size is None:
        raise InputError("a ragged batch needs batch_size, the number of sets, beside its index.")
    device, dtype = (None, None) if like is None else (like.device, like.dtype)
    sets = None if index is None else batch_size
    chunk = Chunk(elements, mask, index).validate(sets, width, device, dtype)
    return chunk, chunk.elements.shape[0] if sets is None else sets


def _check_tensors(elements: object, mask: object, index: object) -> None:
    for name, given in (("elements", elements), ("mask", mask), ("index", index)):
        if not (isinstance(given, Tensor) or (given is None and name != "elements")):
            raise InputError(f"{name} must be a tensor; got {type(given).__name__}.")


def _check_mask(elements: Tensor, mask: Tensor) -> None:
    shape = tuple(elements.shape[:2])
    if mask.dtype != torch.bool or mask.shape != shape:
        raise InputError(
            f"mask must be bool {shape}, True where an element is present; got {mask.dtype} "
            f"{tuple(mask.shape)}."
        )
    if mask.device != elements.device:
        raise InputError(f"mask is on {mask.device}, elements on {elements.device}.")


def _check_ragged(
    elements: Tensor, mask: Tensor | None, index: Tensor, sets: int, width: int | None
) -> Tensor:
    if mask is not None:
        raise InputError("pass a mask for dense elements or an index for ragged ones, not both.")
    rows = elements.dim() >= 2 if width is None else elements.shape[1:] == (width,)
    if not rows:
        raise InputError(
            f"with an index, elements must be (N, {'...' if width is None else width}); got "
            f"{tuple(elements.shape)}."
        )
    if index.shape != elements.shape[:1] or index.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"index must be int64 ({elements.shape[0]},), the set of each element; got "
            f"{index.dtype} {tuple(index.shape)}."
        )
    if index.device != elements.device:
        raise InputError(f"index is on {index.device}, elements on {elements.device}.")
    if index.numel():
        low, high = (int(bound) for bound in torch.aminmax(index))
        if low < 0 or high >= sets:
            wrong = low if low < 0 else high
            raise InputError(f"index must be in 0..{sets - 1} for {sets} sets; found {wrong}.")
    return index.long()


def _check_dtype(elements: Tensor, dtype: torch.dtype | None) -> None:
    if not elements.is_floating_point():
        raise InputError(f"elements must be floating point; got {elements.dtype}.")
    if dtype is not None and elements.dtype != dtype:
        raise InputError(
            f"elements are {elements.dtype}, the encoder's weights {dtype}: cast the elements with "
            f".to({dtype}), or the encoder."
        )


def _shape_message(elements: Tensor, sets: int | None, width: int | None) -> str:
    """What was expected, what came, and what newcomers most often meant."""
    shape = tuple(elements.shape)
    expected = f"({'B' if sets is None else sets}, n, {'...' if width is None else width})"
    message = f"elements must be {expected}; got {shape}."
    if len(shape) == 2 and (width is None or shape[1] == width):
        return f"{message} For one set, add a batch dimension with elements.unsqueeze(0)."
    if len(shape) == 3 and width is not None and shape[1] == width != shape[2]:
        return f"{message} Features come last: elements.transpose(1, 2)."
    if len(shape) >= 3 and sets is not None and shape[0] != sets:
        return f"{message} The state has {sets} sets; use encoder.initial_state({shape[0]})."
    return message


# ---- chunks as users pass them to `fold` -------------------------------------------------------


def chunk_from(given: Any, like: Tensor | None) -> Chunk:
    """A chunk from a tensor, an array, or a pair with a mask (bool) or an index.

    Args:
        given: elements (B, n, d), or a pair with a mask (B, n); or (N, d) and an index (N,).
        like: a weight; arrays are converted to its dtype and device.
    """
    parts = tuple(given) if isinstance(given, tuple | list) else (given,)
    if len(parts) not in (1, 2) or not all(isinstance(part, Array) for part in parts):
        raise InputError(f"{CHUNK_FORMS}; got {type_names(given)}.")
    elements = _tensor_from(parts[0], like)
    if elements.dim() == 0:
        raise InputError(f"{CHUNK_FORMS}; got a single number.")
    if len(parts) == 1:
        return Chunk(elements)
    beside = _tensor_from(parts[1], None)
    if isinstance(parts[1], np.ndarray):
        beside = beside.to(elements.device)
    is_mask = beside.dtype == torch.bool
    if not is_mask and beside.dim() != 1:
        raise InputError(
            "the second item of a pair must be a mask, bool (B, n), or an index, int64 (N,); got "
            f"{beside.dtype} {tuple(beside.shape)}."
        )
    return Chunk(elements, beside, None) if is_mask else Chunk(elements, None, beside)


def type_names(given: object) -> str:
    """The type of a value, with the types of its items, for a message."""
    if isinstance(given, tuple | list):
        items = " and ".join(type(item).__name__ for item in given[:3])
        return f"{type(given).__name__} of {items}"
    return type(given).__name__


def _tensor_from(given: Array, like: Tensor | None) -> Tensor:
    """A tensor as it is; an array converted, and copied if torch could not write to its memory."""
    if isinstance(given, Tensor):
        return given
    if isinstance(given, np.ma.MaskedArray):
        raise InputError(
            "masked arrays are not supported: pass a pair (array.data, mask), with a mask (B, n) "
            "that is True where an element is present."
        )
    if given.dtype.kind not in "fiub" or given.dtype.itemsize > 8:
        raise InputError(f"arrays must hold numbers of 64 bits at most; got dtype {given.dtype}.")
    mapped = _mapped_file(given)
    shareable = given.flags.writeable and all(stride >= 0 for stride in given.strides)
    copy = None if mapped is None and shareable else True
    found = torch.from_numpy(np.array(given, given.dtype.newbyteorder("="), copy=copy))
    if mapped is not None:
        mapped.madvise(mmap.MADV_DONTNEED)
    return found if like is None else found.to(like.device, like.dtype)


def _mapped_file(array: Any) -> mmap.mmap | None:
    """The memory-mapped file behind an array, if its pages may be released after reading.

    Unless released they count as memory of this process. Pages of a copy-on-write mapping, or of
    one that numpy did not open, may hold data that was never written to the file: keep those.
    """
    shared = False
    while array is not None and not isinstance(array, mmap.mmap):
        shared = shared or (isinstance(array, np.memmap) and array.mode in ("r", "r+", "w+"))
        array = getattr(array, "base", None)
    return array if shared and hasattr(mmap, "MADV_DONTNEED") else None


# ---- what a state begins with ------------------------------------------------------------------


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
    levels = (given,) if isinstance(given, Tensor) else tuple(given)
    if len(levels) != len(dims):
        raise InputError(f"expected slots for {len(dims)} levels; got {len(levels)}.")
    return tuple(
        _validate_level(slots, dim, batch_size, like)
        for slots, dim in zip(levels, dims, strict=True)
    )


def _validate_level(slots: Tensor, dim: int, batch_size: int, like: Tensor | None) -> Tensor:
    if not isinstance(slots, Tensor):
        raise InputError(f"slots must be a tensor; got {type(slots).__name__}.")
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
    parts = (context,) if isinstance(context, Tensor) else tuple(context)
    for part in parts:
        if not isinstance(part, Tensor):
            raise InputError(
                f"context must be a tensor or several tensors; got {type(part).__name__}."
            )
        if part.shape[:1] != (batch_size,):
            raise InputError(
                f"context must be ({batch_size}, ...), one per set; got {tuple(part.shape)}."
            )
    if parts and not wanted:
        raise InputError("this encoder has no features that could use a context: leave it out.")
    return tuple(part.clone() for part in parts)


# ---- constructor arguments ---------------------------------------------------------------------


def check_sizes(**sizes: object) -> None:
    """Raise InputError unless every named size is an integer of at least 1.

    >>> check_sizes(dim_in=3, num_slots=4)
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise InputError(f"{name} must be an integer of at least 1; got {size!r}.")


def check_choice(allowed: tuple[str, ...], **choices: object) -> None:
    """Raise InputError unless every named choice is one of the allowed words.

    >>> check_choice(("max", "mean"), subtract="max")
    """
    for name, choice in choices.items():
        if choice not in allowed:
            words = ", ".join(map(repr, allowed))
            raise InputError(f"{name} must be one of {words}; got {choice!r}.")


def check_heads(num_heads: int, **widths: int) -> None:
    """Raise InputError unless the number of heads divides every named width.

    >>> check_heads(4, dim=64)
    """
    for name, width in widths.items():
        if width % num_heads:
            raise InputError(f"num_heads must divide {name}={width}; got {num_heads}.")
