"""Live sets: the states of sets that grow, in a database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import NamedTuple

import pyarrow as pa
import torch
from torch import Tensor

from setfold.core.arguments import checked
from setfold.core.encoder import StreamingSetEncoder
from setfold.errors import InputError, StoreError
from setfold.files.kinds import Frame, open_frame
from setfold.files.request import make_columns
from setfold.files.tables.table import StateTable
from setfold.live import times
from setfold.live.absorb import (
    absorb_pieces,
    absorbing,
    horizon_of,
)
from setfold.live.batches import (
    DUPLICATE,
    SMALL_ROWS,
    Applied,
    Batch,
    Identity,
    Layout,
    Offsets,
    RowReader,
    check_part,
)
from setfold.live.commit import GroupCommit
from setfold.live.database import Database, Deletion, StateRow
from setfold.live.export import Exporting
from setfold.live.imports import Importing
from setfold.live.ledger import (
    ADDED,
    ChangedError,
    busy_error,
    check_fills,
    is_known,
    models_without,
    note,
    sort_out,
)
from setfold.live.merging import table_of_sets, write_states
from setfold.live.models import LiveModel
from setfold.live.names import Names, SetIds
from setfold.live.removal import Removing
from setfold.live.reports import Reporting
from setfold.live.retry import InterruptedTransactionError, repeated
from setfold.live.states import split_key
from setfold.live.times import first_bucket
from setfold.live.together import Bundling, admit_all
from setfold.live.upgrade import Upgrading

GROUP = 1024  # batches of one transaction
TRIES = 10  # how often an update is prepared, if the store changes meanwhile


class Prepared(NamedTuple):
    """What an update is about to write.

    Attributes:
        epoch: The epoch in which it was prepared.
        results: The results of batches that were applied before.
        applied: What will become of the others, by number.
        all_models: The models of the store, the active one first.
        models: Those that the batches are not in yet.
        tables: The states of the rows, for each of these models.
    """

    epoch: int
    results: list[Applied | Exception]
    applied: dict[int, Applied]
    all_models: list[LiveModel]
    models: list[LiveModel]
    tables: list[list[StateTable]]


class LiveSets(Bundling, Upgrading, Removing, Exporting, Importing, Reporting):
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
        super().__init__(database, given, allow)
        self.group: GroupCommit[Batch, Applied] = GroupCommit(self._apply, GROUP)

    # ---- updates ---------------------------------------------------------------------------

    @checked
    def update(
        self,
        rows: object,
        *,
        set: str | Sequence[str],
        batch: Sequence[str | int] | Offsets,
        features: str | Sequence[str] | None = None,
        time: str | None = None,
        skip_errors: bool = False,
    ) -> Applied:
        """Add rows to their sets, once: a batch that was applied before changes nothing.

        When it returns, the change is durable. If it raises, nothing was changed. Small batches of
        several threads share a transaction.

        Args:
            rows: A pandas or polars DataFrame, an Arrow table or reader, or anything else that
                `setfold.encode_frame` takes.
            set: The column that holds the set id of each row, or several.
            batch: The identity of the batch: a source, and what identifies a batch of it, such as
                ("orders", 17); or `Offsets`, if the source numbers its records.
            features: The columns to encode, as for `setfold.encode_frame`.
            time: The column that holds the time of each row, if the store has buckets: timestamps,
                dates, text such as "2026-07-01T12:00:00Z", or seconds since 1970.
            skip_errors: Whether to skip and count bad rows, instead of raising an error.

        Raises:
            InputError: A row is bad, or a column is missing.
            BatchConflictError: The batch was applied before, with other rows.
            StoreError: The database cannot be used.
        """
        identity = batch.check() if isinstance(batch, Offsets) else Identity.of(batch)
        columns = make_columns(set, features, False, None)
        layout = Layout(columns, time, self.bucket, skip_errors)
        return self._update(open_frame(rows, SMALL_ROWS, "update: rows"), identity, layout)

    def _update(self, frame: Frame, identity: Identity | Offsets, layout: Layout) -> Applied:
        """Add the rows of a frame to their sets."""
        reader = self._read(frame, repeated(self._current_models), layout)
        stream = iter(reader)
        pieces = list(islice(stream, 2))
        if len(pieces) != 1:
            return self._apply_large(identity, reader, chain(pieces, stream))
        digest = reader.digest.result()
        return self.group.submit(Batch(identity, digest, layout, pieces[0][0], reader.skipped))

    def _apply(self, batches: Sequence[Batch]) -> Sequence[Applied | Exception]:
        """Apply small batches in one transaction; those that fail do not affect the others."""
        done: dict[int, Applied] = {}  # in case that a commit is lost on the way back
        try:
            return repeated(lambda: self._apply_together(batches, done), is_identified=True)
        except StoreError as error:  # not raised: others of the group may be applied already
            return [error] * len(batches)
        except Exception as error:  # a bad row, for example; it is not known of which batch
            if len(batches) == 1:
                return [error]
        return self._apply_halves(batches)

    def _apply_halves(self, batches: Sequence[Batch]) -> Sequence[Applied | Exception]:
        half = len(batches) // 2
        return [*self._apply(batches[:half]), *self._apply(batches[half:])]

    @torch.no_grad()  # so that encoders keep what they derive from their weights
    def _apply_together(
        self, batches: Sequence[Batch], done: dict[int, Applied]
    ) -> Sequence[Applied | Exception]:
        """Apply batches; `done` collects what became of them, by sequence number."""
        for _ in range(TRIES):
            prepared = self._prepare(batches, done)
            if prepared is None:
                return self._apply_halves(batches)
            try:
                if prepared.applied:
                    self._write(batches, prepared, done)
            except ChangedError:
                continue
            for number, applied in prepared.applied.items():
                prepared.results[number] = applied
            return prepared.results
        raise busy_error(self.database)

    def _prepare(self, batches: Sequence[Batch], done: Mapping[int, Applied]) -> Prepared | None:
        """Compute the states of the rows of those batches that were not applied before.

        Returns:
            None if some batches are in some models already, and others may not be.
        """
        with self.database.reading() as view:
            epoch, all_models, horizon = view.epoch(), self._refresh(view), horizon_of(view)
            results, fresh = sort_out(view, batches, done)
            models = models_without(view, all_models, [batches[n].identity for n in fresh])
            if len(models) < len(all_models) and len(batches) == 1:
                check_fills(view, batches[0].identity, ADDED + batches[0].digest)
            admitted = admit_all({number: batches[number] for number in fresh}, view, horizon)
        if len(models) < len(all_models) and len(batches) > 1:
            return None
        found: dict[int, Applied] = {}
        with absorbing(models, [one.rows for one in admitted]) as absorber:
            for one in admitted:
                found |= one.applied(absorber.add(one.rows, one.layout))
            tables = [list(absorber.drain(model)) for model in models]
        if all_models[0] not in models:
            found = {number: one._replace(status="duplicate") for number, one in found.items()}
        applied = {number: found[number] for number in fresh}
        return Prepared(epoch, results, applied, all_models, models, tables)

    def _write(
        self, batches: Sequence[Batch], prepared: Prepared, done: dict[int, Applied]
    ) -> None:
        """Apply what was prepared, in one transaction.

        Raises:
            ChangedError: The store has changed meanwhile.
        """
        fresh = [batches[number] for number in prepared.applied]
        identities = [batch.identity for batch in fresh]
        with self.database.writing() as transaction:
            models = models_without(transaction, prepared.all_models, identities)
            if transaction.epoch() != prepared.epoch or models != prepared.models:
                raise busy_error(self.database)
            for ids in {SetIds.in_rows(batch.layout, batch.rows.schema) for batch in fresh}:
                ids.check(transaction)
            sequences = note(transaction, [(batch.identity, batch.digest) for batch in fresh])
            for sequence, applied in zip(sequences, prepared.applied.values(), strict=True):
                if sequence is not None:
                    done[sequence] = applied
            for model, tables in zip(models, prepared.tables, strict=True):
                write_states(transaction, model, tables)

    def _apply_large(
        self,
        identity: Identity | Offsets,
        reader: RowReader,
        pieces: Iterable[tuple[pa.RecordBatch, int]],
    ) -> Applied:
        """Apply a batch whose rows are absorbed one part after the other."""
        names = dict[bytes, None]()
        with self.database.reading() as view:
            epoch, models = view.epoch(), self._refresh(view)
        with absorbing(models) as absorber:
            totals = absorb_pieces(absorber, reader, pieces, self.database.reading)
            digest, sequence = reader.digest.result(), None
            wanted: list[LiveModel] = []
            try:
                with self.database.writing(alone=True) as transaction:
                    if is_known(transaction, identity, digest):
                        return DUPLICATE
                    if transaction.epoch() != epoch:
                        raise busy_error(self.database)
                    SetIds.in_rows(reader.layout, reader.frame.schema).check(transaction)
                    (sequence,) = note(transaction, [(identity, digest)])
                    wanted = models_without(transaction, models, [identity])
                    if len(wanted) < len(models):
                        check_fills(transaction, identity, ADDED + digest)
                    for model in wanted:
                        for table in absorber.drain(model):
                            write_states(transaction, model, [table])
                            names |= dict.fromkeys(split_key(k)[0] for k in table.sets.to_pylist())
            except InterruptedTransactionError as error:
                if not error.is_unknown or not self._has(identity, sequence):
                    raise
        rows, late, deleted, skipped = totals
        found = Applied("applied", rows, len(names), late, deleted, skipped)
        return found if models[0] in wanted else found._replace(status="duplicate")

    def _has(self, identity: Identity | Offsets, sequence: int | None) -> bool:
        """Whether a batch was applied, with this sequence number if it has one."""
        with self.database.reading() as view:
            if isinstance(identity, Offsets):
                return identity.is_known(view.positions(identity.source))
            known = view.find_batches([identity]).get(identity)
        return known is not None and known.sequence == sequence

    @checked
    def positions(self, source: str) -> dict[str, int]:
        """Return where each part of a source with offsets continues: see `Offsets`."""
        check_part(source)
        return repeated(lambda: self._positions(source))

    def _positions(self, source: str) -> dict[str, int]:
        with self.database.reading() as view:
            return view.positions(source)

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
        return self.look_up(names, last=last, head=head)[1]

    @checked
    @torch.no_grad()
    def look_up(
        self, names: Names, *, last: str | None = None, head: bool = False
    ) -> tuple[list[int], Tensor]:
        """Return the numbers of elements and the encodings of some sets, at one moment.

        The arguments are those of `encode`.
        """
        model, wanted, rows = repeated(lambda: self._find(names, last))
        encoder, places = model.readers[head], {}
        counts, parts = list[int](), list[Tensor]()
        if rows:
            table = table_of_sets(model, rows)
            parts.append(encoder.readout(table.state.to(encoder.device)).cpu())
            counts += table.count.tolist()
            places = {name: place for place, name in enumerate(table.sets.to_pylist())}
        if len(places) < len({*wanted}) or not rows:  # some are empty
            parts.append(encoder.readout(encoder.initial_state(1)).cpu())
            counts.append(0)
        index = torch.tensor([places.get(name, len(places)) for name in wanted], dtype=torch.long)
        return [counts[place] for place in index.tolist()], torch.cat(parts)[index]

    @checked
    def count(self, names: Names, *, last: str | None = None) -> list[int]:
        """Return the number of elements of some sets; the arguments are those of `encode`."""
        model, wanted, rows = repeated(lambda: self._find(names, last))
        model.codec.check(rows)
        counts: dict[bytes, int] = {}
        for row in rows:
            counts[row.name] = counts.get(row.name, 0) + row.count
        return [counts.get(name, 0) for name in wanted]

    def _find(
        self, names: Names, last: str | None
    ) -> tuple[LiveModel, list[bytes], list[StateRow]]:
        """Return the active model, and sets as they are in the database, with their states."""
        with self.database.reading() as view:
            model, wanted = self._refresh(view)[0], self._pack(view, names)
            distinct = list(dict.fromkeys(wanted))
            return model, wanted, view.of_sets(model.number, distinct, self._since(last))

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
            horizon = max(horizon, horizon_of(transaction) or horizon)
            count = transaction.expire(horizon)
            transaction.set("horizon", str(horizon))
            transaction.begin_epoch()
        return count
