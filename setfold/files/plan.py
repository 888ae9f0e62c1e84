"""Plan: what will be read, in what pieces, and with how much memory; made before anything is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from setfold.core.encoder import StreamingSetEncoder
from setfold.core.persist import digest_of
from setfold.core.weights import fingerprint_of
from setfold.errors import FileError, InputError, SetfoldError
from setfold.files.budget import Division, divide
from setfold.files.columns import Columns, Feature
from setfold.files.engines.task import Piece, Skipped, Stamp, Task
from setfold.files.inputs import Input, find_inputs
from setfold.files.readers import Reader, open_reader
from setfold.files.rows import rows_of
from setfold.files.states import read_provenance

PIECE_ROWS = 1 << 20
SAMPLE_ROWS = 256
POSITION = (
    Feature("x"),
    Feature("y"),
    Feature("z"),
)  # what a model of three numbers takes of a scan
NAME_COPIES = 12  # of a name, on its way from a file to a table


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Args:
        task: how pieces become partial states.
        pieces: all there is to read.
        inputs: the files, with what they are known by.
        rows: elements, where they can be told beforehand.
        set_type: of the sets' names.
        skipped: files that cannot be used and are left out.
        division: of the memory.
        memory: bytes that the process may take.
    """

    task: Task
    pieces: list[Piece]
    inputs: dict[str, Stamp]
    rows: int | None
    set_type: pa.DataType
    skipped: list[Skipped]
    division: Division
    memory: int

    @property
    def bytes(self) -> int:
        """That will be read, at most."""
        return sum(stamp.bytes for stamp in self.inputs.values())

    def job(self) -> dict[str, object]:
        """What the run is about, to be compared by one that goes on with it."""
        encoder, columns = self.task.encoder, self.task.columns
        return {
            "model": fingerprint_of(encoder, encoder.shaping_modules()).digest,
            "head": digest_of(encoder.state_dict(), str(encoder)),
            "features": columns.features,
            "set": columns.set,
            "explode": columns.explode,
            "on_error": "skip" if self.task.skip else "stop",
            "memory": self.memory,
            "inputs": [[name, *stamp] for name, stamp in self.inputs.items()],
        }


def make_plan(
    encoder: StreamingSetEncoder,
    names: Sequence[str | Path],
    columns: Columns,
    *,
    memory: int,
    skip: bool,
    states: Sequence[Path] = (),
) -> Plan:
    """Look at all inputs, without reading them.

    Args:
        encoder: in evaluation mode.
        names: files, folders and patterns.
        columns: which columns are what.
        memory: that the process may take.
        skip: whether files that cannot be used are left out, rather than an error.
        states: files of states to begin with.
    """
    survey = _Survey(encoder, columns, skip)
    for path in states:
        survey.look_at_states(path)
    for found in find_inputs(names) if names else ():
        survey.look_at(found)
    if not survey.pieces and survey.skipped:
        raise InputError(f"no input can be used. The first: {survey.skipped[0].reason}")
    model = sum(part.nbytes for part in (*encoder.parameters(), *encoder.buffers()))
    row = row_bytes(encoder, survey.width or 1) + survey.name_bytes
    division = divide(memory, model, survey.num_columns, row)
    at_once = max(1, int(division.rows / survey.elements_per_row))
    task = Task(encoder, survey.columns, survey.width, at_once, skip)
    set_type = survey.set_type or pa.large_string()
    return Plan(
        task, survey.pieces, survey.inputs, survey.rows, set_type, survey.skipped, division, memory
    )


def row_bytes(encoder: StreamingSetEncoder, width: int) -> int:
    """What a row takes on its way: read ahead, laid out, sorted, and weighed for each slot."""
    slots = max((part.shape[1] for part in encoder.initial_state(0).frame), default=1)
    numbers = 4 * width + 4 * slots
    if encoder.has_features:  # what a layer puts out is as wide as its weights
        numbers += 3 * max(
            (max(part.shape) for part in encoder.parameters() if part.dim()), default=1
        )
    return numbers * 8


