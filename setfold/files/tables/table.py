"""READ FIRST for sets in files: tables of many sets, Arrow in, Arrow out.

    rows of a batch  --absorbed-->  partial states  --merged-->  states  --read_out-->  encodings

A partial state is a value: it can be computed on any machine, more than once, and sent anywhere.
An engine that runs the first step on many machines (Ray, Spark, Dask, a loop) needs nothing else.

    StateTable   sets and their states; each set is listed once
    RowTable     sets and elements, one row for each element
    merged       states -> states, merged where tables share a set
    read_out     states -> (set, count, encoding)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors.torch import load as tensors_from
from safetensors.torch import save as bytes_of
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from setfold.core.begin import recognize
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.state import SetState
from setfold.core.state_files import check_counts, fields_from
from setfold.core.statistic import OUTSIDE, Fields, identity
from setfold.errors import InputError, StateMismatchError
from setfold.files.tables.arrow import (
    FRAME,
    HEADER,
    as_counts,
    as_ids,
    as_lists,
    as_tensor,
    check_names,
    header_of,
    make_header,
    shape_of,
)
from setfold.files.tables.sparse import (
    Rows,
    add_in_place,
    from_columns,
    merge,
    names_of,
    parts_of,
    rows_of,
    take,
    to_columns,
)
from setfold.files.tables.stage import Stage
from setfold.files.tables.stream import reading
from setfold.native.dispatch import Room
from setfold.native.tables import encode_ids
from setfold.preprocessing.targets import Classes, Prediction, Target

SLICE_BYTES = 1 << 24  # elements to absorb at once
READ_BYTES = 1 << 24  # states or encodings to write at once
PIECES = 16  # in which they are computed


class StateTable:
    """Sets and their states; each set is listed once.

    Args:
        sets: their ids, (B,), of any type that Arrow can compare.
        shared: a state without sets: what all sets share.
        count: the number of elements of each set.
        rows: by field, what the sets have kept, on the CPU.

    >>> import setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=2, num_slots=4, dim_slot=8, dim_out=8).eval()
    >>> names, elements = pa.array(["b", "a", "b"]), torch.randn(3, 2)
    >>> table = StateTable.of(encoder, names, elements)
    >>> table.sets.to_pylist(), table.count.tolist()
    (['b', 'a'], [2, 1])
    >>> again = StateTable.from_arrow(table.to_arrow())
    >>> merged([table, again]).count.tolist()
    [4, 2]
    """

    def __init__(
        self, sets: pa.Array, shared: SetState, count: Tensor, rows: Mapping[str, Rows]
    ) -> None:
        self.sets = sets
        self.shared = shared
        self.count = count
        self.rows = rows

    @staticmethod
    def of_state(sets: pa.Array, state: SetState) -> StateTable:
        """A table of the sets of a state, on the CPU."""
        rows = {name: rows_of(f, state.statistics[name]) for name, f in state.fields.items()}
        return StateTable(sets, state[:0], state.count, rows)

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def fields(self) -> Fields:
        """What a state keeps."""
        return self.shared.fields

    @property
    def nbytes(self) -> int:
        """The size in memory, without the slots that all sets share."""
        return self.sets.nbytes + self.count.nbytes + sum(r.nbytes for r in self.rows.values())

    @property
    def outside(self) -> int | None:
        """How many elements are outside the grids of the encoder; None if it has no grid."""
        counts = [
            rows.parts[0] for name, rows in self.rows.items() if name.split("/")[-1] == OUTSIDE
        ]
        return round(sum(count.sum().item() for count in counts)) if counts else None

    @property
    def state(self) -> SetState:
        """The state of all sets, in which empty slots take memory, too."""
        return self.state_of(0, len(self))

    def state_of(self, start: int, stop: int) -> SetState:
        """The state of the sets from `start` to `stop`."""
        stop = min(stop, len(self))
        statistics = {n: parts_of(f, self.rows[n], start, stop) for n, f in self.fields.items()}
        return self.shared.with_statistics(statistics, self.count[start:stop])

    @staticmethod
    @torch.no_grad()
    def of(encoder: StreamingSetEncoder, sets: pa.Array, elements: Tensor) -> StateTable:
        """The states of the sets that some rows belong to, from these rows alone.

        Args:
            encoder: in evaluation mode.
            sets: (N,), the set of each row.
            elements: (N, d), on the encoder's device.
        """
        return StateTable.of_index(encoder, *names_and_index(sets), elements)

    @staticmethod
    @torch.no_grad()
    def of_index(
        encoder: StreamingSetEncoder, names: pa.Array, index: Tensor, elements: Tensor
    ) -> StateTable:
        """The same as `of`, with the sets of the rows as `names_and_index` returns them."""
        index = index.to(elements.device)
        if isinstance(encoder, Stage):
            state = encoder.fold_sets(names, elements, index)
        elif len(names) == 1:
            state = encoder.update(encoder.initial_state(1), elements.unsqueeze(0))
        else:
            state = encoder.fold_rows(elements, index, len(names))
        return StateTable.of_state(names, state.to("cpu"))

    def add(self, table: StateTable) -> bool:
        """Merge a table into this one, in place, with the same result as `merged`.

        Returns:
            False if nothing was merged: this needs compiled kernels, a model that keeps one sum,
            and a table without new sets.
        """
        check_mergeable(self.shared, table.shared)
        names, places = names_and_index(pa.concat_arrays([self.sets, table.sets]))
        if len(names) != len(self) or len(self.fields) != 1:
            return False
        ((name, field),), index = self.fields.items(), places[len(self) :]
        if not add_in_place(field, self.rows[name], table.rows[name], index):
            return False
        self.count[index] += table.count
        _check_counts(self.count[index])
        return True

    def parts(self) -> Iterator[pa.Table]:
        """The table as Arrow, some sets at a time."""
        arrow, size = self.to_arrow(), _sets_at_once(self.nbytes // max(len(self), 1))
        for start in range(0, max(len(self), 1), size):
            yield arrow.slice(start, size)

    def take(self, places: np.ndarray) -> StateTable:
        """The sets at some places, in that order."""
        chosen = torch.from_numpy(places)
        rows = {name: take(f, self.rows[name], chosen) for name, f in self.fields.items()}
        sets = self.sets.take(pa.array(places))
        return StateTable(sets, self.shared, self.count[chosen], rows)

    def sorted(self) -> StateTable:
        """The same table, sorted by set."""
        places = pc.array_sort_indices(self.sets).to_numpy()
        ordered = bool((places[:-1] < places[1:]).all())
        return self if ordered else self.take(places.astype(np.int64))

    def to_arrow(self) -> pa.Table:
        """(set, count, one column of numbers for each tensor); what all sets share is metadata."""
        columns: dict[str, pa.Array] = {"set": self.sets}
        for name, field in self.fields.items():
            columns |= to_columns(name, field, self.rows[name], len(self))
        columns["count"] = self.count.numpy()
        header = make_header("states", **self.shared.describe())
        frame = {f"slots.{i}": slots for i, slots in enumerate(self.shared.frame)}
        return pa.table(columns, metadata={HEADER: header, FRAME: bytes_of(frame)})

    @staticmethod
    def from_arrow(table: pa.Table) -> StateTable:
        """The table that `to_arrow` returned, here or in another process.

        Raises:
            FileError: the table is damaged, or not a table of states.
        """
        header = header_of(table.schema, "states")
        with reading("the table of states", "Write it again."):
            fields = fields_from(header.get("fields"))
            columns = [column for name, f in fields.items() for column in names_of(name, f)]
            check_names(table, ["set", *columns, "count"])
            rows = {name: from_columns(name, field, table) for name, field in fields.items()}
            frame = tensors_from(table.schema.metadata[FRAME])
            if not all(n.startswith("slots.") and t.shape[:1] == (1,) for n, t in frame.items()):
                raise ValueError("expected slots (1, K, h), which all sets share")
            empty = identity(fields, 0, torch.device("cpu"))
            none = {f"{n}.{i}": p for n, parts in empty.items() for i, p in enumerate(parts)}
            count = as_counts(table["count"])
            shared = SetState.from_file({**none, "count": count[:0], **frame}, header)
            check_counts(count)
            return StateTable(as_ids(table["set"]), shared, count, rows)

    @staticmethod
    def all_from_arrow(table: pa.Table) -> list[StateTable]:
        """A table that may list a set several times, as tables that list each set once."""
        whole = StateTable.from_arrow(table)
        codes = whole.sets.dictionary_encode().indices.to_numpy()
        order = np.argsort(codes, kind="stable")
        first = np.flatnonzero(np.diff(codes[order], prepend=-1))  # where each set begins
        lengths = np.diff(np.append(first, len(order)))
        times = np.empty(len(order), np.int64)  # how often a set was listed before
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
        """The size in memory."""
        return self.sets.nbytes + self.elements.nbytes

    def take(self, places: np.ndarray) -> RowTable:
        """The rows at some places, in that order."""
        # Twice as fast as indexing a tensor, as in `kernels.ragged.gather`.
        elements = np.take(self.elements.numpy(), places, axis=0, mode="clip")
        return RowTable(self.sets.take(pa.array(places)), torch.from_numpy(elements))

    def to_arrow(self) -> pa.Table:
        """(set, elements)."""
        header = make_header("rows", shape=list(self.elements.shape[1:]))
        columns = {"set": self.sets, "elements": as_lists(self.elements)}
        return pa.table(columns, metadata={HEADER: header})

    @staticmethod
    def from_arrow(table: pa.Table) -> RowTable:
        """The table that `to_arrow` returned.

        Raises:
            FileError: the table is damaged, or not a table of rows.
        """
        header = header_of(table.schema, "rows")
        with reading("the table of rows", "Write it again."):
            check_names(table, ["set", "elements"])
            elements = as_tensor(table["elements"], shape_of(header))
            return RowTable(as_ids(table["set"]), elements)

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
    """The dtype in which elements are read, and the one that the encoder takes.

    They differ for dtypes that numpy does not have.
    """
    like = encoder.first_weight
    wanted = torch.float32 if like is None else like.dtype
    return np.dtype(np.float64 if wanted == torch.float64 else np.float32), wanted


def check_storable(encoder: StreamingSetEncoder) -> None:
    """Raise InputError if tables cannot hold what an encoder computes."""
    if element_dtypes(encoder)[1] == torch.bfloat16:
        raise InputError(
            "the model computes in bfloat16, which neither Arrow nor NumPy can store. Compute in "
            "another dtype: --dtype float32."
        )


def merged(tables: Sequence[StateTable]) -> StateTable:
    """One table of all sets; states of the same set are merged.

    The states of a set are merged in the order of the tables. The result does not depend on how
    many are merged at a time, so runs are reproducible to the last bit.

    Raises:
        StateMismatchError: the tables have different weights or slots.
    """
    if not tables:
        raise InputError("merged needs at least one table; got none.")
    first = tables[0]
    for table in tables[1:]:
        check_mergeable(first.shared, table.shared)
    if len(tables) == 1:
        return first
    names, places = names_and_index(pa.concat_arrays([table.sets for table in tables]))
    return _merged(tables, names, places.split([len(table) for table in tables]))


def merged_at(table: StateTable, other: StateTable, places: Tensor) -> StateTable:
    """The same as `merged([other, table])`, in the order of a table that has all sets.

    Args:
        table: a table.
        other: a table of some of its sets.
        places: (B,), where each set of the other one is in the table.

    Raises:
        StateMismatchError: the tables have different weights or slots.
    """
    check_mergeable(table.shared, other.shared)
    return _merged([other, table], table.sets, [places, torch.arange(len(table))])


def _merged(tables: Sequence[StateTable], names: pa.Array, indices: Sequence[Tensor]) -> StateTable:
    first = tables[0]
    count = first.count.new_zeros(len(names))
    for table, index in zip(tables, indices, strict=True):
        count[index] += table.count
        _check_counts(count[index])
    rows = {
        name: merge(field, [table.rows[name] for table in tables], indices, len(names))
        for name, field in first.fields.items()
    }
    return StateTable(names, first.shared, count, rows)


def _check_counts(counts: Tensor) -> None:
    if bool((counts < 0).any()):
        raise StateMismatchError(
            "cannot merge these states: a set would have 2**63 elements or more. Merge fewer states."
        )


def names_and_index(sets: pa.Array) -> tuple[pa.Array, Tensor]:
    """The distinct sets of some rows, and the index of each row's set among them.

    >>> names_and_index(pa.array([7, 5, 7]))[1]
    tensor([0, 1, 0])
    """
    if sets.type in (pa.int64(), pa.uint64()) and not sets.null_count:
        found = encode_ids(sets.to_numpy())
        if found is not None:
            return pa.array(found[0]), torch.from_numpy(found[1])
    codes = sets.dictionary_encode()
    if codes.indices.type == pa.int64():
        return codes.dictionary, from_dlpack(codes.indices)
    return codes.dictionary, torch.from_numpy(codes.indices.to_numpy().astype(np.int64))


def check_mergeable(first: SetState, other: SetState) -> None:
    """Raise StateMismatchError unless states of the same set could be merged."""
    first.check_compatible(other)
    same = all(torch.equal(a, b) for a, b in zip(first.frame, other.frame, strict=True))
    if not same:
        raise StateMismatchError(
            "cannot merge states with different slots: create all of them with the same model in "
            "evaluation mode."
        )


@torch.no_grad()
def read_out(
    encoder: StreamingSetEncoder, table: StateTable, threads: int = 1
) -> Iterator[pa.Table]:
    """(set, count, encoding) of all sets, some at a time; the shape of an encoding is metadata.

    If the encoder predicts a target, the column `prediction` is before the encoding.

    Args:
        encoder: in evaluation mode.
        table: the states.
        threads: how many threads compute encodings.
    """
    target, room = predicted_target(encoder), Room()
    one = encoder.readout(encoder.initial_state(1))
    # The output of a layer in the head is as wide as its weights.
    widest = max((max(part.shape) for part in encoder.parameters() if part.dim()), default=1)
    size = _sets_at_once(max(one.nbytes, encoder.state_nbytes, 8 * widest))
    few = max(1, size // PIECES)
    shared = recognize(encoder, table.shared.to(encoder.device))
    encoder.prepared_for(shared)  # once for all sets
    with ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1)) as pool:
        for start in range(0, max(len(table), 1), size):
            stop = max(start + 1, min(start + size, len(table)))
            read = partial(_read_few, encoder, shared, table, few)
            starts = range(start, stop, few)
            pieces = (map if threads == 1 else pool.map)(read, starts)
            shape = (min(stop, len(table)) - start, *one.shape[1:])
            encoding = torch.from_numpy(room.empty(shape, one[:0].cpu().numpy().dtype))
            for at, piece in zip(starts, pieces, strict=True):
                encoding[at - start : at - start + few] = piece
            columns = {
                "set": table.sets.slice(start, size),
                "count": table.count[start : start + size].numpy(),
            }
            header: dict[str, Any] = {"shape": list(encoding.shape[1:])}
            if target is not None:
                columns["prediction"] = predict_labels(target, encoding)
                header["target"] = target.name
                header["classes"] = target.labels if isinstance(target, Classes) else None
            columns["encoding"] = as_lists(encoding)
            yield pa.table(columns, metadata={HEADER: make_header("encodings", **header)})


def predict_labels(target: Target, encoding: Tensor) -> pa.Array:
    """Return the most probable label of each set, or the quantity.

    >>> predict_labels(Classes("kind", ["a", "b"]), torch.tensor([[0.1, 0.9]])).to_pylist()
    ['b']
    """
    if isinstance(target, Classes):
        kind = pa.large_string() if isinstance(target.labels[0], str) else None
        return pa.array(target.labels, kind).take(pa.array(encoding.argmax(1).numpy()))
    return pa.array(encoding[:, 0].numpy())


def predicted_target(encoder: StreamingSetEncoder) -> Target | None:
    """Return what the readouts of an encoder predict; None if it is not a target."""
    model = encoder.model if isinstance(encoder, Stage) and encoder.is_last else encoder
    head = getattr(model, "head", None)
    return head.target if isinstance(head, Prediction) else None


@torch.no_grad()
def _read_few(
    encoder: StreamingSetEncoder, shared: SetState, table: StateTable, size: int, start: int
) -> Tensor:
    """The encodings of a few sets, so that what is computed on the way stays in the cache."""
    found = table.state_of(start, start + size).to(encoder.device)
    state = shared.with_statistics(found.statistics, found.count)
    if isinstance(encoder, Stage):
        return encoder.read_sets(table.sets.slice(start, size), state).cpu()
    return encoder.readout(state).cpu()


def _sets_at_once(each: int) -> int:
    """The number of sets to read out at once, given the bytes that each takes."""
    return max(1, READ_BYTES // max(each, 1))


def all_sets(tables: Iterable[Table]) -> int:
    """The number of distinct sets in some tables."""
    chunks = [table.sets for table in tables]
    return len(names_and_index(pa.concat_arrays(chunks))[0]) if chunks else 0
