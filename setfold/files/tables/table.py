"""READ FIRST for sets in files: tables of many sets, Arrow in, Arrow out.

    rows of a batch  --absorbed-->  partial states  --merged-->  states  --read_out-->  encodings

A partial state is a value: it can be computed anywhere, twice, and sent about. What runs the first
step on many machines (Ray, Spark, Dask, a loop) needs to know nothing else.

    StateTable   sets and their states; every set stands in it once
    RowTable     sets and elements, one row for each element
    absorbed     rows -> states, or the rows themselves where they are fewer bytes
    merged       states -> states, those of the same set merged
    read_out     states -> (set, count, encoding)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors.torch import load as tensors_from
from safetensors.torch import save as bytes_of
from torch import Tensor

from setfold.core.encoder import StreamingSetEncoder
from setfold.core.state import SetState
from setfold.core.statistic import STATISTICS, join
from setfold.core.weights import Fingerprint, first_tensor
from setfold.errors import FileError, InputError, StateMismatchError
from setfold.files.tables.usable import refuse_unusable

VERSION = 1
HEADER, FRAME = b"setfold", b"setfold.core.frame"  # entries in the metadata of an Arrow schema
SLICE_BYTES = 1 << 24  # of elements that are absorbed at once
READ_BYTES = 1 << 24  # of states, or of encodings, that are read out at once


class StateTable:
    """Sets and their states; every set stands in it once.

    Args:
        sets: their names, (B,), of any type that Arrow can compare.
        state: of the B sets, in that order, on the CPU.

    >>> import setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=2, num_slots=4, dim_slot=8, dim_out=8).eval()
    >>> names, elements = pa.array(["b", "a", "b"]), torch.randn(3, 2)
    >>> table = StateTable.of(encoder, names, elements)
    >>> table.sets.to_pylist(), table.state.count.tolist()
    (['b', 'a'], [2, 1])
    >>> again = StateTable.from_arrow(table.to_arrow())
    >>> merged([table, again]).state.count.tolist()
    [4, 2]
    """

    def __init__(self, sets: pa.Array, state: SetState) -> None:
        self.sets = sets
        self.state = state

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def nbytes(self) -> int:
        """What the table takes in memory; slots, which all sets share, do not count."""
        return self.sets.nbytes + sum(part.nbytes for part in _per_set(self.state).values())

    @staticmethod
    @torch.no_grad()
    def of(encoder: StreamingSetEncoder, sets: pa.Array, elements: Tensor) -> StateTable:
        """What rows add to their sets.

        Args:
            encoder: in evaluation mode.
            sets: (N,), the set of each row.
            elements: (N, d), where the encoder is.
        """
        names, index = _names_and_index(sets)
        begun = encoder.initial_state(len(names))
        if len(names) == 1:
            state = encoder.update(begun, elements.unsqueeze(0))
        else:
            state = encoder.update(begun, elements, index=index.to(elements.device))
        return StateTable(names, state.to("cpu"))

    def parts(self) -> Iterator[pa.Table]:
        """The table as Arrow, some sets at a time."""
        arrow, size = self.to_arrow(), _sets_at_once(self.nbytes // max(len(self), 1))
        for start in range(0, max(len(self), 1), size):
            yield arrow.slice(start, size)

    def take(self, places: np.ndarray) -> StateTable:
        """Some of the sets, in the order of their places."""
        rows = torch.from_numpy(places)
        named = self.state.tensors()
        named |= {name: part[rows] for name, part in _per_set(self.state).items()}
        state = SetState.from_tensors(named, self.state.aggregate, self.state.fingerprint)
        return StateTable(self.sets.take(pa.array(places)), state)

    def sorted(self) -> StateTable:
        """The same, in the order of the sets' names."""
        places = pc.array_sort_indices(self.sets).to_numpy()
        ordered = bool((places[:-1] < places[1:]).all())
        return self if ordered else self.take(places.astype(np.int64))

    def to_arrow(self) -> pa.Table:
        """(set, count, one column of numbers for each tensor); what all sets share is metadata."""
        columns: dict[str, pa.Array] = {"set": self.sets}
        shapes = {}
        for name, part in _per_set(self.state).items():
            shapes[name] = list(part.shape[1:])
            columns[name] = part.numpy() if name == "count" else as_lists(part)
        header = {
            "kind": "states",
            "version": VERSION,
            "aggregate": list(self.state.aggregate),
            "digest": self.state.fingerprint.digest,
            "shapes": shapes,
        }
        frame = {f"slots.{i}": slots for i, slots in enumerate(self.state.frame)}
        metadata = {HEADER: json.dumps(header), FRAME: bytes_of(frame)}
        return pa.table(columns, metadata=metadata)

    @staticmethod
    def from_arrow(table: pa.Table) -> StateTable:
        """What `to_arrow` gave, here or elsewhere.

        Raises:
            FileError: the table is another one.
        """
        header = header_of(table.schema)
        try:
            named = {
                name: as_tensor(table[name], shape) for name, shape in header["shapes"].items()
            }
            named |= tensors_from(table.schema.metadata[FRAME])
            fingerprint = Fingerprint.from_digest(header["digest"])
            state = SetState.from_tensors(named, header["aggregate"], fingerprint)
            return StateTable(combined(table["set"]), state)
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(f"the table of states is damaged: {error!r}. Write it anew.") from error

    @staticmethod
    def all_from_arrow(table: pa.Table) -> list[StateTable]:
        """The parts of a table in which a set may stand several times; in each it stands once."""
        whole = StateTable.from_arrow(table)
        codes = whole.sets.dictionary_encode().indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        first = np.flatnonzero(np.diff(codes[order], prepend=-1))  # where each set begins
        lengths = np.diff(np.append(first, len(order)))
        times = np.empty(len(order), np.int64)  # how often a set stood before
        times[order] = np.arange(len(order)) - np.repeat(first, lengths)
        if not times.any():
            return [whole]
        return [whole.take(np.flatnonzero(times == time)) for time in range(times.max() + 1)]


