"""Which batches a store has, by identity and content."""

from __future__ import annotations

from collections.abc import Sequence

from setfold.errors import BatchConflictError, StoreError
from setfold.live import times
from setfold.live.batches import DUPLICATE, Applied, Batch, Identity, Offsets
from setfold.live.contents import agree
from setfold.live.database import BatchRow, Database, Transaction
from setfold.live.models import LiveModel

ADDED, REMOVED = b"+", b"-"  # before the digest of a batch, in the table of batches


class ChangedError(StoreError):
    """The store was changed while an update was prepared. Nothing was applied; repeat it."""


def busy_error(database: Database) -> ChangedError:
    """Return the error about an update that must be repeated."""
    return ChangedError(
        f"{database.shown} was changed by deletions, expiry or another model while the update was "
        "prepared. Nothing was applied; repeat the update."
    )


def is_known(view: Transaction, identity: Identity | Offsets, digest: bytes) -> bool:
    """Whether a batch was applied before.

    Raises:
        BatchConflictError: It was, with other rows.
    """
    if isinstance(identity, Offsets):
        return identity.is_known(view.positions(identity.source))
    row = view.find_batches([identity]).get(identity)
    if row is not None:
        check_digest(row, ADDED + digest)
    return row is not None


def sort_out(
    view: Transaction, batches: Sequence[Batch]
) -> tuple[list[Applied | Exception], list[int]]:
    """Return a result for each batch that was applied before, and the numbers of the others."""
    named = [batch.identity for batch in batches if isinstance(batch.identity, Identity)]
    known = view.find_batches(named)
    positions: dict[str, dict[str, int]] = {}
    results: list[Applied | Exception] = [DUPLICATE] * len(batches)
    fresh: list[int] = []
    for number, batch in enumerate(batches):
        identity = batch.identity
        try:
            if isinstance(identity, Offsets):
                if identity.source not in positions:
                    positions[identity.source] = view.positions(identity.source)
                if not identity.is_known(positions[identity.source]):
                    fresh.append(number)
                    after = {str(part): last for part, (_, last) in identity.ranges.items()}
                    positions[identity.source] |= after
            elif identity in known:
                check_digest(known[identity], ADDED + batch.digest)
            else:
                known[identity] = BatchRow(*identity, ADDED + batch.digest, 0, 0)
                fresh.append(number)
        except BatchConflictError as error:
            results[number] = error
    return results, fresh


def note(
    transaction: Transaction, identity: Identity | Offsets, digest: bytes, kind: bytes = ADDED
) -> None:
    """Note that a batch was applied.

    Raises:
        BatchConflictError: The offsets of a batch do not continue where they should.
    """
    if isinstance(identity, Identity):
        row = BatchRow(*identity, kind + digest, transaction.next_sequence(), times.now())
        transaction.add_batches([row])
        return
    for part, offsets in sorted(identity.ranges.items(), key=str):
        if not transaction.move_position(identity.source, str(part), offsets, times.now()):
            raise identity.conflict(str(part), transaction.positions(identity.source)[str(part)])


def check_digest(row: BatchRow, digest: bytes) -> None:
    """Raise BatchConflictError unless a batch that was applied before had the same rows."""
    if row.digest[:1] != digest[:1] or not agree(row.digest[1:], digest[1:]):
        raise BatchConflictError(
            f"the batch {row.key} of {row.source} was applied before, with other rows. Give new "
            "rows an identity of their own."
        )


def models_without(
    view: Transaction, models: Sequence[LiveModel], identities: Sequence[Identity | Offsets]
) -> list[LiveModel]:
    """Return the models to which none of some batches was applied alone, as history."""
    has_fills = bool(view.run("SELECT 1 FROM fills LIMIT 1"))
    named = [one for one in identities if isinstance(one, Identity)] if has_fills else []
    filled = {number for identity in named for number in view.filled(*identity)}
    return [model for model in models if model.number not in filled]
