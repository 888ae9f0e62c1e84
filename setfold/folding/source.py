"""Chunks as users pass them: converted, read as often as needed, and checked to stay the same."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setfold.core.inputs import Chunk, check_kind, is_shared
from setfold.core.statistic import spread
from setfold.core.weights import version
from setfold.errors import InputError

Array = Tensor | np.ndarray
Chunks = Array | Iterable[Any] | Callable[[], Iterable[Any]]
Mark = tuple[str, list[Any], list[Any]]  # how a chunk is known; shapes and dtypes; what it is like
MEMORY, BYTES = "memory", "bytes"
SEEDS = 2**62
SPREAD = 0x9E3779B1  # an odd number, so that the seeds of processes differ in all bits
TILE_BYTES = 1 << 22  # of a whole tensor, read at once
COSTLY_ROWS = 1 << 14  # elements of all sets together, if the encoder has a feature network
CHUNK_FORMS = (
    "chunks are tensors or arrays (B, n, d), or pairs (elements, mask) or (elements, index)"
)
ADVICE = (
    "Chunks must be the same and in the same order each time they are read. Leave out shuffling "
    "(for a DataLoader, shuffle=False), random augmentation, and layers that change their input in "
    'place; or use gradient="unbiased" or "autograd", which read them once.'
)


class Source:
    """Chunks that are read once or several times.

    Attributes:
        repeatable: whether they can be read again; an iterator cannot.
    """

    def __init__(
        self,
        chunks: Chunks,
        *,
        like: Tensor | None,
        again: bool,
        draws: bool,
        batch_size: int | None = None,
        rank: int = 0,
    ) -> None:
        """Take chunks, or a function that opens a stream of them.

        Args:
            chunks: tensors or arrays (B, n_i, d), or pairs with a mask or an index.
            like: a weight; arrays are converted to its dtype and device.
            again: whether they will be read again, if they can be.
            draws: whether a chunk must meet the same random numbers each time it is read.
            batch_size: the number of sets of ragged chunks; if it is 1, the index is optional.
            rank: the rank of this process, so that all processes draw different numbers.
        """
        if not (isinstance(chunks, Iterable) or callable(chunks)):
            raise InputError(
                f"{CHUNK_FORMS}: pass a list of them, or a function that opens a stream; got "
                f"{type_names(chunks)}."
            )
        self.repeatable = not isinstance(chunks, Iterator)
        self._chunks = chunks
        self._like = like
        self._again = again and self.repeatable
        self._draws = draws
        self._batch_size = batch_size
        self._rank = rank
        self._seed: int | None = None
        self._marks: list[Mark] | None = None  # of each chunk, from the first read
        self._held: list[Chunk] = []  # so that no other tensor gets the same address

    @property
    def holds_one(self) -> bool:
        """Whether there is known to be only one chunk."""
        return isinstance(self._chunks, Sequence) and len(self._chunks) == 1

    def sets_in(self, chunk: Chunk) -> int:
        """The number of sets of a chunk."""
        if chunk.index is None:
            sets = chunk.elements.shape[0]
            if self._batch_size not in (None, sets):
                raise InputError(
                    f"batch_size is {self._batch_size}, but a chunk without an index has {sets} "
                    "sets: pass an index, the set of each row, with rows (N, d), or leave "
                    "batch_size out."
                )
            return sets
        if self._batch_size is None:
            raise InputError("ragged chunks need batch_size, the number of sets.")
        return self._batch_size

    def read(self) -> Iterator[tuple[int, Chunk]]:
        """The chunks, numbered.

        Raises:
            InputError: a chunk is not the one that was read in this place the first time.
        """
        if not self._again:
            yield from enumerate(map(self._chunk, self._open()))
            return
        first, marks = self._marks, list[Mark]()
        for number, given in enumerate(self._open()):
            chunk = self._chunk(given)
            marks.append(self._mark(given, chunk))
            if first is not None and first[number : number + 1] != marks[-1:]:
                raise InputError(
                    f"chunk {number} {_difference(first[number:], marks[-1])} {ADVICE}"
                )
            yield number, chunk
        if self._draws:
            self._own_seed()  # even without chunks, so that processes draw the same number of seeds
        if first is None:
            self._marks = marks
        elif len(marks) < len(first):
            raise InputError(f"{len(first)} chunks were read first, now {len(marks)}. {ADVICE}")

    def drawn(self, samples: int) -> Source:
        """Some of the chunks, chosen at random; a sequence is not read for that."""
        if isinstance(self._chunks, Sequence):
            chosen = torch.randperm(len(self._chunks))[:samples].tolist()
            chunks = [self._chunks[number] for number in chosen]
        else:
            sample = Sample(samples)
            for number, given in enumerate(self._open()):
                sample.offer(number, chunk_from(given, self._like))
            chunks = [chunk for _, chunk in sample.kept]
        found = copy(self)
        found._chunks, found.repeatable = chunks, True
        return found

    def same_draws(self, number: int, device: torch.device) -> AbstractContextManager[None]:
        """A context in which a chunk meets the same random numbers each time it is read."""
        return seeded(self._own_seed() + number, device) if self._draws else nullcontext()

    def _own_seed(self) -> int:
        if self._seed is None:
            self._seed = (fresh_seed() + self._rank * SPREAD) % SEEDS
        return self._seed

    def _open(self) -> Iterable[Any]:
        opened = self._chunks if isinstance(self._chunks, Iterable) else self._chunks()
        if not isinstance(opened, Iterable):
            raise InputError(
                f"the function must return an iterable of chunks; it returned {type_names(opened)}."
            )
        return opened

    def _mark(self, given: Any, chunk: Chunk) -> Mark:
        """What identifies a chunk: where it is in memory, or a checksum if it is read or computed.

        A tensor that shares its memory with an array is known by a checksum, too.
        """
        parts = (chunk.elements, chunk.mask, chunk.index)
        kinds = [None if part is None else (part.shape, part.dtype) for part in parts]
        own = given if isinstance(given, tuple | list) else (given,)
        if isinstance(self._chunks, list | tuple | Tiles) and all(
            part is None or (any(part is tensor for tensor in own) and not is_shared(part))
            for part in parts
        ):
            if self._marks is None:
                self._held.append(chunk)
            return MEMORY, kinds, [None if part is None else version(part) for part in parts]
        mask = chunk.mask
        if mask is not None and mask.shape == chunk.elements.shape[:2]:
            hidden = ~spread(mask.to(chunk.elements.device), chunk.elements)
            parts = (chunk.elements.masked_fill(hidden, 0), mask, None)  # padding may be anything
        return BYTES, kinds, [None if part is None else _checksum(part) for part in parts]

    def _chunk(self, given: Any) -> Chunk:
        chunk = given if isinstance(given, Chunk) else chunk_from(given, self._like)
        if self._batch_size == 1 and chunk.mask is None and chunk.index is None:
            if chunk.elements.dim() == 3 and chunk.elements.shape[0] == 1:
                raise InputError(
                    f"with batch_size=1 chunks are rows (N, d); got {tuple(chunk.elements.shape)}. "
                    "Leave batch_size out, or pass an index of zeros if each element has two "
                    "dimensions."
                )
            return Chunk(chunk.elements.unsqueeze(0))  # all rows belong to the only set
        return chunk


def _checksum(tensor: Tensor) -> int:
    """A checksum of the bytes in their order."""
    if tensor.is_meta or tensor.numel() == 0:
        return 0
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # not numpy(), which would mark the memory as shared
    return zlib.crc32(np.from_dlpack(plain.reshape(-1).view(torch.uint8)).data)


def _difference(first: Sequence[Mark], now: Mark) -> str:
    """What happened to a chunk, given the first marks from it on."""
    if first and (first[0][0], now[0]) == (MEMORY, BYTES):
        return (
            "was made an array, by numpy() or the like, after it was first read, so that it may "
            "have changed unnoticed. Make an array of a copy, or before."
        )
    return "has changed since it was first read."


class Tiles(Sequence[Any]):
    """Whole sets, split along their elements; an array may be larger than memory.

    Args:
        elements: (B, n, d), or with axis 0 rows (N, d).
        beside: a mask (B, n), or with axis 0 an index (N,).
        axis: along which to split.
        costly: whether the encoder computes something much larger from each element.

    >>> tiles = Tiles(torch.zeros(2, 20_000, 3), costly=True)
    >>> [tuple(elements.shape) for (elements,) in tiles]
    [(2, 8192, 3), (2, 8192, 3), (2, 3616, 3)]
    """

    def __init__(
        self, elements: Array, beside: Array | None = None, *, axis: int = 1, costly: bool = False
    ) -> None:
        if elements.ndim <= axis:
            raise InputError(f"{CHUNK_FORMS}; got {tuple(elements.shape)}.")
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
        # Views of a tensor are taken together: their gradients then flow through one node.
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


class Sample:
    """A reservoir sample of a stream: every chunk is kept with the same probability."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.seen = 0
        self.kept: list[tuple[int, Chunk]] = []

    def offer(self, number: int, chunk: Chunk) -> None:
        """Keep a copy of the chunk, perhaps in place of another, or ignore it."""
        place = self.seen if self.seen < self.size else int(torch.randint(self.seen + 1, ()))
        self.seen += 1
        if place < self.size:  # a copy, since a stream may reuse its memory
            self.kept[place : place + 1] = [(number, chunk.clone())]


def fresh_seed() -> int:
    """A seed drawn from torch's default generator."""
    return int(torch.randint(SEEDS, ()))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A context with its own random numbers; the generators outside are not affected."""
    cpu = device.type == "cpu"
    with torch.random.fork_rng([] if cpu else [device], device_type="cuda" if cpu else device.type):
        if cpu:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed queries every device
        else:
            torch.manual_seed(seed)
        yield


# ---- from arrays and pairs to chunks -----------------------------------------------------------


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
        check_kind("chunks", given)
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
