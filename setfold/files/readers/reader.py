"""The base class of readers. Read this first to add a format.

A reader reads one file. It provides the columns without reading their content (`schema`), the
number of rows if that is cheap to determine (`num_rows`), the ranges of rows that are efficient to
read (`cuts`), and the rows of a range as Arrow record batches (`read`). Only about one batch is in
memory at a time.

To add a format:

1. Derive from `Reader` if the file is a table, or from `column.ColumnReader` if it holds arrays
   that can be sliced, one for each column. Set `suffixes`, and `is_folder` if such a file is a
   folder.
2. Implement `_open`, which opens the file and sets `schema` and `num_rows`, and `_batches`, which
   yields the batches. For a `ColumnReader`, implement `_find` instead. Override `close` if the file
   stays open. The base class turns any exception into a FileError with the file and the row, and
   raises one if a file ends before `num_rows`. Never open another file than the one that was
   passed, never run code from a file, and never return values that are not in it.
3. Import optional packages with `import_optional`.
4. Add the class to `READERS` in `setfold/files/inputs.py`.
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

import pyarrow as pa

from setfold.errors import FileError, InputError, SetfoldError

MAX_CUTS = 1 << 14  # of one file
IN_ROOT = re.compile(r"(?P<file>.*\.root):(?P<tree>.+)", re.IGNORECASE)
MAX_NEAR = 12  # names that may be meant
PACKAGES = {  # by extra, as in pyproject.toml
    "hdf5": "h5py",
    "zarr": "zarr",
    "las": "'laspy[lazrs]'",
    "mesh": "trimesh",
    "root": "uproot awkward",
    "kafka": "confluent-kafka",
    "train": "scikit-learn scipy matplotlib",
}


class BadRow(NamedTuple):
    """A row that cannot be used, and why."""

    row: int  # counting from 0
    reason: str


class Reader(ABC):
    """A file whose rows are elements of sets.

    If `holds_sets`, rows are sets: their lists of variable length are exploded without being asked.

    Args:
        path: The file.
        text_columns: Columns to read as text in formats without types, so that "007" is not 7. They
            may be missing from the file.
        number_columns: Columns to read as numbers in formats without types. Other cells are null.
    """

    suffixes: ClassVar[tuple[str, ...]]
    is_folder: ClassVar[bool] = False
    holds_sets: ClassVar[bool] = False
    schema: pa.Schema
    num_rows: int | None

    def __init__(
        self,
        path: Path,
        text_columns: Collection[str] = (),
        number_columns: Collection[str] = (),
    ) -> None:
        self.path = path
        self.text_columns = text_columns
        self.number_columns = number_columns
        try:
            self._open()
            list(self.schema.names)  # names that are not valid text fail here, not later
        except SetfoldError:
            raise
        except BaseException as error:  # each library raises its own errors for a corrupt file
            if not is_of_library(error):
                raise
            raise FileError(
                f"cannot open {path}: {_format_error(error)}. It is truncated, corrupt or not what "
                "its suffix says. Write it again."
            ) from error

    @abstractmethod
    def _open(self) -> None:
        """Open the file, and set `schema` and `num_rows`."""

    @abstractmethod
    def _batches(
        self, columns: list[str], start: int, stop: int | None, rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows [start, stop) in batches of at most `rows`."""

    def close(self) -> None:  # noqa: B027 - some readers keep nothing open
        """Close the file."""

    def cuts(self, rows: int) -> list[tuple[int, int | None]]:
        """Split the file into ranges of rows that are efficient to read.

        Args:
            rows: The approximate number of rows of a range. It is larger if there would be very
                many ranges: a header may list any number of rows.

        Returns:
            Ranges [start, stop) that cover the file; stop is None if it is not known.
        """
        if self.num_rows is None:
            return [(0, None)]
        rows = max(rows, -(-self.num_rows // (MAX_CUTS * rows)) * rows)
        return [
            (start, min(start + rows, self.num_rows)) for start in range(0, self.num_rows, rows)
        ]

    def read(
        self, columns: Sequence[str], start: int = 0, stop: int | None = None, *, rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Read some columns of a range of rows.

        Args:
            columns: The names of the columns, in the order of the result.
            start: The first row.
            stop: The row after the last; None for the end of the file.
            rows: The maximum number of rows of a batch. Batch boundaries depend on the file and on
                these arguments only.
        """
        for name in columns:
            if len(self.schema.get_all_field_indices(name)) != 1:
                count = len(self.schema.get_all_field_indices(name))
                raise InputError(f"expected one column {name!r} in {self.path}; got {count}.")
        end = self._end(list(columns))
        last = end if stop is None or (end is not None and end < stop) else stop
        batches = self._batches(list(columns), start, last, rows)
        row = start
        while True:
            try:
                batch = next(batches, None)
            except SetfoldError:
                raise
            except BaseException as error:  # as above
                if not is_of_library(error):
                    raise
                raise FileError(
                    f"cannot read {self.path} from row {row} on: {_format_error(error)}. It is "
                    "truncated or corrupt. Write it again."
                ) from error
            if batch is None:
                break
            row += batch.num_rows
            yield batch
        if end is not None and last is not None and row < last:
            raise FileError(
                f"{self.path} ends before row {row}; expected {end} rows. It is truncated. Write "
                "it again."
            )

    def check(self, columns: Sequence[str]) -> None:  # noqa: B027 - most formats store all or fail
        """Raise an error if some of the columns cannot be read together.

        Raises:
            FileError: One of them is not stored completely in this file.
            InputError: They differ in their number of rows.
        """

    def block_bytes(self, columns: Sequence[str]) -> int:
        """Return the size of the rows of some columns that can only be read together."""
        return 0

    def take_bad_rows(self) -> list[BadRow]:
        """Return the rows that could not be parsed since the last call, and forget them.

        Call this after each batch. The bad rows come directly before the rows of the batch, so the
        row numbers of the batch are known. Bad rows at the end of the file are followed by an
        empty batch.
        """
        return []

    def take_reasons(self) -> dict[int, str]:
        """Return, by row number, why rows since the last call have nulls that the file has not."""
        return {}

    def _end(self, columns: list[str]) -> int | None:
        """Return the number of rows of some columns; None if it is not known before reading."""
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


def split_tree(path: Path) -> tuple[Path, str | None]:
    """Return the file and the tree of a path such as file.root:Events; None for a plain path.

    >>> split_tree(Path("a/file.root:folder/Events"))[1]
    'folder/Events'
    """
    found = IN_ROOT.fullmatch(str(path))
    if found is None or path.exists():
        return path, None
    return Path(found["file"]), found["tree"]


def width_of(kind: pa.DataType) -> int:
    """Return the bytes of a value; for text and lists of any length, those of an offset.

    >>> width_of(pa.list_(pa.float32(), 3)), width_of(pa.string())
    (12, 8)
    """
    if pa.types.is_fixed_size_list(kind):
        return kind.list_size * width_of(kind.value_type)
    try:
        return max(1, kind.bit_width // 8)
    except ValueError:
        return 8


def suggest(name: str, names: Sequence[str]) -> str:
    """Return which of some names may be meant by a name that is not one of them, and all of them.

    >>> suggest("jet", ["MET_pt", "Jet_pt", "Jet_eta"])
    " Did you mean 'Jet_pt' or 'Jet_eta'? It has 'MET_pt', 'Jet_pt', 'Jet_eta'."
    """
    text = name.lower()
    within = [other for other in names if text in other.lower()]
    within.sort(key=lambda other: not other.lower().startswith(text))
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    found = list(dict.fromkeys([*near, *within]))[:MAX_NEAR]
    meant = f" Did you mean {' or '.join(map(repr, found))}?" if found else ""
    return f"{meant} It has {listed(names)}."


def listed(names: Sequence[str], most: int = 20) -> str:
    """Return some names as a list in a sentence."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more if names else "no columns"


def import_optional(module: str, extra: str) -> Any:
    """Import an optional package.

    Args:
        module: The module to import.
        extra: The extra of setfold that contains it. The message names the packages themselves, so
            that the advice holds however setfold was installed.

    Raises:
        InputError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"this needs the package {module}, which is not installed. Run: "
            f"pip install {PACKAGES[extra]}"
        ) from error


def is_of_library(error: BaseException) -> bool:
    """Whether a library raised an error. Panics of Rust are not derived from Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _format_error(error: BaseException) -> str:
    """Return the message of an error in one line, without a full stop."""
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
