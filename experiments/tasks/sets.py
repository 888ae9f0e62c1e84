"""What tasks share: drawing elements of sets, and encodings of sets that grow chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import setfold
from setfold.laws.law import difference


def drawn(sets: int, size: int, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Positions (sets, count) of elements, for each set drawn without replacement, in random order.

    Args:
        sets: how many sets.
        size: how many elements each has.
        count: how many are drawn.
        generator: torch's global one if None.
    """
    if not 1 <= count <= size:
        raise setfold.InputError(
            f"{count} elements are to be drawn of sets that have {size} each: ask for 1 to {size}."
        )
    # Sorting random keys for all sets at once takes six times as long.
    return torch.stack([torch.randperm(size, generator=generator)[:count] for _ in range(sets)])


def chunked(elements: Tensor, chunk: int, steps: int) -> list[Tensor]:
    """The first `steps` chunks (B, chunk, d) of elements (B, n, d)."""
    if chunk * steps > elements.shape[1]:
        raise setfold.InputError(
            f"{steps} chunks of {chunk} are {chunk * steps} elements; the sets have "
            f"{elements.shape[1]}. Ask for fewer."
        )
    return list(elements[:, : chunk * steps].split(chunk, 1))


def streamed(encoder: setfold.SetEncoder, chunks: Sequence[Tensor]) -> Iterator[Tensor]:
    """Exact encodings after each chunk: of one state that is updated, or folded in several passes."""
    if not isinstance(encoder, setfold.StreamingSetEncoder):
        for seen in range(1, len(chunks) + 1):
            yield setfold.fold(encoder, list(chunks[:seen]))
        return
    state = encoder.initial_state(len(chunks[0]))
    for chunk in chunks:
        state = encoder.update(state, chunk)
        yield encoder.readout(state)


def consistency_error(encoder: setfold.SetEncoder, chunks: Sequence[Tensor]) -> float:
    """The largest difference of streamed and whole encoding, relative to the largest number."""
    *_, last = streamed(encoder, chunks)
    return difference(last, encoder(torch.cat(list(chunks), 1)))
