"""Live sets: the states of sets that grow, in a database."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain, groupby, islice
from typing import Any

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
from setfold.live.absorb import absorbing, admit, check_states, needed_columns
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
from setfold.live.database import BatchRow, Database, Deletion, StateRow, Transaction
from setfold.live.models import LiveModel, open_models
from setfold.live.states import split_key
from setfold.live.times import first_bucket, now, parse_duration
from setfold.live.together import Bundle, admit_all, prepare, types_of

GROUP = 1024  # batches of one transaction
TRIES = 10  # how often an update is prepared, if the store changes meanwhile
AT_ONCE = 4096  # states that are read at a time
Names = Sequence[Any] | pa.Array | pa.ChunkedArray


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
        self.known = -1  # the epoch of the models
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
        with self.database.reading() as view:
            return self._refresh(view)[0].encoder

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
        with self.database.reading() as view:
            models = self._refresh(view)
        frame.check([*layout.columns.set_names, *layout.columns.named])
        reader = RowReader(frame, needed_columns(models, layout, frame.schema), layout)
        stream = iter(reader)
        pieces = list(islice(stream, 2))
        if len(pieces) != 1:
            return self._apply_large(identity, reader, chain(pieces, stream))
        digest, types = reader.digest.result(), types_of(layout.columns, frame.schema)
        return self.group.submit(Batch(identity, digest, layout, pieces[0][0], types))

    def update_many(self, bundles: Sequence[Bundle]) -> list[list[Applied | BaseException]]:
        """Apply many small batches in one transaction; those that fail do not affect the others.

        Returns:
            For each batch of each bundle what `update` returns, or the error that it raises.
        """
        with self.database.reading() as view:
            models = self._refresh(view)
        prepared = [self._prepare(bundle, models) for bundle in bundles]
        batches = [batch for own in prepared for batch in own if isinstance(batch, Batch)]
        results = iter(self.group.submit_all(batches))
        return [
            [next(results) if isinstance(batch, Batch) else batch for batch in own]
            for own in prepared
        ]

    def _prepare(self, bundle: Bundle, models: Sequence[LiveModel]) -> list[Batch | Exception]:
        try:
            columns = make_columns(bundle.set, bundle.features, False, None)
            return [*prepare(bundle, Layout(columns, bundle.time, self.bucket), models)]
        except Exception as error:  # it is not known of which batch
            if len(bundle.lengths) == 1:
                return [error]
        return [batch for one in bundle.split() for batch in self._prepare(one, models)]

    def _apply(self, batches: Sequence[Batch]) -> Sequence[Applied | Exception]:
        """Apply small batches in one transaction; those that fail do not affect the others."""
        try:
            return self._apply_together(batches)
        except StoreError as error:  # not raised: others of the group may be applied already
            return [error] * len(batches)
        except Exception as error:  # a bad row, for example; it is not known of which batch
            if len(batches) == 1:
                return [error]
        half = len(batches) // 2
        return [*self._apply(batches[:half]), *self._apply(batches[half:])]

    @torch.no_grad()  # so that encoders keep what they derive from their weights
    def _apply_together(self, batches: Sequence[Batch]) -> Sequence[Applied | Exception]:
        for _ in range(TRIES):
            with self.database.reading() as view:
                epoch, models = view.epoch(), self._refresh(view)
                horizon = _horizon(view)
                results, fresh = _sort_out(view, batches)
                admitted = admit_all({number: batches[number] for number in fresh}, view, horizon)
            with absorbing(models, sum(one.rows.num_rows for one in admitted)) as absorber:
                for one in admitted:
                    if one.rows.num_rows:
                        absorber.add(one.rows, one.layout)
                tables = {model.number: list(absorber.drain(model)) for model in models}
            with self.database.writing() as transaction:
                if transaction.epoch() != epoch or _sort_out(transaction, batches)[1] != fresh:
                    continue
                types = {batches[number].types for number in fresh}
                for kinds in types:
                    _check_types(transaction, kinds)
                noted = [(*batches[number].identity, batches[number].digest) for number in fresh]
                transaction.add_batches(
                    [BatchRow(*one, transaction.next_sequence()) for one in noted]
                )
                for model in models:
                    write_states(transaction, model, tables[model.number])
            for one in admitted:
                for number, applied in one.applied.items():
                    results[number] = applied
            return results
        raise _busy_error(self.database)

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
            digest = reader.digest.result()
            with self.database.writing(alone=True) as transaction:
                known = transaction.find_batches([identity]).get(identity)
                if known is not None:
                    _check_digest(known, digest)
                    return DUPLICATE
                if transaction.epoch() != epoch:
                    raise _busy_error(self.database)
                _check_types(transaction, types_of(layout.columns, reader.frame.schema))
                transaction.add_batches([BatchRow(*identity, digest, transaction.next_sequence())])
                for model in models:
                    for table in absorber.drain(model):
                        write_states(transaction, model, [table])
                        names |= dict.fromkeys(split_key(key)[0] for key in table.sets.to_pylist())
        return Applied("applied", left, len(names), late, deleted)

    # ---- reading ---------------------------------------------------------------------------

    @checked
    def encode(self, names: Names, *, last: str | None = None, head: bool = False) -> Tensor:
        """Return the encodings of some sets, (len(names), ...).

        Args:
            names: Their ids; tuples if an id has several columns. A set that is not in the store is
                empty, and has the encoding of the empty set.
            last: Only the most recent elements, such as "7d": a multiple of the buckets. The bucket
                of the present is the last one.
            head: Whether to apply the head of the model.
        """
        return self.read(names, last=last, head=head)[1]

    @checked
    @torch.no_grad()
    def read(
        self, names: Names, *, last: str | None = None, head: bool = False
    ) -> tuple[list[int], Tensor]:
        """Return the numbers of elements and the encodings of some sets, at one moment.

        The arguments are those of `encode`.
        """
        with self.database.reading() as view:
            model = self._refresh(view)[0]
            wanted = self._pack(view, names)
            rows = view.of_sets(model.number, list(dict.fromkeys(wanted)), self._since(last))
        encoder = model.readers[head]
        empty = encoder.readout(encoder.initial_state(1)).cpu()
        if not rows:
            return [0] * len(wanted), empty.expand(len(wanted), *empty.shape[1:]).clone()
        table = table_of_sets(model, rows)
        found = encoder.readout(table.state.to(encoder.device)).cpu()
        places = {name: place for place, name in enumerate(table.sets.to_pylist())}
        index = [places.get(name, len(places)) for name in wanted]
        counts = [*table.count.tolist(), 0]
        return [counts[place] for place in index], torch.cat([found, empty])[torch.tensor(index)]

    @checked
    def count(self, names: Names, *, last: str | None = None) -> list[int]:
        """Return the number of elements of some sets; the arguments are those of `encode`."""
        with self.database.reading() as view:
            wanted = self._pack(view, names)
            model = self._refresh(view)[0].number
            rows = view.of_sets(model, list(dict.fromkeys(wanted)), self._since(last))
        counts: dict[bytes, int] = {}
        for row in rows:
            counts[row.name] = counts.get(row.name, 0) + row.count
        return [counts.get(name, 0) for name in wanted]

    def _since(self, last: str | None) -> int | None:
        """Return the first bucket of the last hours or days; None for all buckets."""
        if last is None:
            return None
        if self.bucket is None:
            raise InputError(
                f"the store has no buckets, so it cannot read the last {last}. Create a store with "
                "buckets."
            )
        return first_bucket(parse_duration(last), self.bucket, now())

    # ---- deletion --------------------------------------------------------------------------

    @checked
    def delete(self, names: Names) -> int:
        """Delete sets completely: from all models and buckets. Returns the number of elements.

        Rows of these sets that arrive in new batches count again, except those in buckets before
        that of the deletion.
        """
        with self.database.writing(alone=True) as transaction:
            found = list(dict.fromkeys(self._pack(transaction, names)))
            deletion = Deletion(transaction.next_sequence(), now())
            count = sum(transaction.delete_set(name, deletion) for name in sorted(found))
            transaction.begin_epoch()
        self.database.erase()
        return count

    @checked
    def expire(self) -> int:
        """Delete the buckets that are older than the window. Returns the number of states."""
        if self.bucket is None or self.window is None:
            raise InputError("the store has no window, so nothing expires.")
        horizon = first_bucket(self.window, self.bucket, now())
        with self.database.writing(alone=True) as transaction:
            horizon = max(horizon, _horizon(transaction) or horizon)
            count = transaction.expire(horizon)
            transaction.set("horizon", str(horizon))
            transaction.begin_epoch()
        self.database.erase()
        return count

    # ---- helpers ---------------------------------------------------------------------------

    def _refresh(self, view: Transaction) -> list[LiveModel]:
        """Return the models, the active one first; they are loaded again if they have changed."""
        epoch = view.epoch()
        if epoch != self.known:
            rows = view.models()
            if self.known < 0 or [model.row for model in self.models] != rows:
                self.models = open_models(rows, self.given, self.allow)
            self.known = epoch
        return self.models

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
            pa.array(values).cast(kind)
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
    view: Transaction, batches: Sequence[Batch]
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
        except BatchConflictError as error:
            results[number] = error
    return results, fresh


def _check_digest(row: BatchRow, digest: bytes) -> None:
    if row.digest != digest:
        raise BatchConflictError(
            f"the batch {row.key} of {row.source} was applied before, with other rows. Give new "
            "rows an identity of their own."
        )


def _check_types(transaction: Transaction, types: tuple[str, ...]) -> None:
    """Raise InputError unless set ids have the types of those before."""
    stored = transaction.settings().get("ids")
    if stored is None:
        transaction.set("ids", json.dumps(types))
    elif json.loads(stored) != [*types]:
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
        f"{database.url} was changed by deletions, expiry or another model while the update was "
        "prepared. Nothing was applied; repeat the update."
    )
