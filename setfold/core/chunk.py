"""A piece of some sets, checked once and for all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from setfold.core.readout import Count
from setfold.core.statistic import Statistics, refuse_non_finite
from setfold.errors import InputError, NonFiniteError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements of B sets: dense (B, n, d) with an optional mask, or ragged (N, d) with an index."""

    elements: Tensor
    mask: Tensor | None
    index: Tensor | None
    sets: int

    @classmethod
    def checked(
        cls,
        elements: Tensor,
        mask: Tensor | None,
        index: Tensor | None,
        *,
        sets: int | None,
        width: int | None,
    ) -> Chunk:
        """Check shapes, dtypes and ranges; blank out what the mask hides.

        Args:
            elements: (B, n, d) or, with an index, (N, d).
            mask: (B, n) bool, True where present.
            index: (N,) integers in [0, sets).
            sets: the number B of sets of the state; None for as many as come.
            width: the d that the encoder takes, or None for any trailing shape.
        """
        for name, given in (("elements", elements), ("mask", mask), ("index", index)):
            if not (isinstance(given, Tensor) or (given is None and name != "elements")):
                raise InputError(f"{name} must be a tensor; got {type(given).__name__}.")
        if index is not None:
            return cls._checked_ragged(elements, mask, index, sets or 0, width)
        shape = elements.shape
        fits = len(shape) >= 3 if width is None else len(shape) == 3 and shape[2] == width
        if not fits or (sets is not None and shape[0] != sets):
            expected = f"({'B' if sets is None else sets}, n, {'...' if width is None else width})"
            raise InputError(
                f"elements must be {expected}; got {tuple(shape)}.{_advice(elements, sets, width)}"
            )
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != shape[:2]:
                raise InputError(
                    f"mask must be bool {tuple(shape[:2])}, True where an element is present; "
                    f"got {mask.dtype} {tuple(mask.shape)}."
                )
            if mask.device != elements.device:
                raise InputError(f"mask is on {mask.device}, elements on {elements.device}.")
            hidden = ~mask.reshape(*shape[:2], *(1,) * (len(shape) - 2))
            elements = elements.masked_fill(hidden, 0)  # padding may hold anything, NaN too
        return cls(elements, mask, None, shape[0])

    @classmethod
    def of_whole_sets(
        cls,
        elements: Tensor,
        mask: Tensor | None,
        index: Tensor | None,
        batch_size: int | None,
        width: int | None,
        like: Tensor | None,
    ) -> Chunk:
        """Check what a forward is given: all elements of some sets.

        Args:
            elements: (B, n, d) or, with an index, (N, d).
            mask: (B, n) bool, True where present.
            index: (N,) integers in [0, batch_size).
            batch_size: the number of sets of a ragged batch.
            width: the d that the encoder takes, or None for any trailing shape.
            like: a weight, whose dtype and device the elements must share.
        """
        if index is not None and batch_size is None:
            raise InputError(
                "a ragged batch needs batch_size, the number of sets, beside its index."
            )
        sets = None if index is None else batch_size
        chunk = cls.checked(elements, mask, index, sets=sets, width=width)
        if like is not None:
            chunk.refuse_foreign(like.device, like.dtype)
        return chunk

    @classmethod
    def _checked_ragged(
        cls, elements: Tensor, mask: Tensor | None, index: Tensor, sets: int, width: int | None
    ) -> Chunk:
        if mask is not None:
            raise InputError(
                "give a mask for dense elements or an index for ragged ones, not both."
            )
        fits = (
            elements.dim() >= 2
            if width is None
            else elements.dim() == 2 and elements.shape[1] == width
        )
        if not fits:
            raise InputError(
                f"with an index, elements must be (N, {'...' if width is None else width}); "
                f"got {tuple(elements.shape)}."
            )
        if index.shape != elements.shape[:1] or index.dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"index must be int64 ({elements.shape[0]},), the set of each element; "
                f"got {index.dtype} {tuple(index.shape)}."
            )
        if index.device != elements.device:
            raise InputError(f"index is on {index.device}, elements on {elements.device}.")
        if index.numel():
            low, high = (int(bound) for bound in torch.aminmax(index))
            if low < 0 or high >= sets:
                wrong = low if low < 0 else high
                raise InputError(f"index must be in 0..{sets - 1} for {sets} sets; found {wrong}.")
        return cls(elements, None, index.long(), sets)

    def count(self) -> Count:
        """The number of elements, by set (B,) or the same for all."""
        if self.index is not None:
            return torch.bincount(self.index, minlength=self.sets)
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

    def refuse_foreign(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Raise unless the elements are where the state is, and in what the weights are."""
        elements = self.elements
        if elements.device != device:
            raise InputError(
                f"elements are on {elements.device}, the encoder or state on {device}: move one with .to(...)."
            )
        if not elements.is_floating_point():
            raise InputError(f"elements must be floating point; got {elements.dtype}.")
        if dtype is not None and elements.dtype != dtype:
            raise InputError(
                f"elements are {elements.dtype}, the encoder's weights {dtype}: cast the elements "
                f"with .to({dtype}), or the encoder."
            )

    def refuse_broken(self, found: Statistics) -> None:
        """Raise if what was made of the chunk is not finite, and say which element it was."""
        if torch.compiler.is_compiling() or self.elements.is_meta:
            return
        try:
            refuse_non_finite(found)
        except NonFiniteError:
            self._refuse_elements()
            raise

    def refuse_non_finite(self) -> None:
        """Raise if an element is not finite, judged by their sum; only then look closer."""
        if torch.compiler.is_compiling() or self.elements.is_meta:
            return
        if not math.isfinite(self.elements.detach().sum().item()):
            self._refuse_elements()

    def _refuse_elements(self) -> None:
        wrong = ~torch.isfinite(self.elements)
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            raise NonFiniteError(
                f"elements must be finite; elements{list(place)} is {self.elements[place].item()} "
                f"({int(wrong.sum())} such numbers in the chunk). Clean the chunk or mask those "
                "elements out; the state is as it was."
            ) from None


def _advice(elements: Tensor, sets: int | None, width: int | None) -> str:
    """What a newcomer most often meant."""
    shape = elements.shape
    if len(shape) == 2 and (width is None or shape[1] == width):
        return " For one set, add a batch dimension with elements.unsqueeze(0)."
    if len(shape) == 3 and width is not None and shape[1] == width != shape[2]:
        return " Features come last: elements.transpose(1, 2)."
    if len(shape) >= 3 and sets is not None and shape[0] != sets:
        return f" The state is one of {sets} sets; begin with encoder.initial_state({shape[0]})."
    return ""
