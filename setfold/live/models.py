"""The models of a store: every model is updated, and one of them is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path

import pyarrow as pa
from torch import nn

from setfold.core.encoder import StreamingSetEncoder
from setfold.core.models import load
from setfold.errors import DescriptionError, StateMismatchError
from setfold.files.columns import ColumnSpec
from setfold.files.engines.frames import FrameTask, frame_task
from setfold.files.request import cast_encoder, prepare_encoder, read_by
from setfold.files.states import model_from_bytes, model_to_bytes
from setfold.live.database import ModelRow
from setfold.live.states import StateCodec


class LiveModel:
    """A model of a store, with its encoder.

    Args:
        row: The model in the database.
        encoder: The same, in evaluation mode.
    """

    def __init__(self, row: ModelRow, encoder: StreamingSetEncoder) -> None:
        self.row, self.encoder = row, encoder
        self.codec = StateCodec(encoder)
        self.task = lru_cache(maxsize=32)(self._task)
        self.needed = lru_cache(maxsize=32)(self._needed)
        self.state_nbytes = encoder.state_nbytes
        if self.codec.digest.hex() != row.digest:
            raise StateMismatchError(
                "the states of this store were computed by another model. Open it without a model "
                "to use its own, or add the new model beside it (setfold live upgrade)."
            )

    @property
    def number(self) -> int:
        """The number of the model in the store."""
        return self.row.number

    def as_row(self, row: ModelRow) -> LiveModel:
        """Return the same model after its row has changed."""
        found = copy(self)
        found.row = row
        return found

    @cached_property
    def readers(self) -> dict[bool, StreamingSetEncoder]:
        """What reads states out: with the head of the model, or without it."""
        return {head: read_by(self.encoder, head) for head in (False, True)}

    def _task(self, columns: ColumnSpec) -> FrameTask:
        """Return how rows with these columns become states."""
        return frame_task(self.encoder, columns)

    def _needed(self, columns: ColumnSpec, schema: pa.Schema) -> list[str]:
        """Return the columns of some rows that must be read."""
        return list(self.task(columns).needed(schema))


def encoder_of(
    model: nn.Module | str | Path, allow: Iterable[str] = (), dtype: str | None = None
) -> StreamingSetEncoder:
    """Return the encoder of a model, or of the file of a model, in evaluation mode."""
    found = model if isinstance(model, nn.Module) else load(model, allow=allow)
    return cast_encoder(prepare_encoder(found), dtype)


def new_row(number: int, encoder: StreamingSetEncoder, *, active: bool, since: int) -> ModelRow:
    """Return a model for the database."""
    content = model_to_bytes(encoder) or b""  # empty if it cannot be saved
    return ModelRow(number, StateCodec(encoder).digest.hex(), content, active, since)


def open_models(
    rows: Sequence[ModelRow],
    given: StreamingSetEncoder | None,
    allow: Iterable[str],
    before: Sequence[LiveModel] = (),
) -> list[LiveModel]:
    """Return the models of a store, the active one first.

    Args:
        rows: The models in the database, the active one first.
        given: The model that was active when the user has passed it.
        allow: Import paths of own classes that the models may use.
        before: The models that were opened before; those that are still there are kept.

    Raises:
        StateMismatchError: The model that was passed is not the active one.
        DescriptionError: A model cannot be loaded.
    """
    known = {_key(model.row): model for model in before}
    found = []
    for row in rows:
        if _key(row) in known:
            found.append(known[_key(row)].as_row(row))
        elif given is not None and row.active and not before:
            found.append(LiveModel(row, given))
        elif not row.content:
            raise DescriptionError(
                "the store does not contain its model, because the model cannot be saved. Pass the "
                "model when you open the store."
            )
        else:
            found.append(LiveModel(row, prepare_encoder(model_from_bytes(row.content, allow))))
    return found


def _key(row: ModelRow) -> tuple[int, str, bytes]:
    """Return what stays the same when another model becomes active."""
    return row.number, row.digest, row.content
