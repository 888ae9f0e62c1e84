"""Sets whose elements are fine one by one, but overflow together.

Other sets of the same run must not suffer. So such a set gets an empty state with a mark, which
stays when states are merged, spilled and read again. At the end, the run raises an error that names
the set, or leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from setfold.core.encoder import StreamingSetEncoder
from setfold.core.statistic import find_non_finite, is_finite
from setfold.errors import NonFiniteError
from setfold.files.tables.arrow import as_tensor, header_of, shape_of
from setfold.files.tables.sparse import clear_sets, row_field, sets_of
from setfold.files.tables.table import SLICE_BYTES, RowTable, StateTable, merged
from setfold.kernels.ragged import stable_order

MARK = 1 << 48  # added to the count of a set; more elements than any set has


def states_of(encoder: StreamingSetEncoder, rows: RowTable, device: str) -> Iterator[StateTable]:
    """The states of some rows' sets, some sets at a time; a large set may come in several parts.

    Sets that overflow are marked.
    """
    codes = rows.sets.dictionary_encode()
    places = torch.tensor(codes.indices.to_numpy())
    order = stable_order(places, len(codes.dictionary)).numpy()
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
    finite = as_tensor(encodings["encoding"], shape).isfinite()
    return (finite.flatten(1).all(1) if shape else finite).numpy()
