"""Live sets: the states of sets that grow, in a database."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

import pyarrow as pa
import torch
from torch import Tensor

from setfold.core.arguments import checked
from setfold.core.encoder import StreamingSetEncoder
from setfold.errors import InputError, StoreError
from setfold.files.kinds import Frame, open_frame
from setfold.files.request import make_columns
from setfold.live import times
from setfold.live.absorb import (
    absorb_pieces,
    absorbing,
    admit,
    horizon_of,
    names_of,
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
)
from setfold.live.commit import GroupCommit
from setfold.live.database import Database, Deletion
from setfold.live.export import Exporting
from setfold.live.imports import Importing
from setfold.live.ledger import busy_error, is_known, models_without, note, sort_out
from setfold.live.merging import table_of_sets, write_states
from setfold.live.names import Names, SetIds
from setfold.live.removal import Removing
from setfold.live.reports import Reporting
from setfold.live.states import split_key
from setfold.live.times import first_bucket
from setfold.live.upgrade import Upgrading

GROUP = 1024  # batches of one transaction
TRIES = 10  # how often an update is prepared, if the store changes meanwhile


class LiveSets(Upgrading, Removing, Exporting, Importing, Reporting):
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
        with self.database.reading() as view:
            models = self._refresh(view)
        reader = self._read(frame, models, layout)
        stream = iter(reader)
        pieces = list(islice(stream, 2))
        if len(pieces) != 1:
            return self._apply_large(identity, reader, chain(pieces, stream))
        digest = reader.digest.result()
        return self.group.submit(Batch(identity, digest, layout, pieces[0][0], reader.skipped))

    def _apply(self, batches: Sequence[Batch]) -> Sequence[Applied | Exception]:
        """Apply small batches in one transaction; those that fail do not affect the others."""
        try:
            return self._apply_together(batches)
        except StoreError:
            raise
        except Exception as error:  # a bad row, for example; it is not known of which batch
            if len(batches) == 1:
                return [error]
        return [result for batch in batches for result in self._apply([batch])]

    def _apply_together(self, batches: Sequence[Batch]) -> Sequence[Applied | Exception]:
        for _ in range(TRIES):
            with self.database.reading() as view:
                epoch, all_models, horizon = view.epoch(), self._refresh(view), horizon_of(view)
                results, fresh = sort_out(view, batches)
                models = models_without(view, all_models, [batches[n].identity for n in fresh])
                admitted = {
                    number: admit(batches[number].rows, batches[number].layout, view, horizon)
                    for number in fresh
                }
            if len(models) < len(all_models) and len(batches) > 1:
                return [result for batch in batches for result in self._apply([batch])]
            with absorbing(models) as absorber:
                for number, found in admitted.items():
                    left = absorber.add(found.rows, batches[number].layout)
                    results[number] = Applied(
                        "applied" if all_models[0] in models else "duplicate",
                        left.num_rows,
                        len(names_of(left, batches[number].layout).unique()),
                        found.late,
                        found.deleted,
                        batches[number].skipped + found.rows.num_rows - left.num_rows,
                    )
                tables = {model.number: list(absorber.drain(model)) for model in models}
            identities = [batches[number].identity for number in fresh]
            with self.database.writing() as transaction:
                changed = transaction.epoch() != epoch or sort_out(transaction, batches)[1] != fresh
                if changed or models_without(transaction, all_models, identities) != models:
                    continue
                for number in fresh:
                    batch = batches[number]
                    SetIds.in_rows(batch.layout, batch.rows.schema).check(transaction)
                    note(transaction, batch.identity, batch.digest)
                for model in models:
                    write_states(transaction, model, tables[model.number])
            return results
        raise busy_error(self.database)

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
            digest = reader.digest.result()
            with self.database.writing(alone=True) as transaction:
                if is_known(transaction, identity, digest):
                    return DUPLICATE
                if transaction.epoch() != epoch:
                    raise busy_error(self.database)
                SetIds.in_rows(reader.layout, reader.frame.schema).check(transaction)
                note(transaction, identity, digest)
                wanted = models_without(transaction, models, [identity])
                for model in wanted:
                    for table in absorber.drain(model):
                        write_states(transaction, model, [table])
                        names |= dict.fromkeys(split_key(key)[0] for key in table.sets.to_pylist())
        rows, late, deleted, skipped = totals
        found = Applied("applied", rows, len(names), late, deleted, skipped)
        return found if models[0] in wanted else found._replace(status="duplicate")

    @checked
    def positions(self, source: str) -> dict[str, int]:
        """Return where each part of a source with offsets continues: see `Offsets`."""
        with self.database.reading() as view:
            return view.positions(source)

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
        with self.database.reading() as view:
            model = self._refresh(view)[0]
            wanted = self._pack(view, names)
            rows = view.of_sets(model.number, list(dict.fromkeys(wanted)), self._since(last))
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
        with self.database.reading() as view:
            wanted = self._pack(view, names)
            model = self._refresh(view)[0].number
            rows = view.of_sets(model, list(dict.fromkeys(wanted)), self._since(last))
        counts: dict[bytes, int] = {}
        for row in rows:
            counts[row.name] = counts.get(row.name, 0) + row.count
        return [counts.get(name, 0) for name in wanted]

    # ---- deletion --------------------------------------------------------------------------

    @checked
    def delete(self, names: Names) -> int:
        """Delete sets completely: from all models and buckets. Returns the number of elements.

        Rows of these sets that arrive in new batches count again, except those in buckets before
        that of the deletion.
        """
        with self.database.writing(alone=True) as transaction:
            found = list(dict.fromkeys(self._pack(transaction, names)))
            deletion = Deletion(transaction.next_sequence(), times.now())
            count = sum(transaction.delete_set(name, deletion) for name in sorted(found))
            transaction.begin_epoch()
        self.database.erase()
        return count

    @checked
    def expire(self) -> int:
        """Delete the buckets that are older than the window. Returns the number of states."""
        if self.bucket is None or self.window is None:
            raise InputError("the store has no window, so nothing expires.")
        horizon = first_bucket(self.window, self.bucket, times.now())
        with self.database.writing(alone=True) as transaction:
            horizon = max(horizon, horizon_of(transaction) or horizon)
            count = transaction.expire(horizon)
            transaction.set("horizon", str(horizon))
            transaction.begin_epoch()
        self.database.erase()
        return count
