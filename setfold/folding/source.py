"""Chunks of sets, as often as they are needed, and whether they are still the same."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor

from setfold.errors import InputError
from setfold.folding.piece import (
    DIGESTS,
    KINDS,
    NOTHING,
    SPREAD,
    Array,
    Digest,
    Piece,
    added,
    kind_of,
    piece_of,
)

Chunks = Array | Iterable[Any] | Callable[[], Iterable[Any]]
SEEDS = 2**62
CHANGED = "the chunks must be the same whenever they are read, and are not"


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
        careful: bool,
        batch_size: int | None = None,
        apart: int = 0,
    ) -> None:
        """Take chunks, or a function that opens a stream of them.

        Args:
            chunks: tensors or arrays (B, n_i, d), or pairs with a mask or an index.
            like: a weight, whose dtype and device arrays are given.
            again: whether they will be read again, if they can be.
            draws: whether what is done to a chunk shall meet the same random numbers every time.
            careful: whether to look closely at whether they are still the same.
            batch_size: the number of sets of ragged chunks; of 1, an index may be left out.
            apart: another number for each process, so that all draw differently.
        """
        if not (isinstance(chunks, Iterable) or callable(chunks)):
            raise InputError(
                f"{KINDS}: pass a list of them, or a function that opens a stream; got {kind_of(chunks)}."
            )
        self.repeatable = not isinstance(chunks, Iterator)
        self._chunks = chunks
        self._like = like
        self._again = again and self.repeatable
        self._draws = draws
        self._batch_size = batch_size
        self._careful = careful
        self._apart = apart
        self._seed: int | None = None
        self._first: tuple[Digest, array[int]] | None = None  # of all chunks, and of each
        self._held: list[Piece] = []  # so that no other tensor takes their place in memory

    @property
    def holds_one(self) -> bool:
        """Whether there is one chunk, and that can be told."""
        return isinstance(self._chunks, Sequence) and len(self._chunks) == 1

    def sets_in(self, piece: Piece) -> int:
        """The number of sets that a piece is of."""
        if piece.index is None:
            sets = piece.elements.shape[0]
            if self._batch_size not in (None, sets):
                raise InputError(
                    f"batch_size is {self._batch_size}, and a chunk without an index is of {sets} sets: give "
                    "rows (N, d) an index, the set of each, or leave batch_size out."
                )
            return sets
        if self._batch_size is None:
            raise InputError(
                "ragged chunks need batch_size, the number of sets, beside their index."
            )
        return self._batch_size

    def read(self) -> Iterator[tuple[int | None, Piece]]:
        """The chunks, each with the number that it had when it was first read.

        Later they may come in another order. What is cut in other places then has no number.

        Raises:
            InputError: at the end, if the elements are not those of the first time.
        """
        if not self._again:
            yield from enumerate(map(self._piece, self._opened()))
            return
        keys, total = array("q"), NOTHING
        numbers = None if self._first is None else _Numbers(self._first[1])
        for place, given in enumerate(self._opened()):
            piece = self._piece(given)
            digest, key = self._digest_and_key(given, piece)
            total = added(total, digest)
            if numbers is None:
                keys.append(key)
            yield place if numbers is None else numbers.of(place, key), piece
        if self._draws:
            self._own_seed()  # without chunks too, so that processes stay in step
        if self._first is None:
            self._first = total, keys
        else:
            _refuse_other(self._first[0], total)

    def drawn(self, samples: int) -> Source:
        """Some of the chunks, at random; where they can be chosen, no others are looked at."""
        if isinstance(self._chunks, Sequence):
            chosen = torch.randperm(len(self._chunks))[:samples].tolist()
            chunks = [self._chunks[number] for number in chosen]
        else:
            sample = Sample(samples)
            for number, given in enumerate(self._opened()):
                sample.offer(number, piece_of(given, self._like))
            chunks = [piece for _, piece in sample.kept]
        found = copy(self)
        found._chunks, found.repeatable = chunks, True
        return found

    def same_draws(self, number: int | None, device: torch.device) -> AbstractContextManager[None]:
        """A context in which a chunk meets the same random numbers whenever it is read."""
        if not self._draws:
            return nullcontext()
        if number is None:
            return _undrawn(device)
        return seeded(self._own_seed() + number, device)

    def _own_seed(self) -> int:
        if self._seed is None:
            self._seed = (fresh_seed() + self._apart * SPREAD) % SEEDS
        return self._seed

    def _opened(self) -> Iterable[Any]:
        opened = self._chunks if isinstance(self._chunks, Iterable) else self._chunks()
        if not isinstance(opened, Iterable):
            raise InputError(
                f"the function must open a stream of chunks; it gave {kind_of(opened)}."
            )
        return opened

    def _digest_and_key(self, given: Any, piece: Piece) -> tuple[Digest, int]:
        """What a chunk adds to the digest of all, and what tells it from others.

        Of tensors that stay in memory that is where they are, and how often they were written to.
        """
        elements = given[0] if isinstance(given, tuple | list) else given
        if isinstance(self._chunks, Sequence) and isinstance(elements, Tensor):
            if self._first is None:
                self._held.append(piece)
            digest = piece.elements.numel(), hash(piece.places()) % DIGESTS
            return digest, hash(digest)
        digest = piece.digest(self._careful)
        return digest, hash((digest, b"" if self._careful else piece.glimpse()))

    def _piece(self, given: Any) -> Piece:
        piece = given if isinstance(given, Piece) else piece_of(given, self._like)
        if self._batch_size == 1 and piece.mask is None and piece.index is None:
            if piece.elements.dim() == 3 and piece.elements.shape[0] == 1:
                raise InputError(
                    f"with batch_size=1 chunks are rows (N, d); got {tuple(piece.elements.shape)}. Leave batch_size "
                    "out, or give an index of zeros if each element is of two dimensions."
                )
            return Piece(piece.elements.unsqueeze(0))  # every row is of the only set there is
        return piece


class Sample:
    """Some pieces of a stream, each as likely as any other however many there will be."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.seen = 0
        self.kept: list[tuple[int | None, Piece]] = []

    def offer(self, number: int | None, piece: Piece) -> None:
        """Keep a copy of the piece, perhaps in place of another, or pass it by."""
        place = self.seen if self.seen < self.size else int(torch.randint(self.seen + 1, ()))
        self.seen += 1
        if place < self.size:  # a copy, since a stream may use its memory again
            self.kept[place : place + 1] = [(number, piece.clone())]


