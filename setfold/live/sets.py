"""Live sets: the states of sets that grow, in a database."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby, islice
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import torch
from torch import Tensor

from setfold.core.arguments import checked
from setfold.core.encoder import StreamingSetEncoder
from setfold.errors import BatchConflictError, InputError, StoreError
from setfold.files.ids import TYPES, pack
from setfold.files.kinds import open_frame
from setfold.files.request import make_columns
from setfold.files.tables.table import StateTable, merged
from setfold.live import times
from setfold.live.absorb import absorbing, admit, check_states, names_of, needed_columns
from setfold.live.batches import (
    DUPLICATE,
    SMALL_ROWS,
    Applied,
    Batch,
    Identity,
    Layout,
    RowReader,
)
from setfold.live.commit import GroupCommit
from setfold.live.database import (
    BatchRow,
    Database,
    Deletion,
    StateRow,
    Transaction,
)
from setfold.live.models import LiveModel, open_models
from setfold.live.retry import InterruptedTransactionError, repeated
from setfold.live.states import split_key
from setfold.live.times import first_bucket, parse_duration

GROUP = 1024  # batches of one transaction
TRIES = 10  # how often an update is prepared, if the store changes meanwhile
AT_ONCE = 4096  # states that are read at a time
Names: TypeAlias = Sequence[Any] | pa.Array | pa.ChunkedArray


class _Prepared(NamedTuple):
    """What an update is about to write.

    Attributes:
        epoch: The epoch in which it was prepared.
        results: The results of batches that were applied before.
        applied: What will become of the others, by number.
        models: The models.
        tables: The states of the rows, for each model.
    """

    epoch: int
    results: list[Applied | Exception]
    applied: dict[int, Applied]
    models: list[LiveModel]
    tables: list[list[StateTable]]


class _StaleError(Exception):
    """The store has changed since an update was prepared."""


class LiveSets:
    """The sets of a store. `setfold.live.open` returns it.

    It can be used by several threads, and a store by several processes at the same time.

    Args:
        database: The database of the store.
        given: The active model, if the user has passed it.
        allow: Import paths of own classes that the models may use.
    """

    def __init__(
        self,
        database: Database,
        given: StreamingSetEncoder | None = None,
        allow: Iterable[str] = (),
    ) -> None:
        self.database, self.given, self.allow = database, given, tuple(allow)
        self.group: GroupCommit[Batch, Applied] = GroupCommit(self._apply, GROUP)
        self.loaded: tuple[int, list[LiveModel]] = (-1, [])  # the models, and their epoch
        with database.reading() as view:
            self._refresh(view)
            settings = view.settings()
        self.bucket = int(settings["bucket"]) if "bucket" in settings else None
        self.window = int(settings["window"]) if "window" in settings else None

    def __enter__(self) -> LiveSets:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the database."""
        self.database.close()

    @property
    def model(self) -> StreamingSetEncoder:
        """The active model."""
        return repeated(self._current_models)[0].encoder

    def _current_models(self) -> list[LiveModel]:
        with self.database.reading() as view:
            return self._refresh(view)

    # ---- updates ---------------------------------------------------------------------------

    @checked
    def update(
        self,
        rows: object,
        *,
        set: str | Sequence[str],
        batch: Sequence[str | int],
        features: str | Sequence[str] | None = None,
        time: str | None = None,
    ) -> Applied:
        """Add rows to their sets, once: a batch that was applied before changes nothing.

        When it returns, the change is durable. If it raises, nothing was changed. Small batches of
        several threads share a transaction.

        Args:
            rows: A pandas or polars DataFrame, an Arrow table or reader, or anything else that
                `setfold.encode_frame` takes.
            set: The column that holds the set id of each row, or several.
            batch: The identity of the batch: a source, and what identifies a batch of it, such as
                ("orders", 17).
            features: The columns to encode, as for `setfold.encode_frame`.
            time: The column that holds the time of each row, if the store has buckets: timestamps,
                dates, or seconds since 1970.

        Raises:
            InputError: A row is bad, or a column is missing.
            BatchConflictError: The batch was applied before, with other rows.
            StoreError: The database cannot be used.
        """
        identity = Identity.of(batch)
        layout = Layout(make_columns(set, features, False, None), time, self.bucket)
        frame = open_frame(rows, SMALL_ROWS, "update: rows")
        models = repeated(self._current_models)
        frame.check([*layout.columns.set_names, *layout.columns.named])
        reader = RowReader(frame, needed_columns(models, layout, frame.schema), layout)
        stream = iter(reader)
        pieces = list(islice(stream, 2))
        if len(pieces) != 1:
            return self._apply_large(identity, reader, chain(pieces, stream))
        digest, types = reader.digest.result(), _types_of(layout, frame.schema)
        return self.group.submit(Batch(identity, digest, layout, pieces[0][0], types))

    def _apply(self, batches: Sequence[Batch]) -> Sequence[Applied | Exception]:
        """Apply small batches in one transaction; those that fail do not affect the others."""
        done: dict[int, Applied] = {}  # in case that a commit is lost on the way back
        try:
            return repeated(lambda: self._apply_together(batches, done), is_identified=True)
        except StoreError:
            raise
        except Exception as error:  # a bad row, for example; it is not known of which batch
            if len(batches) == 1:
                return [error]
        return [result for batch in batches for result in self._apply([batch])]

    def _apply_together(
        self, batches: Sequence[Batch], done: dict[int, Applied]
    ) -> Sequence[Applied | Exception]:
        """Apply batches; `done` collects what became of them, by sequence number."""
        for _ in range(TRIES):
            prepared = self._prepare(batches, done)
            try:
                if prepared.applied:
                    self._write(batches, prepared, done)
            except _StaleError:
                continue
            for number, applied in prepared.applied.items():
                prepared.results[number] = applied
            return prepared.results
        raise _busy_error(self.database)

    def _prepare(self, batches: Sequence[Batch], done: dict[int, Applied]) -> _Prepared:
        """Compute the states of the rows of those batches that were not applied before."""
        with self.database.reading() as view:
            epoch, models, horizon = view.epoch(), self._refresh(view), _horizon(view)
            results, fresh = _sort_out(view, batches, done)
            admitted = {
                number: admit(batches[number].rows, batches[number].layout, view, horizon)
                for number in fresh
            }
        with absorbing(models) as absorber:
            for number, found in admitted.items():
                if found.rows.num_rows:
                    absorber.add(found.rows, batches[number].layout)
            tables = [list(absorber.drain(model)) for model in models]
        applied = {}
        for number, (left, late, deleted) in admitted.items():
            sets = len(names_of(left, batches[number].layout).unique())
            applied[number] = Applied("applied", left.num_rows, sets, late, deleted)
        return _Prepared(epoch, results, applied, models, tables)

    def _write(
        self, batches: Sequence[Batch], prepared: _Prepared, done: dict[int, Applied]
    ) -> None:
        """Apply what was prepared, in one transaction.

        Raises:
            _StaleError: The store has changed meanwhile.
        """
        fresh = [batches[number] for number in prepared.applied]
        with self.database.writing() as transaction:
            if transaction.epoch() != prepared.epoch:
                raise _StaleError
            for types in {batch.types for batch in fresh}:
                _check_types(transaction, types)
            sequences = transaction.next_sequences(len(fresh))
            done |= dict(zip(sequences, prepared.applied.values(), strict=True))
            _note(transaction, fresh, sequences)
            for model, tables in zip(prepared.models, prepared.tables, strict=True):
                write_states(transaction, model, tables)

    def _apply_large(
        self,
        identity: Identity,
        reader: RowReader,
        pieces: Iterable[tuple[pa.RecordBatch, int]],
    ) -> Applied:
        """Apply a batch whose rows are absorbed one part after the other."""
        late = deleted = left = 0
        layout, names = reader.layout, dict[bytes, None]()
        with self.database.reading() as view:
            epoch, models, horizon = view.epoch(), self._refresh(view), _horizon(view)
        with absorbing(models) as absorber:
            for rows, first in pieces:
                with self.database.reading() as view:
                    found = admit(rows, layout, view, horizon)
                late, deleted = late + found.late, deleted + found.deleted
                left += found.rows.num_rows
                if found.rows.num_rows:
                    absorber.add(found.rows, layout, first)
            digest, sequence = reader.digest.result(), -1
            try:
                with self.database.writing(alone=True) as transaction:
                    known = transaction.find_batches([identity]).get(identity)
                    if known is not None:
                        _check_digest(known, digest)
                        return DUPLICATE
                    if transaction.epoch() != epoch:
                        raise _busy_error(self.database)
                    _check_types(transaction, _types_of(layout, reader.frame.schema))
                    sequence = transaction.next_sequence()
                    transaction.add_batches([BatchRow(*identity, digest, sequence)])
                    for model in models:
                        for table in absorber.drain(model):
                            write_states(transaction, model, [table])
                            names |= dict.fromkeys(split_key(k)[0] for k in table.sets.to_pylist())
            except InterruptedTransactionError as error:
                if not error.is_unknown or not self._has(identity, sequence):
                    raise
        return Applied("applied", left, len(names), late, deleted)

    def _has(self, identity: Identity, sequence: int) -> bool:
        """Whether a batch was applied with this sequence number."""
        with self.database.reading() as view:
            known = view.find_batches([identity]).get(identity)
        return known is not None and known.sequence == sequence

    # ---- reading ---------------------------------------------------------------------------

    @checked
    @torch.no_grad()
    def encode(self, names: Names, *, last: str | None = None, head: bool = False) -> Tensor:
        """Return the encodings of some sets, (len(names), ...).

        Args:
            names: Their ids; tuples if an id has several columns. A set that is not in the store is
                empty, and has the encoding of the empty set.
            last: Only the most recent elements, such as "7d": a multiple of the buckets. The bucket
                of the present is the last one.
            head: Whether to apply the head of the model.
        """
        model, wanted, rows = repeated(lambda: self._read(names, last))
        encoder = model.readers[head]
        empty = encoder.readout(encoder.initial_state(1)).cpu()
        if not rows:
            return empty.expand(len(wanted), *empty.shape[1:]).clone()
        table = table_of_sets(model, rows)
        found = encoder.readout(table.state.to(encoder.device)).cpu()
        places = {name: place for place, name in enumerate(table.sets.to_pylist())}
        index = torch.tensor([places.get(name, len(places)) for name in wanted])
        return torch.cat([found, empty])[index]

    @checked
    def count(self, names: Names, *, last: str | None = None) -> list[int]:
        """Return the number of elements of some sets; the arguments are those of `encode`."""
        _, wanted, rows = repeated(lambda: self._read(names, last))
        counts: dict[bytes, int] = {}
        for row in rows:
            counts[row.name] = counts.get(row.name, 0) + row.count
        return [counts.get(name, 0) for name in wanted]

    def _read(
        self, names: Names, last: str | None
    ) -> tuple[LiveModel, list[bytes], list[StateRow]]:
        """Return the active model, and sets as they are in the database, with their states."""
        with self.database.reading() as view:
            model, wanted = self._refresh(view)[0], self._pack(view, names)
            return (
                model,
                wanted,
                view.of_sets(model.number, list(dict.fromkeys(wanted)), self._since(last)),
            )

    def _since(self, last: str | None) -> int | None:
        """Return the first bucket of the last hours or days; None for all buckets."""
        if last is None:
            return None
        if self.bucket is None:
            raise InputError(
                f"the store has no buckets, so it cannot read the last {last}. Create a store with "
                "buckets."
            )
        return first_bucket(parse_duration(last), self.bucket, times.now())

    # ---- deletion --------------------------------------------------------------------------

    @checked
    def delete(self, names: Names) -> int:
        """Delete sets completely: from all models and buckets. Returns the number of elements.

        Rows of these sets that arrive in new batches count again, except those in buckets before
        that of the deletion.
        """
        count = repeated(lambda: self._delete(names))
        self.database.erase()
        return count

    def _delete(self, names: Names) -> int:
        with self.database.writing(alone=True) as transaction:
            found = list(dict.fromkeys(self._pack(transaction, names)))
            deletion = Deletion(transaction.next_sequence(), times.now())
            count = sum(transaction.delete_set(name, deletion) for name in sorted(found))
            transaction.begin_epoch()
        return count

    @checked
    def expire(self) -> int:
        """Delete the buckets that are older than the window. Returns the number of states."""
        if self.bucket is None or self.window is None:
            raise InputError("the store has no window, so nothing expires.")
        horizon = first_bucket(self.window, self.bucket, times.now())
        count = repeated(lambda: self._expire(horizon))
        with suppress(StoreError):  # the next time is early enough
            self.database.erase()
        return count

    def _expire(self, horizon: int) -> int:
        with self.database.writing(alone=True) as transaction:
            horizon = max(horizon, _horizon(transaction) or horizon)
            count = transaction.expire(horizon)
            transaction.set("horizon", str(horizon))
            transaction.begin_epoch()
        return count

    # ---- helpers ---------------------------------------------------------------------------

    def _refresh(self, view: Transaction) -> list[LiveModel]:
        """Return the models, the active one first; they are loaded again if they have changed."""
        epoch, (known, models) = view.epoch(), self.loaded
        if epoch != known:
            rows = view.models()
            if [model.row for model in models] != rows:
                models = open_models(rows, self.given, self.allow)
            self.loaded = epoch, models
        return models

    def _pack(self, view: Transaction, names: Names) -> list[bytes]:
        """Return names of sets as they are in the database."""
        stored = view.settings().get("ids")
        if stored is None:  # nothing was ever added
            return [b""] * len(names)
        return pack_names(names, [TYPES[kind] for kind in json.loads(stored)])


