"""State files: written by `encode --states`, and read by `update`, `merge` and `readout`.

A state file is an Arrow file with one row per set, sorted by set id. Its metadata contains the
model, so that no other file is needed to update it, and the inputs that it was computed from, so
that none is counted twice.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pyarrow as pa
from torch import nn

from setfold.core.models import load, save
from setfold.errors import DescriptionError, FileError
from setfold.files.columns import ColumnSpec, Feature
from setfold.files.tables.table import StateTable, header_of

MODEL, INPUTS, COLUMNS = b"setfold.model", b"setfold.inputs", b"setfold.columns"
DTYPE = b"setfold.dtype"


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
        columns = None if self.columns is None else asdict(self.columns)
        entries = {INPUTS: json.dumps(self.inputs).encode(), COLUMNS: json.dumps(columns).encode()}
        if self.dtype is not None:
            entries[DTYPE] = self.dtype.encode()
        return entries if self.model is None else entries | {MODEL: self.model}


def read_states(path: Path) -> Iterator[StateTable]:
    """Yield the states of a file, some sets at a time.

    Raises:
        FileError: The file is missing, truncated, corrupt or not a state file.
    """
    for batch in _batches(path):
        yield StateTable.from_arrow(pa.Table.from_batches([batch]))


def read_provenance(path: Path) -> tuple[pa.DataType, int, Provenance]:
    """Return the type of the set ids in a state file, the number of sets, and their provenance."""
    try:
        # Memory-mapped, so that counting the rows does not read them.
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as file:
            schema = file.schema
            sets = sum(file.get_batch(i).num_rows for i in range(file.num_record_batches))
    except (pa.ArrowException, OSError) as error:
        raise _read_error(path, error) from error
    if (kind := header_of(schema, path)["kind"]) != "states":
        raise FileError(
            f"expected states in {path}; got {kind}. Pass the file that was written by "
            "encode --states."
        )
    metadata = schema.metadata
    inputs = json.loads(metadata.get(INPUTS, b"{}"))
    columns = json.loads(metadata.get(COLUMNS, b"null"))
    if columns is not None:
        features = tuple(Feature(*feature) for feature in columns["features"] or ()) or None
        columns = ColumnSpec(features, columns["set"], columns["explode"])
    dtype = metadata[DTYPE].decode() if DTYPE in metadata else None
    provenance = Provenance(metadata.get(MODEL), inputs, columns, dtype)
    return schema.field("set").type, sets, provenance


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    try:
        with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
            header_of(file.schema, path)
            for number in range(file.num_record_batches):
                yield file.get_batch(number)
    except (pa.ArrowException, OSError) as error:
        raise _read_error(path, error) from error


def _read_error(path: Path, error: Exception) -> FileError:
    if not path.exists():
        return FileError(f"there is no file {path}. Check the path.")
    return FileError(
        f"{path} is truncated, corrupt or not a state file ({error}). Pass a file that was written "
        "by encode --states."
    )


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
    """Load a model from the result of `model_to_bytes`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        return load(path, allow=allow)
