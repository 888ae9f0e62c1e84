"""Outputs of a model for sets of any size, on one or several processes.

Sets that fit are encoded together, as ragged batches of at most so many elements; processes share
them out. A larger set is folded chunk by chunk, with exact gradients; it is spread over the
processes. All processes then apply the head to all sets, with the same random numbers. So the
result does not depend on the number of processes, except for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from setfold.core.primitives import SetEncoder
from setfold.core.weights import first_tensor
from setfold.errors import InputError
from setfold.folding.api import fold
from setfold.folding.batches import collate
from setfold.folding.source import SEEDS, SPREAD, Array, fresh_seed, seeded
from setfold.learning.processes import Processes


class Sets(Protocol):
    """Pairs of a set `(n_i, d)`, a tensor or an array, and its label."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> tuple[Any, Any]: ...


def lengths_of(sets: Sets) -> np.ndarray:
    """Return the number of elements of each set: the attribute `lengths`, or else reads all sets.

    Raises:
        InputError: They are not pairs of a set and a label.
    """
    known = getattr(sets, "lengths", None)
    if known is not None:
        return np.asarray(known)
    return np.array([len(pair(sets, number)[0]) for number in range(len(sets))], np.int64)


def pair(sets: Sets, number: int) -> tuple[Array, Any]:
    """Return a set and its label.

    Raises:
        InputError: They are something else.
    """
    found = sets[number]
    if not (isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[0], Array)):
        raise InputError(
            "sets must be pairs of a set (n, d), a tensor or an array, and its label; set "
            f"{number} is {type(found).__name__}."
        )
    return found[0], found[1]


def micro_batches(lengths: np.ndarray, sets: Sequence[int], batch_rows: int) -> Iterator[list[int]]:
    """Split sets into lists of at most so many elements; a larger set is a list of its own.

    >>> list(micro_batches(np.array([3, 4, 9, 2]), [0, 1, 2, 3], batch_rows=8))
    [[0, 1], [2], [3]]
    """
    found: list[int] = []
    rows = 0
    for number in sets:
        size = int(lengths[number])
        if found and rows + size > batch_rows:
            yield found
            found, rows = [], 0
        found.append(number)
        rows += size
    if found:
        yield found


def encode(
    model: nn.Module,
    sets: Sequence[Array],
    batch_rows: int,
    processes: Processes | None = None,
) -> Tensor:
    """Return the output of a model for some sets, which are one micro-batch.

    Args:
        model: A set encoder, or a module that is called like one.
        sets: Tensors or arrays (n_i, d).
        batch_rows: A set with more elements is folded, in chunks of so many.
        processes: Those that share the work; None for this one. All get all outputs.
    """
    processes = processes or Processes()
    weight = first_tensor([model])
    like = torch.zeros(()) if weight is None else weight
    bare, head = _split_head(model)
    seed = fresh_seed()
    if len(sets) == 1 and len(sets[0]) > batch_rows:
        with seeded(seed, like.device):
            found = _fold(bare, sets[0], like, batch_rows, processes)
    else:
        own, encoded = processes.deal(sets), None
        if own:  # features that draw do so differently in each process
            with seeded((seed + processes.rank * SPREAD) % SEEDS, like.device):
                encoded = _encode_ragged(bare, own, like)
        found = processes.collect(encoded, len(sets))
    return found if head is None else head(found)


@torch.no_grad()
def encode_all(
    model: nn.Module, sets: Sets, batch_rows: int, processes: Processes | None = None
) -> Tensor:
    """Return the output of a model in evaluation mode for all sets."""
    model.eval()
    found = [
        encode(model, [pair(sets, number)[0] for number in part], batch_rows, processes)
        for part in micro_batches(lengths_of(sets), range(len(sets)), batch_rows)
    ]
    release(sets)
    return torch.cat(found)


def release(sets: Sets) -> None:
    """Let the system drop what was read of a file that is mapped into memory."""
    drop = getattr(sets, "release", None)
    if drop is not None:
        drop()


def _split_head(model: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """Return a set encoder without its head, which shares its weights, and the head."""
    head = getattr(model, "head", None) if isinstance(model, SetEncoder) else None
    if not isinstance(head, nn.Module):
        return model, None
    bare = copy(model)
    vars(bare)["_modules"] = {**model._modules, "head": None}
    return bare, head


def _fold(
    model: nn.Module, elements: Array, like: Tensor, batch_rows: int, processes: Processes
) -> Tensor:
    """Fold a set (n, d); each process reads its part of it."""
    start, stop = (len(elements) * (processes.rank + i) // processes.size for i in range(2))

    def chunks() -> Iterator[Array]:
        for place in range(start, stop, batch_rows):
            rows = elements[None, place : min(place + batch_rows, stop)]
            yield rows.to(like.device, like.dtype) if isinstance(rows, Tensor) else rows

    return fold(model, chunks, group=processes.group)  # type: ignore[arg-type]  # arrays, too


def _encode_ragged(model: nn.Module, sets: Sequence[Array], like: Tensor) -> Tensor:
    batch = collate([_tensor(elements).to(like.device, like.dtype) for elements in sets])
    found: Tensor = model(batch.elements, index=batch.index, batch_size=batch.batch_size)
    return found


def _tensor(elements: Array) -> Tensor:
    """Return a tensor as it is, an array as a copy: it may be read-only, or mapped."""
    return elements if isinstance(elements, Tensor) else torch.tensor(elements)
