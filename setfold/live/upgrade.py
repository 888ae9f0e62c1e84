"""A new model for a store: added beside the active one, filled with history, then switched to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from setfold.core.arguments import checked
from setfold.errors import DescriptionError, InputError
from setfold.files.kinds import Frame, open_frame
from setfold.files.request import dtype_of, make_columns
from setfold.files.tables.table import StateTable
from setfold.live.absorb import absorb_pieces, absorbing
from setfold.live.batches import DUPLICATE, SMALL_ROWS, Applied, Identity, Layout
from setfold.live.database import BatchRow, Transaction
from setfold.live.ledger import ADDED, REMOVED, busy_error, check_digest, check_fills
from setfold.live.merging import check_removable, subtract_states, write_states
from setfold.live.models import LiveModel, encoder_of, new_row
from setfold.live.names import SetIds
from setfold.live.opened import OpenStore
from setfold.live.states import join_key, split_key

BEFORE_ALL = 0  # the sequence number of history that the store has never seen


class StoredModel(NamedTuple):
    """A model of a store.

    Attributes:
        number: Its number in the store.
        kind: The name of its class.
        dtype: The dtype in which it computes.
        digest: The digest of the weights that shape states.
        active: Whether it is the one that is read.
        since: The sequence number of the last batch before it was added.
    """

    number: int
    kind: str
    dtype: str
    digest: str
    active: bool
    since: int

    @classmethod
    def of(cls, model: LiveModel) -> StoredModel:
        """Describe a model."""
        row, encoder = model.row, model.encoder
        kind = type(encoder).__name__
        return cls(row.number, kind, dtype_of(encoder), row.digest, row.active, row.since)


class Upgrading(OpenStore):
    """The part of `LiveSets` that changes models."""

    def models(self) -> list[StoredModel]:
        """Return the models of the store, the active one first."""
        with self.database.reading() as view:
            return [StoredModel.of(model) for model in self._refresh(view)]

    @checked
    def add_model(self, model: nn.Module | str | Path, *, dtype: str | None = None) -> int:
        """Put a model beside the active one. From now on, both are updated.

        The new model has no sets at first: `fill` adds history to it. If it differs from a model of
        the store in its head only, it gets the states of that one, and there is nothing to fill.

        Args:
            model: A streaming set encoder, or the file of one.
            dtype: As for `create`.

        Returns:
            Its number in the store.

        Raises:
            DescriptionError: The model cannot be saved, so the store cannot keep it.
        """
        encoder = encoder_of(model, self.allow, dtype)
        new = new_row(0, encoder, active=False, since=0)
        if not new.content:
            raise DescriptionError(
                f"{type(encoder).__name__} cannot be saved, so the store cannot keep it beside "
                "another model. Call setfold.save to see why."
            )
        with self.database.writing(alone=True) as transaction:
            rows = transaction.models()
            new = new._replace(number=max(row.number for row in rows) + 1)
            twins = [row for row in rows if row.digest == new.digest]
            for row in twins:
                if row.content == new.content:
                    raise InputError(f"the store has this model already, as number {row.number}.")
            twin = twins[0] if twins else None
            since = transaction.next_sequence() if twin is None else twin.since
            transaction.add_model(new._replace(since=since))
            if twin is not None:
                transaction.copy_states(twin.number, new.number)
            transaction.begin_epoch()
        return new.number

    @checked
    def fill(
        self,
        rows: object,
        *,
        set: str | Sequence[str],
        batch: Sequence[str | int],
        features: str | Sequence[str] | None = None,
        time: str | None = None,
        skip_errors: bool = False,
    ) -> Applied:
        """Add history to the models that are not active, once.

        A batch that the store got after a model was added is in that model already. One that it got
        before must have the same rows. One that it never got is added to these models only. What
        was removed by `remove` is removed from these models, too: fill such a batch after those
        whose rows it removes.

        The arguments are those of `update`.

        Raises:
            InputError: All models are active, a row is bad, or a column is missing.
            BatchConflictError: The store got the batch before, with other rows.
            StoreError: The database cannot be used, or the store was changed meanwhile.
        """
        columns = make_columns(set, features, False, None)
        layout = Layout(columns, time, self.bucket, skip_errors)
        return self._fill(open_frame(rows, SMALL_ROWS, "fill: rows"), Identity.of(batch), layout)

    def _fill(self, frame: Frame, identity: Identity, layout: Layout) -> Applied:
        """Add the rows of a frame to the models that are not active."""
        with self.database.reading() as view:
            epoch, (active, *models) = view.epoch(), self._refresh(view)
            before = view.find_batches([identity]).get(identity)
        if not models:
            raise InputError(
                "the store has no model besides the active one. Add the new model first."
            )
        reader = self._read(frame, models, layout)
        sequence = BEFORE_ALL if before is None else before.sequence
        kind = ADDED if before is None else before.digest[:1]
        names: dict[bytes, None] = {}
        with absorbing(models) as absorber:
            totals = absorb_pieces(absorber, reader, reader, self.database.reading, sequence)
            with self.database.writing(alone=True) as transaction:
                known = transaction.find_batches([identity]).get(identity)
                if transaction.epoch() != epoch or known != before:
                    raise busy_error(self.database)
                digest = kind + reader.digest.result()
                if known is not None:
                    check_digest(known, digest)
                check_fills(transaction, identity, digest)
                ids = SetIds.in_rows(layout, frame.schema)
                ids.check(transaction)
                lacking = _models_lacking(transaction, models, identity, known)
                for model in lacking:
                    for table in absorber.drain(model):
                        if kind == REMOVED:
                            check_removable(model)
                            empty = _keys_without(transaction, active, table)
                            subtract_states(transaction, model, [table], ids.show, empty)
                        else:
                            write_states(transaction, model, [table])
                        names |= dict.fromkeys(split_key(key)[0] for key in table.sets.to_pylist())
                    transaction.add_fill(model.number, *identity, digest)
        if not lacking:
            return DUPLICATE
        rows, late, deleted, skipped = totals
        return Applied("applied", rows, len(names), late, deleted, skipped)

    @checked
    def switch(self, number: int) -> None:
        """Make another model the active one, for all processes at once.

        The model before stays and is still updated. So the way back is to switch again.
        """
        with self.database.writing(alone=True) as transaction:
            _check_number(transaction, number)
            transaction.activate(number)
            transaction.begin_epoch()

    @checked
    def drop_model(self, number: int) -> None:
        """Remove a model and its states. It must not be the active one."""
        with self.database.writing(alone=True) as transaction:
            if _check_number(transaction, number):
                raise InputError(f"model {number} is active. Switch to another one first.")
            transaction.drop_model(number)
            transaction.begin_epoch()
        self.database.erase()


def _check_number(view: Transaction, number: int) -> bool:
    """Return whether a model is active, or raise InputError if no model has that number."""
    rows = {row.number: row for row in view.models()}
    if number not in rows:
        known = ", ".join(map(str, sorted(rows)))
        raise InputError(f"the store has no model {number}; it has {known}.")
    return rows[number].active


def _models_lacking(
    view: Transaction, models: Sequence[LiveModel], identity: Identity, known: BatchRow | None
) -> list[LiveModel]:
    """Return the models that a batch was not applied to."""
    filled = view.filled(*identity)
    return [
        model
        for model in models
        if model.number not in filled and (known is None or known.sequence <= model.row.since)
    ]


def _keys_without(view: Transaction, model: LiveModel, table: StateTable) -> set[bytes]:
    """Return the keys of a table that are empty in a model."""
    keys = table.sets.to_pylist()
    rows = view.fetch(model.number, [split_key(key) for key in keys])
    return {*keys} - {join_key(row.name, row.bucket) for row in rows}
