"""Which batches a store has, by identity and content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    view: Transaction, batches: Sequence[Batch], done: Mapping[int, Applied]
) -> tuple[list[Applied | Exception], list[int]]:
    """Return a result for each batch that was applied before, and the numbers of the others.

    Args:
        view: A view of the store.
        batches: The batches.
        done: What became of batches of this call, by sequence number: those whose commit was lost
            on the way back were not applied by others.
    """
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
                results[number] = done.get(known[identity].sequence, DUPLICATE)
            else:
                known[identity] = BatchRow(*identity, ADDED + batch.digest, -1, 0)
                fresh.append(number)
        except BatchConflictError as error:
            results[number] = error
    return results, fresh


def note(
    transaction: Transaction,
    batches: Sequence[tuple[Identity | Offsets, bytes]],
    kind: bytes = ADDED,
) -> list[int | None]:
    """Note that batches are applied.

    Args:
        transaction: The transaction that applies them.
        batches: Their identities, and the digests of their rows.
        kind: Whether the rows are added or removed.

    Returns:
        Their sequence numbers; None for those with offsets.

    Raises:
        ChangedError: Another process has applied one of them meanwhile.
        BatchConflictError: The offsets of a batch do not continue where they should.
    """
    named = sum(isinstance(identity, Identity) for identity, _ in batches)
    numbers, now = iter(transaction.next_sequences(named) if named else ()), times.now()
    found: list[int | None] = []
    rows: list[BatchRow] = []
    moves: list[tuple[str, str, tuple[int, int], Offsets]] = []
    for identity, digest in batches:
        if isinstance(identity, Identity):
            sequence = next(numbers)
            found.append(sequence)
            rows.append(BatchRow(*identity, kind + digest, sequence, now))
        else:
            found.append(None)
            parts = identity.ranges.items()
            moves += [(identity.source, str(part), own, identity) for part, own in parts]
    if rows and transaction.add_batches(rows) != len(rows):
        raise ChangedError("another process has applied this batch meanwhile. Repeat the update.")
    for source, part, offsets, identity in sorted(moves, key=lambda move: move[:3]):
        if not transaction.move_position(source, part, offsets, now):
            raise identity.conflict(part, transaction.positions(source)[part])
    return found


def check_fills(view: Transaction, identity: Identity | Offsets, digest: bytes) -> None:
    """Raise BatchConflictError if a batch was filled in as history before, with other rows.

    Args:
        view: A view of the store.
        identity: The identity of the batch.
        digest: The digest of its rows, after ADDED or REMOVED.
    """
    if isinstance(identity, Identity):
        for filled in view.filled(*identity).values():
            if filled is not None:
                check_digest(BatchRow(*identity, filled, -1, 0), digest)


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