def fresh_seed() -> int:
    """A seed that follows from torch's own."""
    return int(torch.randint(SEEDS, ()))


@contextmanager
def _undrawn(device: torch.device) -> Iterator[None]:
    """A context for a chunk that is cut in another place, in which nothing may draw."""
    cpu = device.type == "cpu"
    generator = torch if cpu else getattr(torch, device.type)
    before = generator.get_rng_state()
    yield
    if not torch.equal(generator.get_rng_state(), before):
        raise InputError(
            f"{CHANGED}: one of them holds other numbers now, or is cut in another place, and the model draws "
            "random numbers, as dropout does. Leave shuffling out, or call model.eval()."
        )


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A context with random numbers of its own; those outside go on as if nothing had been."""
    cpu = device.type == "cpu"
    with torch.random.fork_rng([] if cpu else [device], device_type="cuda" if cpu else device.type):
        if cpu:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed looks at every device
        else:
            torch.manual_seed(seed)
        yield


class _Numbers:
    """Which of the chunks that were read first a chunk is, when they are read again."""

    def __init__(self, keys: array[int]) -> None:
        self._keys = keys
        self._left: defaultdict[int, deque[int]] | None = None  # as long as they come in order

    def of(self, place: int, key: int) -> int | None:
        """The number of a chunk that comes at some place; None for one that is new."""
        if self._left is None:
            if place < len(self._keys) and self._keys[place] == key:
                return place
            self._left = defaultdict(deque)
            for number in range(place, len(self._keys)):
                self._left[self._keys[number]].append(number)
        return self._left[key].popleft() if self._left[key] else None


def _refuse_other(first: Digest, now: Digest) -> None:
    if first != now:
        raise InputError(
            f"{CHANGED}: the first time they held {first[0]} numbers, now {now[0]}, or other ones. Read from a "
            "list, a file or a function that opens the stream anew; leave random augmentation out, and "
            "layers that change their input in place."
        )
