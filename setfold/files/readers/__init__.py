"""Readers of files whose rows are elements of sets, one for each format."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from setfold.errors import FileError, InputError
from setfold.files.readers.arrays import NpyReader, NpzReader
from setfold.files.readers.clouds import LasReader, MeshReader
from setfold.files.readers.events import RootReader
from setfold.files.readers.reader import Reader
from setfold.files.readers.stores import Hdf5Reader, TorchReader, ZarrReader
from setfold.files.readers.tables import ArrowReader, ParquetReader
from setfold.files.readers.text import CsvReader

__all__ = ["READERS", "Reader", "open_reader", "reader_of", "suffixes"]

READERS: tuple[type[Reader], ...] = (
    ParquetReader,
    ArrowReader,
    CsvReader,
    NpyReader,
    NpzReader,
    Hdf5Reader,
    ZarrReader,
    TorchReader,
    LasReader,
    MeshReader,
    RootReader,
)


def suffixes() -> list[str]:
    """All suffixes that are known."""
    return [suffix for reader in READERS for suffix in reader.suffixes]


def reader_of(path: Path) -> type[Reader] | None:
    """The class that reads such a file, by its suffix; None if there is none.

    >>> reader_of(Path("a/b.PARQUET")).__name__
    'ParquetReader'
    """
    name = path.name.lower()
    return next((r for r in READERS if name.endswith(r.suffixes)), None)


def open_reader(path: Path, text: str | None = None, numbers: Collection[str] = ()) -> Reader:
    """Open a file with the reader that its suffix asks for.

    Args:
        path: the file.
        text: a column that is text wherever the format itself does not tell types (CSV, TSV); None
            for none.
        numbers: columns that are numbers there, whatever else stands in them.
    """
    reader = reader_of(path)
    if reader is None:
        raise InputError(
            f"cannot tell the format of {path} by its suffix; known are {', '.join(suffixes())}."
        )
    if not path.exists():
        raise FileError(f"there is no file {path}.")
    if path.is_dir() != reader.is_folder:
        raise FileError(f"{path} is {'a folder' if path.is_dir() else 'no folder'}.")
    return reader(path, text, numbers)
