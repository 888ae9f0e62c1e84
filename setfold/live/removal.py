"""Removing single elements from the sets of a store."""

from __future__ import annotations

from collections.abc import Sequence

from setfold.core.arguments import checked
from setfold.files.kinds import open_frame
from setfold.files.request import make_columns
from setfold.live.absorb import absorb_pieces, absorbing
from setfold.live.batches import DUPLICATE, SMALL_ROWS, Applied, Identity, Layout
from setfold.live.ledger import REMOVED, busy_error, check_digest, check_fills, note
from setfold.live.merging import check_removable, subtract_states
from setfold.live.names import SetIds
from setfold.live.opened import OpenStore
from setfold.live.states import split_key


class Removing(OpenStore):
    """The part of `LiveSets` that removes elements."""

    @checked
    def remove(
        self,
        rows: object,
        *,
        set: str | Sequence[str],
        batch: Sequence[str | int],
        features: str | Sequence[str] | None = None,
        time: str | None = None,
    ) -> Applied:
        """Remove elements that were added before, once: as `update`, in the other direction.

        States keep no elements, so nothing checks that these were added. Pass the same values as
        then, and the same times. A set without any element left does not exist any more.
        `delete` removes whole sets, from any model.

        The arguments are those of `update`. The batch needs an identity of its own.

        Raises:
            NotRemovableError: A model keeps a maximum or another statistic that cannot remove.
            InputError: A set has fewer elements, a row is bad, or a column is missing.
            BatchConflictError: The batch was applied before, with other rows.
            StoreError: The database cannot be used, or the store was changed meanwhile.
        """
        identity = Identity.of(batch)
        layout = Layout(make_columns(set, features, False, None), time, self.bucket)
        frame = open_frame(rows, SMALL_ROWS, "remove: rows")
        with self.database.reading() as view:
            epoch, models = view.epoch(), self._refresh(view)
        for model in models:
            check_removable(model)
        reader = self._read(frame, models, layout)
        names: dict[bytes, None] = {}
        with absorbing(models) as absorber:
            totals = absorb_pieces(absorber, reader, reader, self.database.reading)
            digest = reader.digest.result()
            tables = {model.number: list(absorber.drain(model)) for model in models}
        with self.database.writing() as transaction:
            known = transaction.find_batches([identity]).get(identity)
            if known is not None:
                check_digest(known, REMOVED + digest)
                return DUPLICATE
            if transaction.epoch() != epoch:
                raise busy_error(self.database)
            check_fills(transaction, identity, REMOVED + digest)
            ids = SetIds.in_rows(layout, frame.schema)
            ids.check(transaction)
            note(transaction, [(identity, digest)], REMOVED)
            emptied = None
            for model in models:  # the active one first
                own = tables[model.number]
                found = subtract_states(transaction, model, own, ids.show, emptied)
                emptied = found if emptied is None else emptied
                for table in own:
                    names |= dict.fromkeys(split_key(key)[0] for key in table.sets.to_pylist())
        return Applied("applied", totals.rows, len(names), totals.late, totals.deleted)