class RowTable:
    """Sets and elements: one row for each element.

    Args:
        sets: (N,), the set of each row.
        elements: (N, ...), on the CPU.
    """

    def __init__(self, sets: pa.Array, elements: Tensor) -> None:
        self.sets = sets
        self.elements = elements

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def nbytes(self) -> int:
        """What the table takes in memory."""
        return self.sets.nbytes + self.elements.nbytes

    def take(self, places: np.ndarray) -> RowTable:
        """Some of the rows, in the order of their places."""
        return RowTable(self.sets.take(pa.array(places)), self.elements[torch.from_numpy(places)])

    def to_arrow(self) -> pa.Table:
        """(set, elements)."""
        header = {"kind": "rows", "version": VERSION, "shape": list(self.elements.shape[1:])}
        columns = {"set": self.sets, "elements": as_lists(self.elements)}
        return pa.table(columns, metadata={HEADER: json.dumps(header)})

    @staticmethod
    def from_arrow(table: pa.Table) -> RowTable:
        """What `to_arrow` gave."""
        shape = header_of(table.schema)["shape"]
        return RowTable(combined(table["set"]), as_tensor(table["elements"], shape))

    @staticmethod
    def concat(tables: Sequence[RowTable]) -> RowTable:
        """All rows of several tables."""
        sets = pa.concat_arrays([table.sets for table in tables])
        return RowTable(sets, torch.cat([table.elements for table in tables]))


Table = StateTable | RowTable


def from_arrow(table: pa.Table) -> Table:
    """A table of either kind."""
    is_rows = header_of(table.schema)["kind"] == "rows"
    return RowTable.from_arrow(table) if is_rows else StateTable.from_arrow(table)


# ---- the three steps ---------------------------------------------------------------------------


def element_dtypes(encoder: StreamingSetEncoder) -> tuple[np.dtype, torch.dtype]:
    """As what elements are read, and as what the encoder takes them; numpy does not know all of torch's."""
    like = first_tensor(encoder.shaping_modules())
    wanted = torch.float32 if like is None else like.dtype
    return np.dtype(np.float64 if wanted == torch.float64 else np.float32), wanted


def state_bytes(encoder: StreamingSetEncoder) -> int:
    """What the state of one set takes."""
    return sum(part.nbytes for part in _per_set(encoder.initial_state(1)).values())


def absorbed(encoder: StreamingSetEncoder, sets: pa.Array, elements: Tensor) -> Table:
    """What rows add to their sets: states, or the rows themselves where they are fewer bytes.

    So however small the sets are, what is kept of the rows is never larger than the rows.

    Args:
        encoder: in evaluation mode.
        sets: (N,), the set of each row.
        elements: (N, d), where the encoder is.
    """
    codes = sets.dictionary_encode()
    if len(codes.dictionary) * state_bytes(encoder) <= elements.nbytes:
        return StateTable.of(encoder, codes, elements)
    refuse_unusable(encoder, elements)  # now, while it is known where they stand
    return RowTable(codes.dictionary_decode(), elements.cpu())


def merged(tables: Sequence[StateTable]) -> StateTable:
    """One table of all the sets, where those that several have in common are merged.

    The states of a set are merged from the first to the last. That it does not matter how many at a
    time makes runs repeatable to the last bit.

    Raises:
        StateMismatchError: tables of other weights or slots.
    """
    if not tables:
        raise InputError("merged needs at least one table; got none.")
    first = tables[0].state
    for table in tables[1:]:
        refuse_other(first, table.state)
    if len(tables) == 1:
        return tables[0]
    names, places = _names_and_index(pa.concat_arrays([table.sets for table in tables]))
    total = first.with_statistics(
        {
            name: tuple(
                part.new_full((len(names), *part.shape[1:]), empty)
                for part, empty in zip(parts, STATISTICS[name].empty, strict=True)
            )
            for name, parts in first.statistics.items()
        },
        first.count.new_zeros(len(names)),
    )
    start = 0
    for table in tables:
        _merge_into(total, places[start : start + len(table)], table.state)
        start += len(table)
    return StateTable(names, total)


