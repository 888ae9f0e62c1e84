"""Files of states: what `--states` keeps, and what `update`, `merge` and `readout` take.

An Arrow file: one row for each set, sorted by the set's name. Its metadata holds the model, so that the file is all
that is needed to go on, and the inputs that went into it, so that none is counted twice.
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
from setfold.files.columns import Columns, Feature
from setfold.files.tables.table import StateTable, header_of

MODEL, INPUTS, COLUMNS = b"setfold.model", b"setfold.inputs", b"setfold.columns"


@dataclass(frozen=True)
class Provenance:
    """Where states come from.

    Args:
        model: the bytes of the model's file; None for a model that cannot be written down.
        inputs: by name, size and time of the files whose elements are in the states.
        columns: what of those files the elements are made of; None where nobody knows.
    """

    model: bytes | None
    inputs: dict[str, list[int]] = field(default_factory=dict)
    columns: Columns | None = None

    def metadata(self) -> dict[bytes, bytes]:
        """Entries for the metadata of an Arrow schema."""
        columns = None if self.columns is None else asdict(self.columns)
        known = {INPUTS: json.dumps(self.inputs).encode(), COLUMNS: json.dumps(columns).encode()}
        return known if self.model is None else known | {MODEL: self.model}


def read_states(path: Path) -> Iterator[StateTable]:
    """The states of a file, some sets at a time.

    Raises:
        FileError: it is missing, truncated, corrupt or no file of states.
    """
    for batch in _batches(path):
        yield StateTable.from_arrow(pa.Table.from_batches([batch]))


def read_provenance(path: Path) -> tuple[pa.DataType, int, Provenance]:
    """The type of the sets' names in a file of states, how many there are, and where they come from."""
    try:
        # Mapped, so that to count is not to read.
        with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as file:
            schema = file.schema
            sets = sum(file.get_batch(i).num_rows for i in range(file.num_record_batches))
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error
    if header_of(schema, path)["kind"] != "states":
        raise FileError(f"{path} holds no states: keep them with --states when you encode.")
    metadata = schema.metadata
    inputs = json.loads(metadata.get(INPUTS, b"{}"))
    columns = json.loads(metadata.get(COLUMNS, b"null"))
    if columns is not None:
        features = tuple(Feature(*feature) for feature in columns["features"] or ()) or None
        columns = Columns(features, columns["set"], columns["explode"])
    return schema.field("set").type, sets, Provenance(metadata.get(MODEL), inputs, columns)


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    try:
        with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
            header_of(file.schema, path)
            for number in range(file.num_record_batches):
                yield file.get_batch(number)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> FileError:
    if not path.exists():
        return FileError(f"there is no file {path}.")
    return FileError(
        f"{path} is no file of states, which encode --states writes, or it is truncated or corrupt ({error})."
    )


def model_bytes(model: nn.Module) -> bytes | None:
    """A model as `setfold.save` writes it; None for one that cannot be written down."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        try:
            save(model, path)
        except DescriptionError:
            return None
        return path.read_bytes()


def model_from(content: bytes, allow: Iterable[str] = ()) -> nn.Module:
    """The model that `model_bytes` wrote down."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        return load(path, allow=allow)
