"""Which elements an encoder can absorb: some are finite, and still give NaN or infinity."""

from __future__ import annotations

import torch
from torch import Tensor

from setfold.core.absorb import absorb_dense
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.state import SetState
from setfold.core.statistic import find_non_finite
from setfold.errors import NonFiniteError

AT_ONCE = 1 << 24  # bytes of statistics
ORDINARY = 1e6  # numbers below this are not expected to overflow


def check_usable(encoder: StreamingSetEncoder, elements: Tensor) -> None:
    """Raise NonFiniteError if an element (N, d) is not finite, or too large for the encoder."""
    least, largest = elements.aminmax()
    ordinary = bool(least > -ORDINARY) and bool(largest < ORDINARY)  # False if there is a NaN
    if not ordinary and not bool(usable_alone(encoder, elements).all()):
        raise NonFiniteError("elements are not finite, or too large for the model.")


@torch.no_grad()
def usable_alone(encoder: StreamingSetEncoder, elements: Tensor) -> Tensor:
    """Which elements (N, d) the encoder can absorb, each as a set of its own: (N,), on the CPU.

    >>> import setfold
    >>> encoder = setfold.DeepSets(torch.nn.Linear(1, 4), dim_features=4)
    >>> _ = torch.nn.init.constant_(encoder.features.weight, 2.0)
    >>> usable_alone(encoder, torch.tensor([[1.0], [3e38], [torch.nan]]))
    tensor([ True, False, False])
    """
    if not len(elements):
        return torch.ones(0, dtype=torch.bool)
    state = encoder.initial_state(1)
    pieces = elements.split(max(1, AT_ONCE // encoder.state_nbytes))
    return torch.cat([_usable(encoder, state, some) for some in pieces]).cpu()


def _usable(encoder: StreamingSetEncoder, state: SetState, elements: Tensor) -> Tensor:
    sets, prepared = elements.unsqueeze(1), encoder.prepared_for(state)
    try:
        statistics = absorb_dense(encoder, state.fields, sets, None, (), prepared)
    except NonFiniteError:  # the encoder itself noticed, but not in which set
        if len(elements) == 1:
            return torch.zeros(1, dtype=torch.bool, device=elements.device)
        return torch.cat([_usable(encoder, state, half) for half in elements.tensor_split(2)])
    return ~find_non_finite(state.fields, statistics)
