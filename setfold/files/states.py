"""State files: written by `encode --states`, read by `merge`, `readout` and `live import`.

A state file is a sealed Arrow file with one row per set, sorted by set id. Its metadata contains
the model, so that no other file is needed to read it out, and the inputs that it was computed from,
so that none is counted twice.

A file may come from anywhere. Its seal shows damage, and reading checks everything that the rest of
setfold relies on, so that a file with a matching seal that is wrong otherwise raises FileError, too.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import nn

from setfold.core.models import DTYPES, load, save
from setfold.core.state_files import MAX_COUNT
from setfold.errors import DescriptionError, FileError, InputError
from setfold.files.columns import ColumnSpec
from setfold.files.features import Feature
from setfold.files.ids import TYPES
from setfold.files.sealed import ARROW, SealedFile
from setfold.files.tables.arrow import (
    FRAME,
    HEADER,
    RESULT,
    check_sorted,
    header_of,
    result_of,
)
from setfold.files.tables.stream import Stream, open_arrow, reading
from setfold.files.tables.table import StateTable

MODEL, INPUTS, COLUMNS = b"setfold.model", b"setfold.inputs", b"setfold.columns"
DTYPE = b"setfold.dtype"
ADVICE = "Pass a file that was written by encode --states."


@dataclass(frozen=True)
class Provenance:
    """What states were computed from.

    Args:
        model: The content of the model file; None if the model cannot be saved.
        inputs: Size and modification time of the inputs, by absolute path.
        columns: The columns that were read; None if they are not known.
        dtype: The dtype of the weights that computed the states, such as "float64"; None if it is
            not known.
    """

    model: bytes | None
    inputs: dict[str, list[int]] = field(default_factory=dict)
    columns: ColumnSpec | None = None
    dtype: str | None = None

    def metadata(self) -> dict[bytes, bytes]:
        """Return entries for the metadata of an Arrow schema."""
        columns = None if self.columns is None else self.columns.describe()
        entries = {INPUTS: json.dumps(self.inputs).encode(), COLUMNS: json.dumps(columns).encode()}
        if self.dtype is not None:
            entries[DTYPE] = self.dtype.encode()
        return entries if self.model is None else entries | {MODEL: self.model}


def read_states(path: Path) -> Iterator[StateTable]:
    """Yield the states of a file, some sets at a time.

    Raises:
        FileError: The file is missing, truncated, corrupt or not a state file.
    """
    with _open(path) as (file, stream):
        sets, elements, last = 0, 0, None
        for batch in stream:
            table = StateTable.from_arrow(pa.Table.from_batches([batch]))
            sets, elements = sets + len(table), elements + int(table.count.sum())
            last = check_sorted(table.sets, last)
            if elements > MAX_COUNT:
                raise ValueError("the sum of the counts must be below 2**63")
            yield table
        if sets != file.seal.rows or file.tell() != file.seal.data:
            raise ValueError(f"expected {file.seal.rows} sets; got {sets}")


def read_provenance(path: Path) -> tuple[pa.DataType, int, Provenance]:
    """Return the type of the set ids in a state file, the number of sets, and their provenance.

    The states themselves are not read.

    Raises:
        FileError: The file is missing, truncated, corrupt or not a state file.
    """
    with _open(path) as (file, stream):
        metadata, sets = stream.schema.metadata, file.seal.rows
        if metadata.keys() - {MODEL, DTYPE} != {HEADER, FRAME, INPUTS, COLUMNS, RESULT}:
            raise ValueError("its metadata does not have the entries of a state file")
        if not sets and next(iter(stream), None) is not None:
            raise ValueError("expected no sets; got some")
        result_of(metadata[RESULT])
        inputs = _inputs_from(json.loads(metadata[INPUTS]))
        columns = _columns_from(json.loads(metadata[COLUMNS]))
        dtype = metadata[DTYPE].decode() if DTYPE in metadata else None
        if dtype not in (None, *DTYPES):
            raise ValueError(f"expected the dtype of the model; got {dtype!r:.60}")
        provenance = Provenance(metadata.get(MODEL), inputs, columns, dtype)
        return _set_type(stream.schema, columns), sets, provenance


def holds_states(path: Path) -> bool:
    """Whether a sealed file is a state file, not a file of encodings.

    Raises:
        FileError: The file is missing, truncated, corrupt, or setfold did not write it.
    """
    with reading(path, ADVICE), SealedFile(path) as file:
        if file.format != ARROW:
            return False
        return header_of(open_arrow(file).schema, where=path)["kind"] == "states"


def _set_type(schema: pa.Schema, columns: ColumnSpec | None) -> pa.DataType:
    """Return the type of set ids: a struct if they have several columns."""
    stored = schema.field("set").type
    if columns is None or not columns.id_fields:
        return stored
    if stored != pa.large_binary():
        raise ValueError(f"set ids of several columns must be bytes; got {stored}")
    return pa.struct(columns.id_fields)


@contextmanager
def _open(path: Path) -> Iterator[tuple[SealedFile, Stream]]:
    """Open a state file and check its columns. Errors in its content are FileErrors."""
    with reading(path, ADVICE), SealedFile(path) as file:
        if file.format != ARROW:
            raise ValueError("it is not an Arrow file")
        stream = open_arrow(file)
        header_of(stream.schema, "states", path)
        StateTable.from_arrow(stream.schema.empty_table())
        yield file, stream


def _inputs_from(value: Any) -> dict[str, list[int]]:
    """Return the inputs of `Provenance` from JSON."""
    is_valid = isinstance(value, dict) and all(
        isinstance(stamp, list) and [*map(type, stamp)] == [int, int] for stamp in value.values()
    )
    if not is_valid:
        raise ValueError(f"expected inputs with size and time; got {value!r:.60}")
    return value


def _columns_from(value: Any) -> ColumnSpec | None:
    """Return the columns of `Provenance` from JSON."""
    if value is None:
        return None
    features = None
    if value["features"] is not None:
        features = tuple(Feature(name, *map(float, rest)) for name, *rest in value["features"])
    column, explode, root = value["set"], value["explode"], value["root"]
    types = tuple(value.get("types", ()))
    named = all(isinstance(f.name, str) and all(map(math.isfinite, f[1:])) for f in features or ())
    if isinstance(column, list):
        column = tuple(column)
        named &= len(column) > 1 and all(isinstance(name, str) for name in column)
        named &= len(types) in (0, len(column)) and all(kind in TYPES for kind in types)
    elif types:
        raise ValueError("expected no types of set columns")
    texts = isinstance(column, str | tuple | None) and isinstance(root, str | None)
    if not (named and texts and isinstance(explode, bool)):
        raise ValueError(f"expected the columns that were read; got {value!r:.60}")
    return ColumnSpec(features, column, explode, root, types=types)


# ---- what several state files have in common -----------------------------------------------------


def common_columns(paths: Sequence[Path]) -> ColumnSpec | None:
    """Return the columns of the first state file.

    Raises:
        InputError: The files do not name sets in the same way.
    """
    first, *others = (read_provenance(path)[2].columns for path in paths)
    for path, columns in zip(paths[1:], others, strict=True):
        if first and columns and _naming(first) != _naming(columns):
            raise InputError(
                f"cannot merge {paths[0]} and {path}: the set ids of the former are "
                f"{_naming(first)}, those of the latter are {_naming(columns)}. Encode both in the "
                "same way."
            )
    return first


def _naming(columns: ColumnSpec) -> str:
    """Describe what the set ids are."""
    if columns.set is not None:
        return "in a column"
    kind = "absolute paths" if columns.root is None else "paths relative to a root"
    return f"{kind} and row numbers" if columns.explode else kind


def collect_inputs(paths: Sequence[Path], again: bool) -> dict[str, list[int]]:
    """Return the inputs of several state files, with their stamps.

    Raises:
        InputError: Two files share an input, and `again` is False.
    """
    known: dict[str, list[int]] = {}
    for path in paths:
        inputs = read_provenance(path)[2].inputs
        repeated = [name for name in inputs if name in known]
        if repeated and not again:
            raise InputError(
                f"several of these state files contain {repeated[0]}, which would count twice. "
                "Merge other files, or allow it with --again."
            )
        known |= inputs
    return known


# ---- models in state files -------------------------------------------------------------------------


def model_to_bytes(model: nn.Module) -> bytes | None:
    """Return the content of the file that `setfold.save` writes; None if it cannot be saved."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        try:
            save(model, path)
        except DescriptionError:
            return None
        return path.read_bytes()


def model_from_bytes(content: bytes, allow: Iterable[str] = ()) -> nn.Module:
    """Load a model from the result of `model_to_bytes`.

    Raises:
        FileError: The content is corrupt.
        DescriptionError: A class is not allowed or cannot be constructed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        try:
            return load(path, allow=allow)
        except FileError as error:
            message = str(error).replace(str(path), "the model in the state file")
            raise FileError(message) from error
