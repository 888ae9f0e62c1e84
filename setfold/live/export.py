"""All sets of a store, as a stream, as a file of encodings, and as a state file."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import torch

from setfold.core.arguments import checked
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.persist import DIGEST_BYTES, hold, is_full_disk, replace_durably
from setfold.errors import FileError, InputError, NonFiniteError
from setfold.files.columns import ColumnSpec
from setfold.files.outputs import ArrowSink, Sink, check_target, sink_for
from setfold.files.request import check_states_path, dtype_of
from setfold.files.states import Provenance
from setfold.files.tables.absorb import find_finite
from setfold.files.tables.arrow import RESULT
from setfold.files.tables.table import StateTable, read_out
from setfold.live.merging import tables_of_all
from setfold.live.models import LiveModel
from setfold.live.names import NO_IDS, SetIds
from setfold.live.opened import OpenStore
from setfold.live.states import KEYS


class Exported(NamedTuple):
    """What was exported.

    Attributes:
        sets: The number of sets.
        elements: The number of their elements.
    """

    sets: int
    elements: int


class Exporting(OpenStore):
    """The part of `LiveSets` that reads all sets."""

    @checked
    def read(self, *, last: str | None = None, head: bool = False) -> pa.RecordBatchReader:
        """Return the encodings of all sets, sorted by set id, as a stream of Arrow batches.

        All of them are of the same moment, however long it takes to read them. The columns are
        those of the set id (`set`, or their names if there are several), `count`, `prediction` if
        the head predicts a target, and `encoding`.

        Args:
            last: As for `encode`. Sets without recent elements are not listed.
            head: Whether to apply the head of the model.
        """
        parts = self._encodings(self._since(last), head)
        first = next(parts).replace_schema_metadata(None)

        def batches() -> Iterator[pa.RecordBatch]:
            for part in parts:
                yield from part.replace_schema_metadata(None).to_batches()

        return pa.RecordBatchReader.from_batches(first.schema, batches())

    @checked
    def export(
        self,
        path: str | Path,
        *,
        states: bool = False,
        last: str | None = None,
        head: bool = False,
        overwrite: bool = False,
    ) -> Exported:
        """Write all sets to a file, as they are at this moment, sorted by set id.

        The file appears under its name when it is complete, and survives a power loss then.

        Args:
            path: A .parquet, .arrow, .npz or .csv file.
            states: Whether to write states instead of encodings, to an .arrow file that
                `setfold.merge_states`, `setfold.readout_states` and `import_states` read. The
                buckets of a set are merged.
            last: Only recent elements, as for `encode`.
            head: Whether to apply the head of the model to encodings.
            overwrite: Whether to replace a file that exists.
        """
        target = Path(path)
        sink = ArrowSink if states else sink_for(target)
        if states:
            check_states_path(target)
        check_target(target)
        if target.exists() and not overwrite:
            raise InputError(
                f"{target} exists. Choose another output, or replace it with overwrite=True.",
                command=f"{target} exists. Choose another output, or replace it with --overwrite.",
            )
        since, part = self._since(last), target.with_name(f".{target.name}.part")
        parts = self._states(since) if states else self._encodings(since, head)
        with _alone(target):
            try:
                found = _write(parts, sink, part)
                replace_durably(part, target)
            except OSError as error:
                if not is_full_disk(error):
                    raise
                raise FileError(
                    f"cannot write {target}: the disk is full. Free some space, then try again."
                ) from error
            finally:
                for left in (part, part.with_name(part.name + ".table")):
                    left.unlink(missing_ok=True)
        return found

    def _encodings(self, since: int | None, head: bool) -> Iterator[pa.Table]:
        """Yield the encodings of all sets, some at a time. The first table has no rows."""
        with self._snapshot() as view:
            model, ids = self._refresh(view)[0], SetIds.of(view) or NO_IDS
            encoder, none = model.readers[head], _no_states(model)
            for table in chain([none], tables_of_all(view, model, since)):
                for part in _read_out(encoder, table, ids):
                    yield ids.put_into(part)

    def _states(self, since: int | None) -> Iterator[pa.Table]:
        """Yield the states of all sets, some at a time. The first table has no rows."""
        with self._snapshot() as view:
            model, ids = self._refresh(view)[0], SetIds.of(view) or NO_IDS
            metadata = _provenance(model, ids).metadata()
            for table in chain([_no_states(model)], tables_of_all(view, model, since)):
                table.sets = ids.columns_of(table.sets)
                for part in table.parts():
                    yield part.replace_schema_metadata({**part.schema.metadata, **metadata})


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Return a context in which no other process exports to the same file.

    Raises:
        InputError: One does.
    """
    lock = target.with_name(f".{target.name}.lock")
    with hold(lock, wait=False) as is_mine:
        if not is_mine:
            raise InputError(
                f"another process exports to {target} at this moment. Wait until it is done, or "
                "choose another output."
            )
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def _no_states(model: LiveModel) -> StateTable:
    return StateTable.of_state(pa.array([], KEYS), model.codec.shared)


def _provenance(model: LiveModel, ids: SetIds) -> Provenance:
    """Return what a state file says about the states of a store."""
    several = len(ids.names) > 1
    columns = ColumnSpec(
        None, ids.names if several else ids.names[0], types=ids.types if several else ()
    )
    content = model.row.content or None
    return Provenance(content, columns=columns, dtype=dtype_of(model.encoder))


@torch.no_grad()
def _read_out(encoder: StreamingSetEncoder, table: StateTable, ids: SetIds) -> Iterator[pa.Table]:
    """Yield the encodings of a table.

    Raises:
        NonFiniteError: An encoding is not finite.
    """
    for part in read_out(encoder, table):
        finite = find_finite(part)
        if not finite.all():
            name = part["set"][int(finite.argmin())].as_py()
            raise NonFiniteError(
                f"the encoding of the set {ids.show(name)} is not finite: its elements are too "
                "large together. Delete the set, or scale the features of a new model."
            )
        yield part


def _write(parts: Iterator[pa.Table], kind: type[Sink], path: Path) -> Exported:
    """Write tables to a file.

    Raises:
        InputError: The format cannot store the set ids.
    """
    first = next(parts)
    columns = first.column_names
    ids = columns[: columns.index("count")] if "encoding" in columns else ["set"]
    for name in ids:
        if not kind.can_store(first.schema.field(name).type):
            raise InputError(
                f"the set ids are {first.schema.field(name).type}, which this format cannot store. "
                "Write a .parquet or .arrow file instead."
            )
    # An export is not the result of a command that could be repeated.
    sink = kind(path, {RESULT: secrets.token_hex(DIGEST_BYTES).encode()})
    sets = elements = 0
    for part in chain([first], parts):
        for name in ids:
            kind.check_ids(part[name].combine_chunks())
        sink.write(part)
        sets, elements = sets + len(part), elements + (pc.sum(part["count"]).as_py() or 0)
    sink.close()
    return Exported(sets, elements)
