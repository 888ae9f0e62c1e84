"""Create and open stores of live sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from setfold.core.arguments import checked
from setfold.errors import InputError
from setfold.live.database import Database
from setfold.live.models import encoder_of, new_row
from setfold.live.sets import LiveSets
from setfold.live.sqlite import SqliteDatabase
from setfold.live.times import parse_duration


@checked
def create(
    url: str | Path,
    model: nn.Module | str | Path,
    *,
    bucket: str | None = None,
    window: str | None = None,
    dtype: str | None = None,
    allow: Iterable[str] = (),
) -> LiveSets:
    """Create a store of live sets, and open it.

    Args:
        url: The path of a SQLite file, or the URL of a PostgreSQL database, "postgresql://...".
        model: A streaming set encoder, or the file of one. The store keeps a copy of it.
        bucket: Keep the state of a set for each bucket of time, such as "1d", so that recent
            elements can be read alone and old ones expire.
        window: When buckets expire, such as "30d"; a multiple of `bucket`. If None, they never do.
        dtype: Compute in "float32" or "float64". If None, in the dtype of the model.
        allow: Import paths of your own classes that the file of the model may use.

    Raises:
        StoreError: There is a store already, or the database cannot be used.

    >>> import pandas, setfold, tempfile
    >>> rows = pandas.DataFrame({"user": ["ann", "bob", "ann"], "x": [1.0, 2.0, 3.0]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with create(f"{folder}/live.db", setfold.Pool(1, "mean")) as sets:
    ...         print(sets.update(rows, set="user", batch=("orders", 1)).status)
    ...         print(sets.update(rows, set="user", batch=("orders", 1)).status)
    ...         print(sets.encode(["ann", "bob"]).tolist())
    applied
    duplicate
    [[2.0], [2.0]]
    """
    encoder = encoder_of(model, allow, dtype)
    size = None if bucket is None else parse_duration(bucket)
    kept = None if window is None else parse_duration(window)
    if kept is not None and (size is None or kept % size):
        raise InputError(
            f"the window must be a multiple of the buckets; got {window!r} and {bucket!r}."
        )
    with _closing_on_error(database_of(url)) as database:
        database.create({"bucket": size, "window": kept}, new_row(1, encoder, active=True, since=0))
        return LiveSets(database, encoder, allow)


@checked
def open(
    url: str | Path, *, model: nn.Module | str | Path | None = None, allow: Iterable[str] = ()
) -> LiveSets:
    """Open a store of live sets.

    Args:
        url: As for `create`.
        model: The model that computed the states; its head may differ. If None, the model in the
            store.
        allow: Import paths of your own classes that the model may use.

    Raises:
        StoreError: There is no store, or the database cannot be used.
        StateMismatchError: Another model computed the states.
    """
    given = None if model is None else encoder_of(model, allow)
    with _closing_on_error(database_of(url)) as database:
        database.check_version()
        return LiveSets(database, given, allow)


@contextmanager
def _closing_on_error(database: Database) -> Iterator[Database]:
    try:
        yield database
    except BaseException:
        database.close()
        raise


def database_of(url: str | Path) -> Database:
    """Return the database that a URL names."""
    text = str(url)
    if text.startswith(("postgresql://", "postgres://")):
        from setfold.live.postgres import PostgresDatabase

        return PostgresDatabase(text)
    if "://" in text:
        raise InputError(f"expected the path of a file, or postgresql://...; got {text!r:.80}.")
    return SqliteDatabase(text)