def pack_names(names: Names, types: Sequence[pa.DataType]) -> list[bytes]:
    """Return set ids as bytes.

    Raises:
        InputError: They do not have these types.

    >>> pack_names(["ann"], [pa.large_string()]) == pack_names([("ann",)], [pa.large_string()])
    True
    """
    if isinstance(names, str | bytes):
        raise InputError(f"expected a list of set ids; got {names!r:.60}. Put it in a list.")
    several = [name if isinstance(name, tuple) else (name,) for name in _values(names)]
    if any(len(name) != len(types) for name in several):
        raise InputError(
            f"a set id of this store has {len(types)} columns; got {several[0]!r:.60}. Pass tuples."
        )
    if not several:
        return []
    try:
        columns = [
            _typed(values, kind)
            for values, kind in zip(zip(*several, strict=True), types, strict=True)
        ]
        if any(column.null_count for column in columns):
            raise ValueError("an id is missing")
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InputError(
            f"set ids of this store are {', '.join(map(str, types))}; got {several[0]!r:.60} "
            f"({error})."
        ) from error
    return pack(columns).to_pylist()


def _typed(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return values of a type, or of one that can be cast to it."""
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError):
        return pa.array(values).cast(kind)


def _values(names: Names) -> list[Any]:
    return names.to_pylist() if isinstance(names, pa.Array | pa.ChunkedArray) else list(names)


def write_states(transaction: Transaction, model: LiveModel, tables: Iterable[StateTable]) -> None:
    """Merge tables of states, sorted by key, into the states of a model.

    Raises:
        NonFiniteError: The state of a set overflows.
    """
    for table in tables:
        keys = [split_key(key) for key in table.sets.to_pylist()]
        rows = transaction.fetch(model.number, keys)
        if rows:
            table = check_states(merged([model.codec.to_table(rows), table]))
        transaction.put(model.number, model.codec.to_rows(table))


def table_of_sets(model: LiveModel, rows: Sequence[StateRow]) -> StateTable:
    """Return the states of sets, merged over their buckets; the rows of a set are consecutive."""
    layers: list[list[StateRow]] = []  # each lists a set once
    for _, own in groupby(rows, key=lambda row: row.name):
        for number, row in enumerate(own):
            if number == len(layers):
                layers.append([])
            layers[number].append(row)
    tables = []
    for layer in layers:
        table = model.codec.to_table(layer)
        table.sets = pa.array([row.name for row in layer], pa.large_binary())
        tables.append(table)
    return merged(tables)


def _sort_out(
    view: Transaction, batches: Sequence[Batch], done: Mapping[int, Applied]
) -> tuple[list[Applied | Exception], list[int]]:
    """Return a result for each batch that was applied before, and the numbers of the others."""
    known = view.find_batches([batch.identity for batch in batches])
    results: list[Applied | Exception] = [DUPLICATE] * len(batches)
    fresh: list[int] = []
    for number, batch in enumerate(batches):
        row = known.get(batch.identity)
        if row is None:
            known[batch.identity] = BatchRow(*batch.identity, batch.digest, 0)
            fresh.append(number)
            continue
        try:
            _check_digest(row, batch.digest)
            results[number] = done.get(row.sequence, DUPLICATE)
        except BatchConflictError as error:
            results[number] = error
    return results, fresh


def _note(transaction: Transaction, batches: Sequence[Batch], sequences: Sequence[int]) -> None:
    """Note that batches are applied.

    Raises:
        _StaleError: One of them was applied meanwhile.
    """
    numbered = zip(batches, sequences, strict=True)
    rows = [BatchRow(*batch.identity, batch.digest, number) for batch, number in numbered]
    if transaction.add_batches(rows) != len(rows):
        raise _StaleError


def _check_digest(row: BatchRow, digest: bytes) -> None:
    if row.digest != digest:
        raise BatchConflictError(
            f"the batch {row.key} of {row.source} was applied before, with other rows. Give new "
            "rows an identity of their own."
        )


def _types_of(layout: Layout, schema: pa.Schema) -> tuple[str, ...]:
    """Return the types of the columns of a set id, as the store keeps them."""
    columns = layout.columns
    return tuple(str(columns.column_type(name, schema)) for name in columns.set_names)


def _check_types(transaction: Transaction, types: tuple[str, ...]) -> None:
    """Raise InputError unless set ids have the types of those before."""
    stored = transaction.set_once("ids", json.dumps(types))
    if json.loads(stored) != [*types]:
        raise InputError(
            f"the set ids of this store are {', '.join(json.loads(stored))}; got "
            f"{', '.join(types)}. Convert the column of the set id."
        )


def _horizon(view: Transaction) -> int | None:
    """Return the first bucket that has not expired; None if none has."""
    found = view.settings().get("horizon")
    return None if found is None else int(found)


def _busy_error(database: Database) -> StoreError:
    return StoreError(
        f"{database.shown} was changed by deletions, expiry or another model while the update was "
        "prepared. Nothing was applied; repeat the update."
    )
