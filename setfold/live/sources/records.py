"""Records of a stream, each a JSON object, as the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from setfold.files.ids import TEXT
from setfold.files.kinds import regrouped
from setfold.files.readers.lines import JsonReader, infer_schema
from setfold.live.sources.intake import Intake, SourceFrame

BLOCK_RECORDS = 1 << 14  # records that are parsed at a time


class RecordReader(JsonReader):
    """Parses records as `JsonReader` parses the lines of a file.

    Args:
        records: The records, none of them blank.
        types: The types of columns that are known already.
        absent: The types of columns that no record has.
    """

    def __init__(
        self,
        records: Sequence[bytes],
        types: Mapping[str, pa.DataType],
        absent: Mapping[str, pa.DataType],
    ) -> None:
        self.records, self.types, self.absent = records, types, absent
        super().__init__(Path("the records"))

    def _open(self) -> None:
        self._bad, self._reasons, self.num_rows = [], {}, None
        first = next(self._blocks(), b"")
        found = {field.name: field.type for field in infer_schema(first)}
        self.schema = pa.schema([*{**self.absent, **found, **self.types}.items()])

    def _blocks(self) -> Iterator[bytes]:
        for start in range(0, len(self.records), BLOCK_RECORDS):
            some = self.records[start : start + BLOCK_RECORDS]
            # A line break in a record is a space, as everywhere in JSON.
            yield b"\n".join(record.replace(b"\n", b" ").replace(b"\r", b" ") for record in some)


class RecordFrame(SourceFrame):
    """Records as rows.

    A column that no record has is null, so that a batch of incomplete records is as bad as each of
    them.

    Args:
        records: The records, none of them blank.
        place_of: Returns where a record is, for messages.
        intake: What takes the rows.
    """

    def __init__(
        self, records: Sequence[bytes], place_of: Callable[[int], str], intake: Intake
    ) -> None:
        layout, types = intake.layout, intake.id_types()
        columns = layout.columns
        needed = [*columns.named, *([] if layout.time is None else [layout.time])]
        needed += [column.name for parser in intake.parsers() for column in parser.all]
        absent = dict.fromkeys(needed, pa.null()) | dict.fromkeys(columns.set_names, pa.string())
        types = {name: pa.string() if kind == TEXT else kind for name, kind in types.items()}
        self.reader, self.named = RecordReader(records, types, absent), place_of
        super().__init__(None, layout.skip)

    def _open(self) -> None:
        self.schema = self.reader.schema

    def place_of(self, row: int) -> str:
        return self.named(row)

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield from regrouped(self._read(names), self.rows)

    def _read(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for batch in self.reader.read(names, rows=self.rows):
            for bad in self.reader.take_bad_rows():
                self.refuse(*bad)
            self.reasons |= self.reader.take_reasons()
            yield batch
