"""State files merged into a store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa

from setfold.core.arguments import checked
from setfold.errors import InputError, StateMismatchError
from setfold.files.columns import ColumnSpec
from setfold.files.engines.task import Stamp
from setfold.files.ids import TYPES, pack
from setfold.files.partials import digest_of_schema
from setfold.files.states import read_provenance, read_states
from setfold.files.tables.table import StateTable
from setfold.live.absorb import check_states, horizon_of
from setfold.live.batches import DUPLICATE, Applied, Identity
from setfold.live.contents import digest_of_file
from setfold.live.database import Transaction
from setfold.live.ledger import note
from setfold.live.merging import write_states
from setfold.live.models import LiveModel
from setfold.live.names import SetIds
from setfold.live.opened import OpenStore
from setfold.live.states import KEYS, join_key
from setfold.live.times import ONLY_BUCKET, SECOND, bucket_of

SOURCE = "states"


class Importing(OpenStore):
    """The part of `LiveSets` that takes states from elsewhere."""

    @checked
    def import_states(self, path: str | Path, *, at: datetime | None = None) -> Applied:
        """Merge a state file into the sets of the store, once: a copy of it changes nothing.

        The states must be those of a model of the store. If that is a model which is not active,
        they are history for it, as in `fill`: a whole history can be computed elsewhere by
        `setfold encode --states`. Sets that were deleted from the store are left out, unless the
        store has buckets, and `at` is not before the deletion.

        Args:
            path: A file that `setfold encode --states`, `setfold merge` or `export` wrote.
            at: If the store has buckets, the time of all elements.

        Raises:
            FileError: The file is missing or corrupt.
            StateMismatchError: The store has no model that computed these states.
            InputError: The set ids have other types, or another model would lack the elements.
        """
        file, bucket = Path(path), self._bucket_of(at)
        set_type, _, provenance = read_provenance(file)
        stamp, identity = Stamp.of(file), Identity(SOURCE, digest_of_file(file).hex())
        ids = _ids_of(set_type, provenance.columns, file)
        rows = sets = deleted = 0
        with self.database.writing(alone=True) as transaction:
            models = _models_of(file, self._refresh(transaction))
            self._check_horizon(transaction, bucket)
            if identity in transaction.find_batches([identity]):
                return DUPLICATE
            if models[0].number in transaction.filled(*identity):
                return DUPLICATE
            ids.check(transaction)
            if models[0].row.active:
                note(transaction, [(identity, b"")])
            else:
                for model in models:
                    transaction.add_fill(model.number, *identity, None)
            for table in read_states(file):
                table.sets = table.sets if len(ids.names) > 1 else pack([table.sets])
                kept = self._admitted(transaction, table, bucket)
                deleted += int(table.count.sum()) - int(kept.count.sum())
                rows, sets = rows + int(kept.count.sum()), sets + len(kept)
                keys = [join_key(name, bucket) for name in kept.sets.to_pylist()]
                kept.sets = pa.array(keys, KEYS)
                if len(kept):
                    for model in models:
                        write_states(transaction, model, [check_states(kept)])
            if Stamp.of(file) != stamp:
                raise InputError(f"{file} has changed while it was read. Import it again.")
        return Applied("applied", rows, sets, deleted=deleted)

    def _bucket_of(self, at: datetime | None) -> int:
        if self.bucket is None:
            if at is not None:
                raise InputError("the store has no buckets, so the time of states has no use.")
            return ONLY_BUCKET
        if at is None:
            raise InputError(
                "the store keeps buckets of time, and a state file has no times. Pass the time of "
                "its elements as at.",
                command="the store keeps buckets of time, and a state file has no times. Pass the "
                "time of its elements as --at.",
            )
        return bucket_of(round(at.timestamp() * SECOND), self.bucket)

    def _check_horizon(self, view: Transaction, bucket: int) -> None:
        horizon = horizon_of(view)
        if horizon is not None and bucket < horizon:
            raise InputError("the time of the states is before the window of the store.")

    def _admitted(self, view: Transaction, table: StateTable, bucket: int) -> StateTable:
        """Return the sets of a table that were not deleted."""
        deletions = view.deletions(table.sets.to_pylist())
        dropped = {
            name
            for name, deletion in deletions.items()
            if self.bucket is None or bucket < bucket_of(deletion.at, self.bucket)
        }
        keep = [name not in dropped for name in table.sets.to_pylist()]
        return table.take(np.flatnonzero(keep)) if dropped else table


def _ids_of(set_type: pa.DataType, columns: ColumnSpec | None, file: Path) -> SetIds:
    """Return what the set ids of a state file are."""
    fields = [*set_type] if pa.types.is_struct(set_type) else [pa.field("set", set_type)]
    names = tuple(field.name for field in fields)
    if columns is not None and columns.set_names:
        names = columns.set_names
    types = tuple(str(field.type) for field in fields)
    if wrong := [kind for kind in types if kind not in TYPES]:
        raise InputError(
            f"the set ids of {file} are {wrong[0]}; those of a store are integers, text, booleans or "
            "dates. Convert them, and encode again."
        )
    return SetIds(names, types)


def _models_of(file: Path, models: Sequence[LiveModel]) -> list[LiveModel]:
    """Return the model that computed a state file, and those that differ in their heads only."""
    first = next(read_states(file), None)
    digest = None if first is None else digest_of_schema(first.to_arrow().schema)
    found = [model for model in models if digest in (None, model.codec.digest)]
    if not found:
        raise StateMismatchError(
            f"the states in {file} were computed by another model than those of the store. Encode "
            "with a model of the store, or add the model first."
        )
    if found[0].row.active and len(found) < len(models):
        others = ", ".join(str(model.number) for model in models if model not in found)
        raise InputError(
            f"the states in {file} are those of the active model, so model {others} would lack their "
            "elements. Drop it first, or import the states before it is added."
        )
    return found
