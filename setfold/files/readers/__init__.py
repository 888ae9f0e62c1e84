"""Readers for files whose rows are elements of sets, one for each format."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from setfold.errors import FileError, InputError
from setfold.files.readers.arrays import NpyReader, NpzReader
from setfold.files.readers.columnar import ArrowReader, ParquetReader
from setfold.files.readers.containers import Hdf5Reader, TorchReader
from setfold.files.readers.lines import JsonReader
from setfold.files.readers.meshes import MeshReader
from setfold.files.readers.points import LasReader
from setfold.files.readers.reader import BadRow, Reader
from setfold.files.readers.root import RootReader, split_tree
from setfold.files.readers.text import CsvReader
from setfold.files.readers.zarr import ZarrReader

__all__ = ["READERS", "BadRow", "Reader", "file_of", "open_reader", "reader_of", "suffixes"]

READERS: tuple[type[Reader], ...] = (
    ParquetReader,
    ArrowReader,
    CsvReader,
    JsonReader,
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
    """Return the suffixes of all supported formats."""
    return [suffix for reader in READERS for suffix in reader.suffixes]


def reader_of(path: Path) -> type[Reader] | None:
    """Return the reader class for a file, by suffix; None if the format is not supported.

    >>> reader_of(Path("a/b.PARQUET")).__name__
    'ParquetReader'
    """
    name = split_tree(path)[0].name.lower()
    return next((r for r in READERS if name.endswith(r.suffixes)), None)


def file_of(path: Path) -> Path:
    """Return the file that a path is in: the path, without the tree of file.root:tree."""
    return split_tree(path)[0]


def open_reader(
    path: Path, text_columns: Collection[str] = (), number_columns: Collection[str] = ()
) -> Reader:
    """Open a file with the reader for its suffix.

    Args:
        path: The file.
        text_columns: Columns to read as text, in formats without types (CSV, TSV).
        number_columns: Columns to read as numbers, in formats without types. Other cells are null.

    Raises:
        InputError: The suffix is unknown.
        FileError: The file does not exist or cannot be opened.
    """
    reader = reader_of(path)
    if reader is None:
        raise InputError(
            f"unknown suffix of {path}; expected one of {', '.join(suffixes())}. Convert the file."
        )
    file = file_of(path)
    if not file.exists():
        raise FileError(f"there is no file {file}. Check the path.")
    if file.is_dir() != reader.is_folder:
        expected, got = ("folder", "file") if reader.is_folder else ("file", "folder")
        raise FileError(f"expected a {expected} at {file}, by its suffix; got a {got}. Rename it.")
    if not (file.is_file() or file.is_dir()):
        raise FileError(f"{file} is neither a file nor a folder. Write its content to a file.")
    return reader(path, text_columns, number_columns)
