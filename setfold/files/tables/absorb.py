"""How rows become tables of states: elements that an encoder cannot absorb, sets that overflow.

An element is not usable if the encoder makes NaN or infinity of it, or if code in the encoder
raises. Such an element is found as soon as it is read, while its row number is known.

A set overflows if its elements are fine one by one, but not together. Other sets of the same run
must not suffer. So such a set gets an empty state with a mark, which stays when states are merged,
spilled and read again. At the end, the run raises an error that names the set, or leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from setfold.core.absorb import absorb_dense
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.state import SetState
from setfold.core.statistic import find_non_finite, is_finite
from setfold.core.structure import is_known
from setfold.errors import NonFiniteError, SetfoldError
from setfold.files.tables.arrow import as_tensor, combined, header_of, shape_of
from setfold.files.tables.sparse import clear_sets, row_field, sets_of
from setfold.files.tables.table import (
    SLICE_BYTES,
    RowTable,
    StateTable,
    Table,
    merged,
    names_and_index,
)
from setfold.kernels.ragged import stable_order
from setfold.preprocessing.columns import decoded

MARK = 1 << 48  # added to the count of a set; more elements than any set has
AT_ONCE = 1 << 24  # bytes of statistics
ORDINARY = 1e6  # numbers below this are not expected to overflow
TOO_LARGE = "its numbers are too large for the model"
MAX_SHOWN = 200  # characters of an error of the model


def absorbed(encoder: StreamingSetEncoder, sets: pa.Array, elements: Tensor) -> Table:
    """The states of some rows' sets, or the rows themselves if they take fewer bytes.

    The result is never larger than the rows, even if the sets are small.

    Args:
        encoder: in evaluation mode.
        sets: (N,), the set of each row.
        elements: (N, d), on the encoder's device.
    """
    names, index = names_and_index(sets)
    if len(names) * encoder.state_nbytes <= elements.nbytes:
        return StateTable.of_index(encoder, names, index, elements)
    check_usable(encoder, elements)  # now, while their row numbers are known
    return RowTable(decoded(sets), elements.cpu())


# ---- elements ----------------------------------------------------------------------------------


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
    >>> layers = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU())
    >>> encoder = setfold.DeepSets(layers, dim_features=4)
    >>> _ = torch.nn.init.constant_(layers[0].weight, 2.0)
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


# ---- sets --------------------------------------------------------------------------------------


def states_of(encoder: StreamingSetEncoder, rows: RowTable, device: str) -> Iterator[StateTable]:
    """The states of some rows' sets, some sets at a time; a large set may come in several parts.

    The sets come sorted, so that a table of all of them is. Sets that overflow are marked.
    """
    names, index = names_and_index(rows.sets)
    ranks = torch.empty(len(names), dtype=torch.long)
    by_name = pc.array_sort_indices(names).to_numpy().astype(np.int64)
    ranks[torch.from_numpy(by_name)] = torch.arange(len(names))
    order = stable_order(ranks[index], len(names)).numpy()
    size = max(1, SLICE_BYTES * len(rows) // max(rows.elements.nbytes, 1))
    for start in range(0, len(order), size):
        some = rows.take(order[start : start + size])
        yield absorb_or_mark(encoder, some.sets, some.elements.to(device))


def absorb_or_mark(encoder: StreamingSetEncoder, sets: pa.Array, elements: Tensor) -> StateTable:
    """The same as `StateTable.of`, but sets that overflow are marked.

    Args:
        encoder: in evaluation mode.
        sets: (N,), the set of each row.
        elements: (N, d), on the encoder's device. Each must be usable on its own.
    """
    try:
        return StateTable.of(encoder, sets, elements)
    except NonFiniteError:  # it is not known of which sets
        codes = sets.dictionary_encode()
    names, index = codes.dictionary, codes.indices.to_numpy()
    if len(names) == 1:
        state = encoder.initial_state(1).to("cpu")
        marked = state.with_statistics(state.statistics, state.count + MARK)
        return StateTable.of_state(names, marked)
    halves = []
    for half in (index < len(names) // 2, index >= len(names) // 2):
        some = elements[torch.from_numpy(half).to(elements.device)]
        halves.append(absorb_or_mark(encoder, names.take(pa.array(index[half])), some))
    return merged(halves)


def mark_overflows(table: StateTable) -> StateTable:
    """The same table, with marks in place of states that are not finite."""
    if is_finite({name: rows.parts for name, rows in table.rows.items()}):
        return table
    wrong = torch.zeros(len(table), dtype=torch.bool)
    for name, field in table.fields.items():
        rows = table.rows[name]
        found = find_non_finite({name: row_field(field)}, {name: rows.parts})
        wrong[sets_of(field, rows)[found]] = True
    if not bool(wrong.any()):
        return table
    cleared = {
        name: clear_sets(field, table.rows[name], wrong) for name, field in table.fields.items()
    }
    return StateTable(table.sets, table.shared, table.count + MARK * wrong, cleared)


def find_marks(table: StateTable) -> np.ndarray:
    """Which sets (B,) of a table are marked."""
    return table.count.numpy() >= MARK


def find_finite(encodings: pa.Table) -> np.ndarray:
    """Which rows (B,) of a table that `read_out` returned have a finite encoding."""
    shape = shape_of(header_of(encodings.schema, "encodings"))
    numbers = combined(encodings["encoding"]).flatten().to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(numbers.sum()):
            return np.ones(len(encodings), bool)
    finite = as_tensor(encodings["encoding"], shape).isfinite()
    return (finite.flatten(1).all(1) if shape else finite).numpy()
