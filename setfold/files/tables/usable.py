"""Which elements an encoder can absorb: some give NaN or infinity, or make its own code raise."""

from __future__ import annotations

import torch
from torch import Tensor

from setfold.core.absorb import absorb_dense
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.state import SetState
from setfold.core.statistic import find_non_finite
from setfold.core.structure import is_known
from setfold.errors import NonFiniteError, SetfoldError

AT_ONCE = 1 << 24  # bytes of statistics
ORDINARY = 1e6  # numbers below this are not expected to overflow
TOO_LARGE = "its numbers are too large for the model"
MAX_SHOWN = 200  # characters of an error of the model


def check_usable(encoder: StreamingSetEncoder, elements: Tensor) -> None:
    """Raise an error if an element (N, d) is not usable.

    Raises:
        NonFiniteError: an element is not finite, or too large for the encoder.
        Exception: what code in the encoder raises that is not part of setfold or torch.nn.
    """
    least, largest = elements.aminmax()
    ordinary = bool(least > -ORDINARY) and bool(largest < ORDINARY)  # False if there is a NaN
    if not ordinary and find_unusable(encoder, elements):
        raise NonFiniteError("elements are not finite, or too large for the model.")
    if ordinary and not all(is_known(type(module)) for module in encoder.modules()):
        _absorb(encoder, encoder.initial_state(1), elements.unsqueeze(0))


@torch.no_grad()
def find_unusable(encoder: StreamingSetEncoder, elements: Tensor) -> dict[int, str]:
    """Which elements (N, d) the encoder cannot absorb, each as a set of its own, and why.

    Args:
        encoder: in evaluation mode.
        elements: on the encoder's device.

    >>> import setfold
    >>> encoder = setfold.DeepSets(torch.nn.Linear(1, 4), dim_features=4)
    >>> _ = torch.nn.init.constant_(encoder.features.weight, 2.0)
    >>> find_unusable(encoder, torch.tensor([[1.0], [3e38], [torch.nan]]))
    {1: 'its numbers are too large for the model', 2: 'its numbers are too large for the model'}
    """
    found: dict[int, str] = {}
    if not len(elements):
        return found
    state = encoder.initial_state(1)
    size = max(1, AT_ONCE // encoder.state_nbytes)
    for first in range(0, len(elements), size):
        _find(encoder, state, elements[first : first + size], first, found)
    return found


def _find(
    encoder: StreamingSetEncoder,
    state: SetState,
    elements: Tensor,
    first: int,
    found: dict[int, str],
) -> None:
    """Add the unusable ones of some elements to `found`; `first` is the number of the first."""
    try:
        non_finite = _absorb(encoder, state, elements.unsqueeze(1))
    except Exception as error:  # it may be about one element, but does not say which
        if not blames_elements(error):
            raise
        if len(elements) == 1:
            found[first] = reason_of(error)
            return
        half = len(elements) // 2
        _find(encoder, state, elements[:half], first, found)
        _find(encoder, state, elements[half:], first + half, found)
    else:
        found |= {first + place: TOO_LARGE for place in non_finite.nonzero().flatten().tolist()}


def _absorb(encoder: StreamingSetEncoder, state: SetState, sets: Tensor) -> Tensor:
    """Absorb sets (B, n, d), and return which of them are not finite then: (B,)."""
    prepared = encoder.prepared_for(state)
    statistics = absorb_dense(encoder, state.fields, sets, None, (), prepared)
    return find_non_finite(state.fields, statistics)


def blames_elements(error: Exception) -> bool:
    """Whether an error of an encoder may be about the values of some elements."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return False
    return isinstance(error, NonFiniteError) or not isinstance(error, SetfoldError)


def reason_of(error: Exception) -> str:
    """What an error of an encoder says about an element."""
    if isinstance(error, NonFiniteError):
        return TOO_LARGE
    text = " ".join(str(error).split()).rstrip(".")[:MAX_SHOWN]
    return f"the model raises {type(error).__name__}: {text}"
