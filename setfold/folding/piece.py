"""What users give as a chunk, as tensors: arrays and files converted, pairs told apart, large ones cut."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setfold.core.weights import version
from setfold.errors import InputError

Array = Tensor | np.ndarray
Digest = tuple[int, int]  # how many numbers there are, and a sum of their bits, set by set

TILE_BYTES = 1 << 22  # of a whole tensor, looked at at once
COSTLY_ROWS = 1 << 14  # elements of all sets together, where much is made of each
DIGESTS = 2**64
NOTHING: Digest = (0, 0)
SPREAD = 0x9E3779B1  # odd, and its multiples have no pattern
MIXER = 0x2C1B3C6D
GLIMPSE = 16  # elements, of as many sets
MIXED_AT_ONCE = 1 << 15  # numbers, so that they stay in cache
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number
KINDS = "chunks are tensors or arrays (B, n, d), or pairs (elements, mask) or (elements, index)"


@dataclass(frozen=True, slots=True)
class Piece:
    """What came at once: elements (B, n, d) and a mask (B, n), or (N, d) with an index (N,)."""

    elements: Tensor
    mask: Tensor | None = None
    index: Tensor | None = None

    def clone(self) -> Piece:
        """The same in memory of its own; gradients flow through, as through any clone."""
        beside = (None if part is None else part.clone() for part in (self.mask, self.index))
        return Piece(self.elements.clone(), *beside)

    def digest(self, careful: bool) -> Digest:
        """What tells a piece from others: a sum over its rows, so the same for any order of them.

        Which set a row is in counts; what the mask hides does not.

        Args:
            careful: whether a row counts as a whole, with its numbers in their places, or each number for
                itself. Then changes that all have in common may cancel, such as another sign.
        """
        elements = self.elements.detach().resolve_neg()
        bits = BITS.get(elements.element_size())
        if elements.is_meta or elements.numel() == 0 or bits is None:
            return elements.numel(), 0
        wide = torch.int64 if bits == torch.int64 else torch.int32
        weights = self._weights().to(wide)
        numbers = elements.view(bits)
        # Products and sums flow over, everywhere alike. In as many bits as a number has that is ten times
        # faster than in more.
        if careful:
            rows = _mixed(numbers.reshape(*elements.shape[: self._leading], -1))
        else:
            weights = weights.squeeze(1) if weights.shape[1:] == (1,) else weights
            rows = numbers.sum(tuple(range(weights.dim(), numbers.dim())), dtype=wide)
        total = int((rows * weights).sum(dtype=wide)) << (64 - 8 * wide.itemsize)
        shown = elements.numel() * int(weights.count_nonzero()) // weights.numel()
        return shown, total % DIGESTS

    @property
    def _leading(self) -> int:
        """How many dimensions come before those of an element."""
        return min(self.elements.dim(), 2 if self.index is None else 1)

    def _weights(self) -> Tensor:
        """By set (B, 1), by element (B, n) or by row (N,): odd, as that loses no bit; 0 if hidden."""
        elements, beside = self.elements, self.index if self.mask is None else self.mask
        by_set = 2 * torch.arange(elements.shape[0], device=elements.device) + 1
        by_set = by_set.reshape(-1, *(1,) * (self._leading - 1))
        # what does not fit is refused when it is absorbed
        if beside is None or beside.shape != elements.shape[: beside.dim()]:
            return by_set
        beside = beside.to(elements.device)
        return by_set * beside if self.index is None else 2 * beside + 1

    def glimpse(self) -> bytes:
        """A few elements, in their order: what tells pieces apart whose numbers add up alike."""
        elements = self.elements.detach().resolve_neg()
        if elements.is_meta or elements.numel() == 0:
            return b""
        along = elements[:GLIMPSE] if self.index is None else elements.unsqueeze(0)
        few = along[:, :: max(1, along.shape[1] // GLIMPSE)]
        return few.contiguous().cpu().view(torch.uint8).numpy().tobytes()

    def places(self) -> tuple[object, ...]:
        """Where in memory it is, and how often that was written to."""
        parts = (self.elements, self.mask, self.index)
        return tuple(None if part is None else (*version(part), part.shape) for part in parts)


def _mixed(numbers: Tensor) -> Tensor:
    """Rows (..., p) of whole numbers as one each (...), in 32 or 64 bits, by what is in which place."""
    wide = torch.int64 if numbers.dtype == torch.int64 else torch.int32
    places = torch.arange(numbers.shape[-1], device=numbers.device)
    factors = (places * SPREAD | 1).to(wide)
    found = []
    for block in numbers.reshape(-1, len(places)).split(max(1, MIXED_AT_ONCE // len(places))):
        bits = (block >> 11).bitwise_xor_(block)  # upper bits count in lower places too
        if bits.is_cpu and bits.dtype == wide:
            found.append(torch.mv(bits, factors))
        else:  # other devices do not multiply whole numbers by matrices
            found.append((bits * factors).sum(-1, dtype=wide))
    rows = torch.cat(found).view(numbers.shape[:-1])
    rows = (rows ^ (rows >> 15)) * MIXER
    return rows ^ (rows >> 13)


def added(left: Digest, right: Digest) -> Digest:
    """The digest of two pieces together."""
    return left[0] + right[0], (left[1] + right[1]) % DIGESTS


class Tiles(Sequence[Any]):
    """Whole sets, cut along their elements; an array, which may be larger than memory, as it is read.

    Args:
        elements: (B, n, d), or with axis 0 rows (N, d).
        beside: a mask (B, n), or with axis 0 an index (N,).
        axis: along which to cut.
        costly: whether something much larger is made of each element.

    >>> tiles = Tiles(torch.zeros(2, 20_000, 3), costly=True)
    >>> [tuple(elements.shape) for (elements,) in tiles]
    [(2, 8192, 3), (2, 8192, 3), (2, 3616, 3)]
    """

    def __init__(
        self, elements: Array, beside: Array | None = None, *, axis: int = 1, costly: bool = False
    ) -> None:
        if elements.ndim <= axis:
            raise InputError(f"{KINDS}; got {tuple(elements.shape)}.")
        length = elements.shape[axis]
        if beside is not None and beside.shape != elements.shape[: axis + 1]:
            expected, got = tuple(elements.shape[: axis + 1]), tuple(beside.shape)
            raise InputError(f"mask or index must be {expected}; got {got}.")
        by_size = length * TILE_BYTES // max(1, elements.nbytes)
        by_number = COSTLY_ROWS // max(1, elements.shape[0] if axis else 1)
        self._rows = max(1, min(by_size, by_number) if costly else by_size)
        self._count = max(1, -(-length // self._rows))
        self._axis = axis
        self._parts = (elements,) if beside is None else (elements, beside)
        # of a tensor, views that are taken at once: their gradients come back through one node
        self._views = elements.split(self._rows, axis) if isinstance(elements, Tensor) else None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> tuple[Array, ...]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        rows = slice(number * self._rows, (number + 1) * self._rows)
        place = (slice(None),) * self._axis + (rows,)
        elements, *beside = self._parts
        tile = elements[place] if self._views is None else self._views[number]
        return tile, *(part[place] for part in beside)


def piece_of(given: Any, like: Tensor | None) -> Piece:
    """A chunk as users give it: a tensor, an array, or a pair with a mask, which is bool, or an index.

    Args:
        given: elements (B, n, d), or a pair of them and a mask (B, n); or (N, d) and an index (N,).
        like: a weight, whose dtype and device arrays are given.
    """
    parts = tuple(given) if isinstance(given, tuple | list) else (given,)
    if len(parts) not in (1, 2) or not all(isinstance(part, Array) for part in parts):
        raise InputError(f"{KINDS}; got {kind_of(given)}.")
    elements = _tensor(parts[0], like)
    if elements.dim() == 0:
        raise InputError(f"{KINDS}; got a single number.")
    if len(parts) == 1:
        return Piece(elements)
    beside = _tensor(parts[1], None)
    if isinstance(parts[1], np.ndarray):
        beside = beside.to(elements.device)
    is_mask = beside.dtype == torch.bool
    if not is_mask and beside.dim() != 1:
        raise InputError(
            "beside its elements a chunk has a mask, bool (B, n), or an index, int64 (N,); got "
            f"{beside.dtype} {tuple(beside.shape)}."
        )
    return Piece(elements, beside, None) if is_mask else Piece(elements, None, beside)


def kind_of(given: object) -> str:
    """What something is, in words, for a message."""
    if isinstance(given, tuple | list):
        return (
            f"{type(given).__name__} of {' and '.join(type(item).__name__ for item in given[:3])}"
        )
    return type(given).__name__


def _tensor(given: Array, like: Tensor | None) -> Tensor:
    """A tensor as it is; an array as a tensor like the weights, in memory that can be written to."""
    if isinstance(given, Tensor):
        return given
    if isinstance(given, np.ma.MaskedArray):
        raise InputError(
            "a masked array does not say which elements are absent: give a pair (array.data, mask), with a mask "
            "(B, n) that is True where an element is present."
        )
    if given.dtype.kind not in "fiub" or given.dtype.itemsize > 8:
        raise InputError(f"arrays must hold numbers of 64 bits at most; got dtype {given.dtype}.")
    mapped = _mapping(given)
    shareable = given.flags.writeable and all(stride >= 0 for stride in given.strides)
    copy = None if mapped is None and shareable else True
    found = torch.from_numpy(np.array(given, given.dtype.newbyteorder("="), copy=copy))
    if mapped is not None:
        mapped.madvise(mmap.MADV_DONTNEED)
    return found if like is None else found.to(like.device, like.dtype)


def _mapping(array: Any) -> mmap.mmap | None:
    """The mapped file that an array is read from, if its pages may be handed back once read.

    Until then they count as this process's memory. A mapping that is copied on writing keeps them,
    and so does one that numpy did not open: it might lose what was written.
    """
    shared = False
    while array is not None and not isinstance(array, mmap.mmap):
        shared = shared or (isinstance(array, np.memmap) and array.mode in ("r", "r+", "w+"))
        array = getattr(array, "base", None)
    return array if shared and hasattr(mmap, "MADV_DONTNEED") else None
