"""Plan: what will be read, in what pieces, and with how much memory; made before anything is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from setfold.encoder import StreamingSetEncoder
from setfold.engines.task import Piece, Skipped, Stamp, Task
from setfold.errors import FileError, InputError, SetfoldError
from setfold.fingerprint import fingerprint_of
from setfold.io.columns import Columns
from setfold.io.inputs import Input, find_inputs
from setfold.io.readers import Reader, open_reader
from setfold.io.rows import rows_of
from setfold.io.states import read_provenance
from setfold.jobs.memory import Division, divide

PIECE_ROWS = 1 << 20


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
    """

    task: Task
    pieces: list[Piece]
    inputs: dict[str, Stamp]
    rows: int | None
    set_type: pa.DataType
    skipped: list[Skipped]
    division: Division

    @property
    def bytes(self) -> int:
        """That will be read, at most."""
        return sum(stamp.bytes for stamp in self.inputs.values())

    def job(self) -> dict[str, object]:
        """What the run is about, to be compared by one that goes on with it."""
        encoder, columns = self.task.encoder, self.task.columns
        return {
            "model": fingerprint_of(encoder, encoder.shaping_modules()).digest,
            "features": columns.features,
            "set": columns.set,
            "explode": columns.explode,
            "on_error": "skip" if self.task.skip else "stop",
            "memory": list(self.division),
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
    division = divide(memory, model, row_bytes(encoder, survey.width or 1))
    task = Task(encoder, columns, survey.width, division.rows, skip)
    set_type = survey.set_type or pa.large_string()
    return Plan(task, survey.pieces, survey.inputs, survey.rows, set_type, survey.skipped, division)


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
            with open_reader(found.path) as reader:
                pieces = list(self._pieces(found, stamp, reader))
        except SetfoldError as error:
            if not self.skip:
                raise
            self.skipped.append(Skipped(str(found.path), None, str(error)))
            return
        self.inputs[str(found.path)] = stamp
        self.pieces += pieces
        unknown = self.rows is None or reader.num_rows is None
        self.rows = None if unknown else self.rows + reader.num_rows  # type: ignore[operator]

    def _pieces(self, found: Input, stamp: Stamp, reader: Reader) -> Iterator[Piece]:
        path, partition = found
        names = self.columns.needed(reader.schema, partition, path)
        self._agree_on(self._set_type(reader, partition), path)
        if self.width is None:
            self.width = self._width(reader, names, found)
        if self.width is not None:
            self.columns.check_width(reader.schema, self.width, path)
        total = reader.num_rows
        for start, stop in reader.cuts(PIECE_ROWS):
            share = 1.0 if stop is None or not total else (stop - start) / total
            yield Piece(found, stamp, start, stop, share)

    def _set_type(self, reader: Reader, partition: dict[str, str]) -> pa.DataType:
        if self.columns.set is None:
            return pa.large_string()
        return self.columns.set_type(reader.schema, partition)

    def _width(self, reader: Reader, names: list[str], found: Input) -> int | None:
        """The width of an element, by the schema or else by the first row."""
        width = self.columns.width(reader.schema)
        if width is not None:
            return width
        for batch in reader.read(names, 0, None, rows=1):
            dtype = np.dtype(np.float32)
            rows = rows_of(
                batch, self.columns, first=0, dtype=dtype, width=None, partition=found.partition
            )
            if len(rows.elements):
                return rows.elements.shape[1]
        return None

    def _agree_on(self, kind: pa.DataType, path: Path) -> None:
        if self.set_type is None:
            self.set_type = kind
        elif self.set_type != kind:
            raise InputError(
                f"the sets of {path} are named by {kind}, those of the inputs before it by {self.set_type}: all must be "
                "of one type."
            )
