"""Read first: what a reader is, and how to add a format.

A reader knows one file. It tells the columns without reading them (`schema`), how many rows there
are if that is cheap to tell (`num_rows`), where reading may begin without waste (`cuts`), and it
reads ranges of rows as Arrow record batches (`read`). No more than about a batch is in memory.

To add a format:

1. Derive from `Reader` if the file is a table, or from `columns.ColumnReader` if it holds arrays
   that can be sliced, one for each column. Name the `suffixes`, and say
   `is_folder` if such a file is a folder.
2. `_open` opens the file and sets `schema` and `num_rows` (or `columns`); `_batches` yields the
   batches; `close` lets go of the file. Whatever these raise becomes a FileError that names the file
   and the row. So does a file that ends before `num_rows`. Neither is a reader's business.
3. Import a package that not everybody has with `required`.
4. Add the class to `READERS` in `readers/__init__.py`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import pyarrow as pa

from setfold.errors import FileError, InputError, SetfoldError

BadLine = tuple[int, str]  # where a row should be, counted from 0, and why there is none


class Reader(ABC):
    """One file whose rows are elements of sets.

    Args:
        path: the file.
        text: a column that is text wherever the format itself does not tell types, so that "007"
            is not 7; None for none. Such a column need not be there.
        numbers: columns that are numbers there, whatever else stands in them.
    """

    suffixes: ClassVar[tuple[str, ...]]
    is_folder: ClassVar[bool] = False
    schema: pa.Schema
    num_rows: int | None

    def __init__(self, path: Path, text: str | None = None, numbers: Collection[str] = ()) -> None:
        self.path = path
        self.text = text
        self.numbers = numbers
        try:
            self._open()
            list(self.schema.names)  # names that are no text fail here, not later
        except SetfoldError:
            raise
        except Exception as error:  # each library has its own ways to fail on a broken file
            raise FileError(
                f"{path} cannot be opened: {_reason(error)}. It is truncated, corrupt or no "
                f"{self.suffixes[0]} file; write it anew."
            ) from error

    @abstractmethod
    def _open(self) -> None:
        """Open the file; set `schema` and `num_rows`."""

    @abstractmethod
    def _batches(
        self, columns: list[str], start: int, stop: int | None, rows: int
    ) -> Iterator[pa.RecordBatch]:
        """The rows [start, stop), in batches of at most `rows`."""

    def close(self) -> None:  # noqa: B027 - some readers hold nothing open
        """Let go of the file."""

    def cuts(self, rows: int) -> list[tuple[int, int | None]]:
        """Ranges of rows, of about `rows` each, at which reading may begin cheaply.

        Args:
            rows: how many rows a range should have.

        Returns:
            Ranges [start, stop) that cover the file; the stop is None where nobody knows it yet.
        """
        if self.num_rows is None:
            return [(0, None)]
        return [
            (start, min(start + rows, self.num_rows)) for start in range(0, self.num_rows, rows)
        ]

    def read(
        self, columns: Sequence[str], start: int = 0, stop: int | None = None, *, rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Read some columns of a range of rows.

        Args:
            columns: their names, in the order in which they are wanted.
            start: the first row.
            stop: the row after the last; None for the end of the file.
            rows: how many rows a batch has at most. Where the batches are cut depends on nothing
                but the file and these arguments.
        """
        for name in columns:
            if len(self.schema.get_all_field_indices(name)) != 1:
                raise InputError(f"{self.path} has not exactly one column {name!r}.")
        end = self._end(list(columns))
        last = end if stop is None or (end is not None and end < stop) else stop
        batches = self._batches(list(columns), start, last, rows)
        row = start
        while True:
            try:
                batch = next(batches, None)
            except SetfoldError:
                raise
            except Exception as error:  # as above
                raise FileError(
                    f"{self.path} cannot be read from row {row} on: {_reason(error)}. It is "
                    "truncated or corrupt; write it anew."
                ) from error
            if batch is None:
                break
            row += batch.num_rows
            yield batch
        if end is not None and last is not None and row < last:
            raise FileError(
                f"{self.path} ends before row {row}, but it should have {end} rows. It is truncated; "
                "write it anew."
            )

    def take_bad(self) -> list[BadLine]:
        """What stands in the place of rows but is none, of all that was passed since the last call.

        Ask after each batch: the batch begins straight after what is told then, so the numbers of its
        rows are known. What stands at the end of the file is told after one more batch, without rows.
        """
        return []

    def take_reasons(self) -> dict[int, str]:
        """Why rows since the last call hold a null where the file holds something else, by number."""
        return {}

    def _end(self, columns: list[str]) -> int | None:
        """How many rows these columns have; None where only reading tells."""
        return self.num_rows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def required(module: str, extra: str) -> Any:
    """Import a package that only some formats need.

    Args:
        module: what to import.
        extra: the extra of setfold that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"this format needs {module}, which is not installed; type: "
            f"pip install 'setfold[{extra}]'"
        ) from error


def _reason(error: Exception) -> str:
    """What a library said, in one line without a full stop."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
