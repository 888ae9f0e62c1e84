"""Stream chunks through an encoder in one call, as often as the encoder must see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from setfold.encoder import SetEncoder, StreamingSetEncoder
from setfold.errors import InputError
from setfold.passes import MultiPassSetEncoder
from setfold.replaying import Begin, replayable_fold
from setfold.state import SetState

Chunks = Iterable[Tensor] | Callable[[], Iterable[Tensor]]


def fold(encoder: SetEncoder, chunks: Chunks) -> Tensor:
    """Encode sets that arrive in chunks: begin, absorb each chunk, read out.

    Only one chunk is looked at at a time, and the chunks are read `encoder.passes` times. Gradients
    are those of the whole set. Where the chunks can be read again, as a list or a DataLoader can,
    they need no more memory than one chunk does: the backward pass reads them once more. An
    iterator can be read only once, so its graph is kept.

    Args:
        encoder: any streaming encoder, or one of several passes.
        chunks: tensors (B, n_i, d), all of the same B sets; or a function that opens such a stream.

    Returns:
        The encoding (B, ...).

    >>> import setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=3, num_slots=4, dim_slot=8, dim_out=8).eval()
    >>> chunks = (torch.randn(1, 1000, 3) for _ in range(10))
    >>> fold(encoder, chunks).shape
    torch.Size([1, 4, 8])
    """
    source = _Source(chunks)
    if isinstance(encoder, StreamingSetEncoder):
        return encoder.readout(
            _fold_once(lambda sets: (encoder, encoder.initial_state(sets)), source)[1]
        )
    if not isinstance(encoder, MultiPassSetEncoder):
        raise InputError(_why_not(encoder))
    _refuse_second_thoughts(encoder)
    if not source.repeatable:
        raise InputError(
            f"{type(encoder).__name__} reads its chunks {encoder.passes} times, and an iterator can be "
            "read only once. Pass a list, a DataLoader or a function that opens the stream anew; for "
            "a stream that cannot be read again, use an encoder with passes == 1."
        )
    found: tuple[Tensor, ...] = ()
    counts: list[Tensor] = []
    for _ in range(encoder.passes):
        stage, state = _fold_once(partial(encoder.begin, found), source)
        found = (*found, stage.readout(state))
        counts.append(state.count)
        if not torch.equal(counts[0], counts[-1]):
            raise InputError(
                "the chunks must be the same whenever they are read: the first pass saw "
                f"{counts[0].tolist()} elements, a later one {counts[-1].tolist()}."
            )
    return encoder.conclude(found, counts[0])


class _Source:
    """Chunks, and whether they can be read again."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self.repeatable = not isinstance(chunks, Iterator)

    def __iter__(self) -> Iterator[Tensor]:
        chunks = self._chunks() if callable(self._chunks) else self._chunks
        for chunk in chunks:
            if not isinstance(chunk, Tensor) or chunk.dim() == 0:
                raise InputError(f"chunks must be tensors (B, n, d); got {type(chunk).__name__}.")
            yield chunk


def _fold_once(begin: Begin, source: _Source) -> tuple[StreamingSetEncoder, SetState]:
    """One pass over the chunks."""
    if torch.is_grad_enabled() and source.repeatable:
        begun = replayable_fold(begin, source)
    else:
        begun = None
        for chunk in source:
            encoder, state = begun or begin(chunk.shape[0])
            begun = encoder, encoder.update(state, chunk)
    if begun is None:
        raise InputError(
            "fold needs at least one chunk; got none. An empty set is encoder.initial_state(1)."
        )
    return begun


def _refuse_second_thoughts(encoder: MultiPassSetEncoder) -> None:
    """Raise if an element would be something else whenever it is read; a head may do as it likes."""
    head = set() if encoder.head is None else set(encoder.head.modules())
    for module in set(encoder.modules()) - head:
        if module.training and isinstance(module, _BatchNorm | _DropoutNd):
            raise InputError(
                f"{type(encoder).__name__} reads its chunks {encoder.passes} times, and {type(module).__name__} "
                "in training mode would make something else of an element every time. Call "
                "model.eval(), or keep such layers in the head."
            )


def _why_not(encoder: Any) -> str:
    if isinstance(encoder, SetEncoder):
        reason = getattr(encoder, "obstacle", "it has no states")
        return (
            f"{type(encoder).__name__} cannot be folded ({reason}): call it on whole sets, or use an "
            "encoder whose `passes` is not None."
        )
    return f"fold takes a set encoder; got {type(encoder).__name__}."