class _Survey:
    """What is known of the inputs so far."""

    def __init__(self, encoder: StreamingSetEncoder, columns: Columns, skip: bool) -> None:
        self.columns, self.skip = columns, skip
        self.width = encoder.dim_in
        self.pieces: list[Piece] = []
        self.inputs: dict[str, Stamp] = {}
        self.skipped: list[Skipped] = []
        self.rows: int | None = 0
        self.set_type: pa.DataType | None = None
        self.num_columns = 0
        self.is_sampled = False
        self.elements_per_row = 1.0  # of a file; more where rows are exploded
        self.name_bytes = 0  # of a set's name, in its several copies

    def look_at_states(self, path: Path) -> None:
        """Add a file of states."""
        if not path.is_file():
            raise FileError(f"there is no file {path}.")
        stamp = Stamp.of(path)
        kind, sets, _ = read_provenance(path)
        self._agree_on(kind, path)
        self.inputs[str(path)] = stamp
        if sets:
            self.pieces.append(Piece(Input(path, {}), stamp, 0, sets, 1.0, states=True))

    def look_at(self, found: Input) -> None:
        """Add a file of rows."""
        try:
            stamp = Stamp.of(found.path)
            with open_reader(found.path, self.columns.set, self.columns.named) as reader:
                pieces = list(self._pieces(found, stamp, reader))
        except SetfoldError as error:
            if not self.skip:
                raise
            self.skipped.append(Skipped(str(found.path), None, str(error)))
            return
        self.inputs[str(found.path)] = stamp
        self.pieces += pieces
        if self.rows is not None:
            self.rows = None if reader.num_rows is None else self.rows + reader.num_rows

    def _pieces(self, found: Input, stamp: Stamp, reader: Reader) -> Iterator[Piece]:
        path, partition = found
        if self.columns.features is None and self._is_cloud(reader.schema):
            self.columns = replace(self.columns, features=POSITION)
        names = self.columns.needed(reader.schema, partition, path)
        self._agree_on(self._set_type(reader, partition), path)
        if self.width is None:
            self.width = self.columns.width(reader.schema)
        if self.width is not None:
            self.columns.check_width(reader.schema, self.width, path)
        if not self.is_sampled:
            with suppress(FileError):  # will be found again, and told or listed, when all is read
                self._sample(reader, names, found)
        # What an element is made of, the first file decides; others may have it in another order.
        self.columns = replace(self.columns, features=self.columns.chosen(reader.schema))
        self.num_columns = max(self.num_columns, len(names))
        total = reader.num_rows
        for start, stop in reader.cuts(PIECE_ROWS):
            share = 1.0 if stop is None or not total else (stop - start) / total
            yield Piece(found, stamp, start, stop, share)

    def _is_cloud(self, schema: pa.Schema) -> bool:
        """Whether a file has a position and more, and the model takes a position."""
        chosen = self.columns.chosen(schema)
        return self.width == len(POSITION) < len(chosen) and set(POSITION) <= {*chosen}

    def _set_type(self, reader: Reader, partition: dict[str, str]) -> pa.DataType:
        if self.columns.set is None:
            return pa.large_string()
        return self.columns.set_type(reader.schema, partition)

    def _sample(self, reader: Reader, names: list[str], found: Input) -> None:
        """Look at the first rows of the first file that has any: what only rows can tell."""
        dtype, partition = np.dtype(np.float32), found.partition
        for batch in reader.read(names, 0, None, rows=SAMPLE_ROWS):
            rows = rows_of(
                batch, self.columns, first=0, dtype=dtype, width=self.width, partition=partition
            )
            self.is_sampled = True
            if len(rows.elements):
                self.width = rows.elements.shape[1]
                self.elements_per_row = max(1.0, len(rows.elements) / rows.read)
                if rows.sets is not None:
                    self.name_bytes = NAME_COPIES * rows.sets.nbytes // len(rows.sets)
            return

    def _agree_on(self, kind: pa.DataType, path: Path) -> None:
        if self.set_type is None:
            self.set_type = kind
        elif self.set_type != kind:
            raise InputError(
                f"the sets of {path} are named by {kind}, those of the inputs before it by {self.set_type}: all must be "
                "of one type."
            )
