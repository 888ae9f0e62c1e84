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
        texts: Columns whose values are not converted to fractions.
        numbers: Columns that hold numbers, even if no record has one.
        others: Columns that are null if no record has them.
    """

    def __init__(
        self,
        records: Sequence[bytes],
        types: Mapping[str, pa.DataType],
        texts: Sequence[str],
        numbers: Sequence[str],
        others: Sequence[str],
    ) -> None:
        self.records, self.types, self.others = records, types, others
        super().__init__(Path("the records"), texts, numbers)

    def _open(self) -> None:
        self._bad, self._reasons, self.num_rows = [], {}, None
        first = next(self._blocks(), b"")
        found = {field.name: field.type for field in infer_schema(first)}
        for name in self.number_columns:
            if found.get(name, pa.string()) == pa.string():
                found[name] = pa.float64()
        absent = dict.fromkeys(self.others, pa.null())
        self.schema = pa.schema([*{**absent, **found, **self.types}.items()])

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
        layout, parsers = intake.layout, intake.parsers()
        columns = layout.columns
        known = {name: _read_as(kind) for name, kind in intake.id_types().items()}
        texts = [name for parser in [None, *parsers] for name in columns.texts(parser)]
        numbers = [name for parser in [None, *parsers] for name in columns.numbers(parser)]
        others = [column.name for parser in parsers for column in parser.all]
        others += [] if layout.time is None else [layout.time]
        self.reader = RecordReader(records, known, texts, numbers, others)
        self.ids, self.named = columns.set_names, place_of
        super().__init__(None, layout.skip)

    def _open(self) -> None:
        found = {field.name: field.type for field in self.reader.schema}
        absent = dict.fromkeys(self.ids, pa.string())  # a set id, if no record has one
        self.schema = self.reader.schema = pa.schema([*{**absent, **found}.items()])

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


def _read_as(kind: pa.DataType) -> pa.DataType:
    """Return the type as which a set id is read."""
    return pa.string() if kind == TEXT else kind