def _names_and_index(sets: pa.Array) -> tuple[pa.Array, Tensor]:
    """The different sets of some rows, and for each row which of them it belongs to."""
    codes = sets.dictionary_encode()
    return codes.dictionary, torch.from_numpy(codes.indices.to_numpy().astype(np.int64))


def _merge_into(total: SetState, places: Tensor, state: SetState) -> None:
    """Merge a state into some of the sets of another, which nobody else has seen yet."""
    held = {name: tuple(p[places] for p in parts) for name, parts in total.statistics.items()}
    for name, parts in join(held, state.statistics).items():
        for whole, part in zip(total.statistics[name], parts, strict=True):
            whole[places] = part
    total.count[places] += state.count


def refuse_other(first: SetState, other: SetState) -> None:
    """Raise unless two states of any sets could be of the same set."""
    first.refuse_unlike(other)
    same = all(torch.equal(a, b) for a, b in zip(first.frame, other.frame, strict=True))
    if not same:
        raise StateMismatchError(
            "cannot merge states with different slots: all must be made by the same model in evaluation mode."
        )


def states_of(encoder: StreamingSetEncoder, rows: RowTable, device: str) -> Iterator[StateTable]:
    """What rows add to their sets, some sets at a time; a large set may come in several parts."""
    codes = rows.sets.dictionary_encode().indices.to_numpy()
    order = np.argsort(codes, kind="stable")
    size = max(1, SLICE_BYTES * len(rows) // max(rows.elements.nbytes, 1))
    for start in range(0, len(order), size):
        some = rows.take(order[start : start + size])
        yield StateTable.of(encoder, some.sets, some.elements.to(device))


@torch.no_grad()
def read_out(encoder: StreamingSetEncoder, table: StateTable) -> Iterator[pa.Table]:
    """(set, count, encoding) of all sets, some at a time; the shape of an encoding is metadata."""
    device = encoder.initial_state(0).device
    one = encoder.readout(encoder.initial_state(1)).nbytes
    # What a layer of a head puts out is as wide as its weights.
    widest = max((max(part.shape) for part in encoder.parameters() if part.dim()), default=1)
    size = _sets_at_once(max(one, state_bytes(encoder), 8 * widest))
    for start in range(0, max(len(table), 1), size):
        some = table.state[start : start + size]
        encoding = encoder.readout(some.to(device)).cpu()
        columns = {
            "set": table.sets.slice(start, size),
            "count": some.count.numpy(),
            "encoding": as_lists(encoding),
        }
        header = {"kind": "encodings", "version": VERSION, "shape": list(encoding.shape[1:])}
        yield pa.table(columns, metadata={HEADER: json.dumps(header)})


def _sets_at_once(each: int) -> int:
    """How many sets are read out at once, if each takes so many bytes."""
    return max(1, READ_BYTES // max(each, 1))


# ---- tensors as Arrow columns ------------------------------------------------------------------


def _per_set(state: SetState) -> dict[str, Tensor]:
    """The tensors of a state that have a row for each set; the others all sets share."""
    named = state.tensors()
    return {name: part for name, part in named.items() if not name.startswith("slots.")}


def as_lists(tensor: Tensor) -> pa.FixedSizeListArray:
    """A column whose entries are the rows (...) of a tensor (N, ...), laid flat; without a copy."""
    flat = tensor.detach().contiguous().reshape(-1).numpy()
    width = tensor[0].numel() if len(tensor) else int(np.prod(tensor.shape[1:]))
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), max(width, 1))


def as_tensor(column: pa.ChunkedArray, shape: Sequence[int]) -> Tensor:
    """The rows (...) that `as_lists` laid flat, (N, ...)."""
    array = combined(column)
    if pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    values = array.to_numpy(zero_copy_only=False)
    if not values.flags.writeable:  # what Arrow holds must not be written to
        values = values.copy()
    return torch.from_numpy(values).reshape(len(column), *shape)


def combined(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def header_of(schema: pa.Schema, where: str | Path = "the table") -> dict[str, Any]:
    """What a table of setfold's says of itself.

    Args:
        schema: of the table.
        where: it stands, for messages.

    Raises:
        FileError: it is none of setfold's, or of another version.
    """
    try:
        header = json.loads((schema.metadata or {})[HEADER])
        version = header["version"]
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{where} is none of setfold's: its schema does not say so.") from error
    if version != VERSION:
        raise FileError(
            f"{where} has format version {version}; this setfold reads version {VERSION}."
        )
    return header


def all_sets(tables: Iterable[Table]) -> int:
    """How many different sets some tables have together."""
    chunks = [table.sets for table in tables]
    return len(pa.concat_arrays(chunks).unique()) if chunks else 0
