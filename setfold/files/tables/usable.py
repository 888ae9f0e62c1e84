"""Which elements an encoder can take: of some it would make NaN or infinity."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from setfold.core.absorb import absorb_dense
from setfold.core.encoder import ORDINARY, StreamingSetEncoder
from setfold.errors import NonFiniteError

AT_ONCE = 1 << 24  # bytes of statistics


def refuse_unusable(encoder: StreamingSetEncoder, elements: Tensor) -> None:
    """Raise if an element (N, d) is not finite, or too large for the encoder, whatever its set."""
    least, largest = elements.aminmax()
    ordinary = bool(least > -ORDINARY) and bool(largest < ORDINARY)  # not if there is a NaN
    if not ordinary and not bool(usable_alone(encoder, elements).all()):
        raise NonFiniteError("elements are not finite, or too large for the model.")


@torch.no_grad()
def usable_alone(encoder: StreamingSetEncoder, elements: Tensor) -> Tensor:
    """Which elements (N, d) the encoder can take, each as a set of its own: (N,), on the CPU.

    >>> import setfold
    >>> encoder = setfold.DeepSets(torch.nn.Linear(1, 4), dim_features=4)
    >>> _ = torch.nn.init.constant_(encoder.features.weight, 2.0)
    >>> usable_alone(encoder, torch.tensor([[1.0], [3e38], [torch.nan]]))
    tensor([ True, False, False])
    """
    if not len(elements):
        return torch.ones(0, dtype=torch.bool)
    state = encoder.initial_state(1)
    each = sum(part.nbytes for parts in state.statistics.values() for part in parts)
    pieces = elements.split(max(1, AT_ONCE // max(each, 1)))
    return torch.cat([_usable(encoder, some, encoder.prepared_for(state)) for some in pieces]).cpu()


def _usable(encoder: StreamingSetEncoder, elements: Tensor, prepared: Any) -> Tensor:
    try:
        statistics = absorb_dense(encoder, elements.unsqueeze(1), None, (), prepared)
    except NonFiniteError:  # some encoders look themselves, and tell it of all
        if len(elements) == 1:
            return torch.zeros(1, dtype=torch.bool, device=elements.device)
        return torch.cat([_usable(encoder, half, prepared) for half in elements.tensor_split(2)])
    parts = [part.flatten(1) for parts in statistics.values() for part in parts]
    return torch.stack([part.isfinite().all(1) for part in parts]).all(0)
