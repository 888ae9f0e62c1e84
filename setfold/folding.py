"""Stream chunks through an encoder in one call."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from setfold.encoder import StreamingSetEncoder
from setfold.errors import InputError


def fold(encoder: StreamingSetEncoder, chunks: Iterable[Tensor]) -> Tensor:
    """Encode sets that arrive in chunks: begin, absorb each chunk, read out.

    Only one chunk is looked at at a time. Gradients flow as through any PyTorch code; under
    torch.no_grad() nothing of a chunk is kept.

    Args:
        encoder: any streaming encoder.
        chunks: tensors (B, n_i, d), all of the same B sets.

    Returns:
        The encoding (B, ...).

    >>> import torch, setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=3, num_slots=4, dim_slot=8, dim_out=8).eval()
    >>> chunks = (torch.randn(1, 1000, 3) for _ in range(10))
    >>> fold(encoder, chunks).shape
    torch.Size([1, 4, 8])
    """
    if not isinstance(encoder, StreamingSetEncoder):
        raise InputError(f"fold takes a streaming set encoder; got {type(encoder).__name__}.")
    state = None
    for chunk in chunks:
        if not isinstance(chunk, Tensor) or chunk.dim() == 0:
            raise InputError(f"chunks must be tensors (B, n, d); got {type(chunk).__name__}.")
        if state is None:
            state = encoder.initial_state(chunk.shape[0])
        state = encoder.update(state, chunk)
    if state is None:
        raise InputError(
            "fold needs at least one chunk; got none. An empty set is encoder.initial_state(1)."
        )
    return encoder.readout(state)
