"""Chunks of a set, as often as they are needed, and whether they are still the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from setfold.errors import InputError

Chunks = Iterable[Tensor] | Callable[[], Iterable[Tensor]]
SEEDS = 2**62
SAME = 1e-9  # relative; chunks may come in another order, and sums are rounded


class Source:
    """Chunks that are read once or several times.

    Attributes:
        repeatable: whether they can be read again; an iterator cannot.
    """

    def __init__(self, chunks: Chunks, *, again: bool, draws: bool) -> None:
        """Take chunks, or a function that opens a stream of them.

        Args:
            chunks: tensors (B, n_i, d).
            again: whether they will be read again, if they can be.
            draws: whether something that is done to the chunks may draw random numbers.
        """
        if not (isinstance(chunks, Iterable) or callable(chunks)):
            raise InputError(f"chunks must be tensors (B, n, d); got {type(chunks).__name__}.")
        self.repeatable = not isinstance(chunks, Iterator)
        self._chunks = chunks
        self._again = again and self.repeatable
        self._draws = draws and self._again
        self._seed: int | None = None
        self._first: tuple[int, float] | None = None  # numbers in the chunks, and their squares

    def read(self) -> Iterator[tuple[int, Tensor]]:
        """The chunks with their numbers, from the first one on.

        Raises:
            InputError: at the end, if the chunks are not those of the first time.
        """
        size, squares = 0, 0.0
        opened = self._chunks if isinstance(self._chunks, Iterable) else self._chunks()
        for number, chunk in enumerate(opened):
            if not isinstance(chunk, Tensor) or chunk.dim() == 0:
                raise InputError(f"chunks must be tensors (B, n, d); got {type(chunk).__name__}.")
            if self._again and chunk.is_floating_point() and not chunk.is_meta:
                size += chunk.numel()
                squares += float(torch.linalg.vector_norm(chunk.detach())) ** 2
            yield number, chunk
        if self._first is None:
            self._first = size, squares
        elif self._first[0] != size or not math.isclose(self._first[1], squares, rel_tol=SAME):
            raise InputError(
                "the chunks must be the same whenever they are read, and are not: the first time they "
                f"held {self._first[0]} numbers, now {size}, or other ones. Read from a list, a file or "
                "a function that opens the stream anew; leave random augmentation out."
            )

    def same_draws(self, number: int, device: torch.device) -> AbstractContextManager[None]:
        """A context in which a chunk meets the same random numbers whenever it is read."""
        if not self._draws:
            return nullcontext()
        if self._seed is None:
            self._seed = int(torch.randint(SEEDS, ()))
        return _seeded(self._seed + number, device)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    cpu = device.type == "cpu"
    with torch.random.fork_rng([] if cpu else [device], device_type="cuda" if cpu else device.type):
        if cpu:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed looks at every device
        else:
            torch.manual_seed(seed)
        yield
