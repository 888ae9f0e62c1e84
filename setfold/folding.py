"""Stream chunks through an encoder in one call, as often as the encoder must see them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from setfold.encoder import SetEncoder, StreamingSetEncoder
from setfold.errors import InputError
from setfold.passes import MultiPassSetEncoder
from setfold.replaying import Begin, replayable_fold
from setfold.source import Chunks, Source
from setfold.state import SetState


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
    if not isinstance(encoder, StreamingSetEncoder | MultiPassSetEncoder):
        raise InputError(_why_not(encoder))
    again = torch.is_grad_enabled() or encoder.passes != 1
    source = Source(chunks, again=again, draws=any(m.training for m in encoder.modules()))
    if isinstance(encoder, StreamingSetEncoder):
        _, state = _fold_once(lambda sets: (encoder, encoder.initial_state(sets)), source)
        return encoder.readout(state)
    _refuse_batch_norm(encoder)
    if not source.repeatable:
        raise InputError(
            f"{type(encoder).__name__} reads its chunks {encoder.passes} times, and an iterator can be "
            "read only once. Pass a list, a DataLoader or a function that opens the stream anew; for "
            "a stream that cannot be read again, use an encoder with passes == 1."
        )
    found: tuple[Tensor, ...] = ()
    for _ in range(encoder.passes):
        stage, state = _fold_once(partial(encoder.begin, found), source)
        found = (*found, stage.readout(state))
    return encoder.conclude(found, state.count)


def _fold_once(begin: Begin, source: Source) -> tuple[StreamingSetEncoder, SetState]:
    """One pass over the chunks."""
    if torch.is_grad_enabled() and source.repeatable:
        begun = replayable_fold(begin, source)
    else:
        begun = None
        for number, chunk in source.read():
            encoder, state = begun or begin(chunk.shape[0])
            with source.same_draws(number, chunk.device):
                begun = encoder, encoder.update(state, chunk)
    if begun is None:
        raise InputError(
            "fold needs at least one chunk; got none. An empty set is encoder.initial_state(1)."
        )
    return begun


def _refuse_batch_norm(encoder: MultiPassSetEncoder) -> None:
    """Raise if what an element is depends on the chunk that it comes in; a head may do as it likes."""
    head = set() if encoder.head is None else set(encoder.head.modules())
    for module in set(encoder.modules()) - head:
        if module.training and isinstance(module, _BatchNorm):
            raise InputError(
                f"{type(encoder).__name__} is folded chunk by chunk, and {type(module).__name__} in training "
                "mode makes something else of an element in every chunk. Call model.eval(), or keep "
                "such layers in the head."
            )


def _why_not(encoder: Any) -> str:
    if isinstance(encoder, SetEncoder):
        reason = getattr(encoder, "obstacle", "it has no states")
        return (
            f"{type(encoder).__name__} cannot be folded ({reason}): call it on whole sets, or use an "
            "encoder whose `passes` is not None."
        )
    return f"fold takes a set encoder; got {type(encoder).__name__}."
