"""Helpers shared by the tasks: draw elements of sets, and encode growing sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import setfold
from setfold.laws.law import difference


def drawn(sets: int, size: int, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw positions (sets, count) of elements without replacement, in random order.

    Args:
        sets: number of sets.
        size: number of elements per set.
        count: number of elements to draw.
        generator: random generator; None for torch's global one.
    """
    if not 1 <= count <= size:
        raise setfold.InputError(
            f"cannot draw {count} elements from sets of {size}; count must be 1 to {size}."
        )
    # Sorting random keys for all sets at once is six times slower.
    return torch.stack([torch.randperm(size, generator=generator)[:count] for _ in range(sets)])


def some_number(fewest: int, most: int) -> int:
    """Draw a number of elements; its logarithm is uniform, so small sets are as usual as large."""
    if not 1 <= fewest <= most:
        raise setfold.InputError(
            f"fewest must be at least 1 and at most `most`; got fewest={fewest}, most={most}."
        )
    found = fewest * (most / fewest) ** torch.rand(()).item()
    return min(most, max(fewest, round(found)))


def chunked(elements: Tensor, chunk: int, steps: int) -> list[Tensor]:
    """Return the first `steps` chunks (B, chunk, d) of elements (B, n, d)."""
    if chunk * steps > elements.shape[1]:
        raise setfold.InputError(
            f"{steps} chunks of {chunk} are {chunk * steps} elements, but the sets have only "
            f"{elements.shape[1]}."
        )
    return list(elements[:, : chunk * steps].split(chunk, 1))


def streamed(encoder: setfold.SetEncoder, chunks: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the exact encoding after each chunk, from a state or from several passes."""
    if not isinstance(encoder, setfold.StreamingSetEncoder):
        for seen in range(1, len(chunks) + 1):
            yield setfold.fold(encoder, list(chunks[:seen]))
        return
    state = encoder.initial_state(len(chunks[0]))
    for chunk in chunks:
        state = encoder.update(state, chunk)
        yield encoder.readout(state)


def consistency_error(encoder: setfold.SetEncoder, chunks: Sequence[Tensor]) -> float:
    """Return the largest difference of streamed and whole-set encoding, relative to the largest."""
    *_, last = streamed(encoder, chunks)
    return difference(last, encoder(torch.cat(list(chunks), 1)))
