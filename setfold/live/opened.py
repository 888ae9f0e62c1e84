"""An open store: its database, its models, and the ids of its sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from setfold.core.encoder import StreamingSetEncoder
from setfold.errors import InputError
from setfold.files.kinds import Frame
from setfold.live import times
from setfold.live.absorb import needed_columns
from setfold.live.batches import Layout, RowReader
from setfold.live.database import Database, Transaction
from setfold.live.models import LiveModel, open_models
from setfold.live.names import Names, SetIds, pack_names
from setfold.live.retry import repeated
from setfold.live.times import first_bucket, parse_duration


class OpenStore:
    """An open store.

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
        self._opened = (-1, list[LiveModel]())  # the epoch, and its models
        with database.reading() as view:
            self._refresh(view)
            settings = view.settings()
        self.bucket = int(settings["bucket"]) if "bucket" in settings else None
        self.window = int(settings["window"]) if "window" in settings else None

    def __enter__(self) -> Self:
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
        """Return the models, the active one first."""
        with self.database.reading() as view:
            return self._refresh(view)

    @property
    def ids(self) -> dict[str, str] | None:
        """The columns of a set id, with their types; None before the first update."""
        with self.database.reading() as view:
            found = SetIds.of(view)
        return None if found is None else dict(zip(*found, strict=True))

    def _refresh(self, view: Transaction) -> list[LiveModel]:
        """Return the models, the active one first; they are loaded again if they have changed."""
        epoch, (known, models) = view.epoch(), self._opened
        if epoch != known:
            rows = view.models()
            if [model.row for model in models] != rows:
                models = open_models(rows, self.given, self.allow, models)
            self._opened = (epoch, models)
        return models

    def _read(self, frame: Frame, models: Sequence[LiveModel], layout: Layout) -> RowReader:
        """Return what reads the columns of a frame that some models need."""
        frame.check([*layout.columns.set_names, *layout.columns.named])
        return RowReader(frame, needed_columns(models, layout, frame.schema), layout)

    def _pack(self, view: Transaction, names: Names) -> list[bytes]:
        """Return names of sets as they are in the database."""
        ids = SetIds.of(view)
        if ids is None:  # nothing was ever added
            return [b""] * len(names)
        return pack_names(names, ids.kinds)

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

    @contextmanager
    def _snapshot(self) -> Iterator[Transaction]:
        """Return a context with a consistent view that may be open for long.

        It has connections of its own, so that this thread can use the store meanwhile.
        """
        database = type(self.database)(self.database.url)
        try:
            with database.reading() as view:
                yield view
        finally:
            database.close()
