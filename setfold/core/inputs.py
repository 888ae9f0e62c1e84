"""What users pass to an encoder, validated: chunks of elements, batch sizes, slots and context."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from setfold.core.arguments import MAX_SIZE, check_sizes
from setfold.core.readout import Count
from setfold.core.statistic import spread
from setfold.errors import InputError, NonFiniteError
from setfold.kernels.modes import needs_plain_formula, vectorizes, widened

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


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

    def owned(self) -> Chunk:
        """The chunk or, with a graph, which may keep it, one whose memory only torch writes to."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self
        beside = (None if part is None else owned(part) for part in (self.mask, self.index))
        return Chunk(owned(self.elements), *beside)

    def count(self, sets: int) -> Count:
        """The number of elements, by set (B,) or the same for all sets."""
        if self.index is not None:
            return torch.bincount(self.index, minlength=sets)
        return self.elements.shape[1] if self.mask is None else self.mask.sum(1)

    def is_empty(self) -> bool:
        """Whether there is nothing to absorb."""
        if self.mask is None or needs_plain_formula():
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
        _check_kinds(elements, mask, index)
        if mask is None and index is None and width is not None:
            shape = elements.shape  # the common case first
            fits = len(shape) == 3 and shape[2] == width and (sets is None or shape[0] == sets)
            if fits and elements.device == device and elements.dtype == dtype:
                return self
        if index is not None:
            index = _check_ragged(elements, mask, index, sets or 0, width)
        else:
            shape = elements.shape
            fits = len(shape) >= 3 if width is None else len(shape) == 3 and shape[2] == width
            if not fits or (sets is not None and shape[0] != sets):
                raise InputError(_shape_message(elements, sets, width))
            if mask is not None:
                _check_mask(elements, mask)
        if device is not None and elements.device != device:
            raise InputError(
                f"elements are on {elements.device}, the encoder or state on {device}: move one of "
                "them with .to(...)."
            )
        if dtype is None or elements.dtype != dtype:
            _check_dtype(elements, dtype)
        if mask is not None:  # padding may hold anything, even NaN
            elements = elements.masked_fill(~spread(mask, elements), 0)
        return Chunk(elements, mask, index)


def validate_whole_sets(
    elements: Tensor,
    mask: Tensor | None,
    index: Tensor | None,
    batch_size: int | None,
    width: int | None,
    like: Tensor | None,
) -> tuple[Chunk, int]:
    """Check the arguments of a `forward`; returns a chunk that a graph may keep, and the number of sets.

    Args:
        elements: (B, n, d) or, with an index, (N, d).
        mask: (B, n) bool, True where present.
        index: (N,) integers in [0, batch_size).
        batch_size: the number of sets; None for that of a dense batch, or the largest index plus 1.
        width: the width d that the encoder takes; None for any trailing shape.
        like: a weight, whose dtype and device the elements must share.
    """
    if batch_size is not None:
        check_batch_size(batch_size)
    elif index is not None:
        batch_size = _number_of_sets(index)
    device, dtype = (None, None) if like is None else (like.device, like.dtype)
    sets = None if index is None else batch_size
    chunk = Chunk(elements, mask, index).validate(sets, width, device, dtype).owned()
    if sets is not None:
        return chunk, sets
    sets = chunk.elements.shape[0]
    if batch_size not in (None, sets):
        raise InputError(
            f"batch_size is {batch_size}, but elements {tuple(elements.shape)} without an index are "
            f"{sets} sets: leave batch_size out, or pass an index, the set of each row."
        )
    return chunk, sets


def _number_of_sets(index: Tensor) -> int:
    """The largest index plus 1."""
    if torch.compiler.is_compiling() or vectorizes():
        raise InputError("pass batch_size, the number of sets: here it cannot depend on the index.")
    check_kind("index", index)
    return int(index.max()) + 1 if index.numel() else 0


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


def _check_kinds(elements: object, mask: object, index: object) -> None:
    if not torch.compiler.is_compiling() and torch._C._is_tracing():
        raise InputError(
            "torch.jit.trace records the path of one input, which others must not take: use "
            "torch.export.export, torch.onnx.export(..., dynamo=True) or torch.compile."
        )
    check_kind("elements", elements)
    if mask is not None:
        check_kind("mask", mask)
    if index is not None:
        check_kind("index", index)


def is_shared(tensor: Tensor) -> bool:
    """Whether the memory is also that of an array, a buffer or a file.

    Version counters notice when torch writes to it, but not when others do. Such memory has a fixed
    size, also that of which `tensor.numpy()` has made an array.
    """
    try:
        return not tensor.untyped_storage().resizable()
    except NotImplementedError:  # a stand-in of a function transform
        return False


def owned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that a graph may keep: if its memory is shared, or of inference mode."""
    return tensor.clone() if tensor.is_inference() or is_shared(tensor) else tensor


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
    if vectorizes():
        raise InputError(
            "torch.vmap cannot split rows by an index, since lengths of sets are values: pad the "
            "sets and pass a mask."
        )
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
    if elements.dtype not in DTYPES:
        raise InputError(
            f"elements must be floating point, of 16 to 64 bits; got {elements.dtype}. Convert them "
            "with .to(...)."
        )
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


# ---- what a state begins with ------------------------------------------------------------------


def check_batch_size(batch_size: object) -> None:
    """Raise InputError unless it is a number of sets; it may be symbolic in an exported program."""
    if type(batch_size) is int and 0 <= batch_size <= MAX_SIZE:
        return
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
    if needs_plain_formula() or slots.is_meta:
        return slots.clone()
    if not bool(slots.isfinite().all()):
        raise NonFiniteError("slots must be finite; found NaN or infinity.")
    if not bool(widened(slots).square().sum(-1).isfinite().all()):
        raise InputError(
            "slots must be so small that their squares do not overflow, because slots are "
            f"normalized; found {float(slots.abs().max()):.3g}. Scale them down."
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
