"""Steps from a data frame instead of shards of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from setfold.core.encoder import StreamingSetEncoder
from setfold.errors import InputError, SetfoldError
from setfold.files.columns import ColumnSpec, parsed_by
from setfold.files.engines.task import Batch, Shard, Skipped, Stamp, Step, Task
from setfold.files.inputs import Input
from setfold.files.kinds import Frame
from setfold.files.rows import rows_of
from setfold.files.tables.table import check_storable
from setfold.preprocessing.columns import columns_of

BATCH_BYTES = 1 << 27  # elements to absorb at once
MAX_BATCH_ROWS = 1 << 20
FRAME = Path("the frame")
SHARD = Shard(Input(FRAME, {}), Stamp(0, 0), 0, None, 1.0)


@dataclass(frozen=True)
class FrameTask(Task):
    """How batches of a data frame become steps."""

    leave_out: ClassVar[str] = ", or remove the rows of such sets"

    def bad_row_error(self, bad: Skipped) -> SetfoldError:
        return InputError(f"row {bad.row} (counting from 0): {bad.reason}. Remove such rows first.")

    def _qualify(self, sets: pa.Array, name: str) -> pa.Array:
        return sets

    def needed(self, schema: pa.Schema) -> Sequence[str]:
        """Return the columns that must be read.

        Raises:
            InputError: A column is missing or has the wrong type.
        """
        names = self.columns.needed(schema, {}, FRAME, self.parser)
        if self.width is not None and self.parser is None:
            self.columns.check_width(schema, self.width, FRAME)
        return names

    def batch_step(self, batch: pa.RecordBatch, first: int) -> Step:
        """Return the step of a batch of the needed columns.

        Args:
            batch: The rows.
            first: The number of the first row, for messages.

        Raises:
            InputError: A row is bad.
        """
        rows = rows_of(
            batch,
            self.columns,
            first=first,
            dtype=self.dtypes[0],
            width=self.width,
            partition={},
            parser=self.parser,
            room=self._room,
        )
        return self.step(Batch(0, first + batch.num_rows, rows), SHARD)

    def frame_steps(self, frame: Frame) -> Iterator[Step]:
        """Yield the steps of all batches of a frame.

        Raises:
            InputError: A column is missing or has the wrong type, or a row is bad.
        """
        frame.check([*self.columns.set_names, *self.columns.named])
        first = 0
        for batch in frame.batches(self.needed(frame.schema)):
            yield self.batch_step(batch, first)
            first += batch.num_rows


def frame_task(encoder: StreamingSetEncoder, columns: ColumnSpec) -> FrameTask:
    """Return how the rows of a frame become steps.

    Raises:
        InputError: Tables cannot hold what the encoder computes.
    """
    check_storable(encoder)
    parser = columns_of(encoder)
    columns = parsed_by(parser, columns)
    width = encoder.dim_in if parser is None else parser.width
    rows = min(MAX_BATCH_ROWS, BATCH_BYTES // (8 * (width or 64)))
    return FrameTask(encoder, columns, width, max(rows, 1), skip=False)
