"""From the paths that a user passes to open files.

`find_inputs` expands folders and glob patterns, and parses key=value folders. `open_reader` opens a
file with the reader for its format.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from glob import glob, has_magic
from pathlib import Path, PurePath
from typing import NamedTuple
from urllib.parse import unquote

from setfold.errors import FileError, InputError
from setfold.files.readers.arrays import NpyReader, NpzReader
from setfold.files.readers.columnar import ArrowReader, ParquetReader
from setfold.files.readers.containers import Hdf5Reader, TorchReader
from setfold.files.readers.lines import JsonReader
from setfold.files.readers.meshes import MeshReader
from setfold.files.readers.points import LasReader
from setfold.files.readers.reader import Reader, split_tree
from setfold.files.readers.root import RootReader
from setfold.files.readers.text import CsvReader
from setfold.files.readers.zarr import ZarrReader

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


class Input(NamedTuple):
    """An input file.

    Args:
        path: The file, as the user wrote it.
        partition: The key=value folders in its absolute path.
        name: Its set id, if each file is a set. It is the same however the path is written.
    """

    path: Path
    partition: dict[str, str]
    name: str = ""


def find_inputs(
    names: Sequence[str | Path], root: str | Path | None = None, keys: Sequence[str] = ()
) -> list[Input]:
    """Return the files that names refer to, in the order of the names.

    A file that is found under several names, for example through links, is returned once, under
    the first name.

    Args:
        names: Files, folders and glob patterns such as "events/**/*.parquet". In a folder, all
            files with a known suffix are used, except those whose name begins with "." or "_". A
            name that exists literally is not treated as a pattern.
        root: The folder to which the names of files are relative. If None, they are absolute.
        keys: The columns, or the keys of key=value folders, that hold the set id. If empty, each
            file is a set.

    Raises:
        InputError: A name refers to no file, a file is outside of the root, or a file is found in
            two folders that assign it to different sets.
    """
    found: dict[str, Input] = {}
    for name in names:
        for path in sorted(_paths(str(name))):
            own = Input(
                path,
                _parse_partition(absolute(path)),
                "" if keys else name_of(path, root),
            )
            first = found.setdefault(os.path.realpath(path), own)
            differ = [key for key in keys if first.partition.get(key) != own.partition.get(key)]
            if differ:
                raise InputError(
                    f"{first.path} and {path} are the same file, but their folders assign it to "
                    f"different sets ({differ[0]}). Remove one of them, or copy the file."
                )
    return list(found.values())


def absolute(path: str | Path) -> str:
    """Return the absolute path of a file or folder. Links are kept where that is possible."""
    name = os.path.abspath(path)
    try:  # "link/.." is not the folder of the link, so removing it may lead to another file
        is_same = os.path.samefile(name, path)
    except OSError:  # there is no such file
        is_same = False
    return name if is_same else os.path.realpath(path)


def name_of(path: str | Path, root: str | Path | None = None) -> str:
    """Return the name of a file: its absolute path, or its path relative to a root, with "/".

    Raises:
        InputError: The file is outside of the root, or its name is not valid Unicode.
    """
    name = PurePath(absolute(path))
    if root is not None:
        folder, file = os.path.split(name)
        real = PurePath(os.path.realpath(folder), file)
        if name.is_relative_to(absolute(root)):
            name = name.relative_to(absolute(root))
        elif real.is_relative_to(os.path.realpath(root)):
            name = real.relative_to(os.path.realpath(root))
        else:
            raise InputError(
                f"{path} is outside of the root {root}. Pass a root that contains all inputs, or "
                "omit it to use absolute paths as set ids."
            )
    text = name.as_posix()
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the path {text!r} is not valid Unicode, so it cannot be a set id. Rename the file, or "
            "name a column with --set."
        ) from error
    return text


def _paths(name: str) -> list[Path]:
    path, tree = split_tree(Path(name))
    if tree is not None:
        files = _paths(str(path))
        if wrong := [file for file in files if reader_of(file) is not RootReader]:
            raise InputError(f"expected a ROOT file before :{tree}; got {wrong[0]}.")
        return [Path(f"{file}:{tree}") for file in files]
    if path.exists():
        paths = list(_list_files(path))
        if not paths:
            expected = f"Expected one of {', '.join(suffixes())}."
            if path.is_dir():
                raise InputError(f"the folder {name} has no file with a known suffix. {expected}")
            raise InputError(f"unknown suffix of {name}. {expected}")
        return paths
    if not has_magic(name):
        raise InputError(f"{name} does not exist.{_suggest(path)}")
    paths = [p for match in glob(name, recursive=True) for p in _list_files(Path(match))]
    if not paths:
        raise InputError(
            f"the pattern {name} matches no file with a known suffix. Expected one of "
            f"{', '.join(suffixes())}."
        )
    return paths


def _list_files(path: Path) -> Iterator[Path]:
    """Yield the path itself, or the files in a folder, if there is a reader for them."""
    if any(_is_folder_format(parent) for parent in path.parents):
        return
    if not path.is_dir() or _is_folder_format(path):
        if reader_of(path):
            yield path
        return
    for entry in path.iterdir():
        loops = entry.is_symlink() and path.resolve().is_relative_to(entry.resolve())
        if not entry.name.startswith((".", "_")) and not loops:
            yield from _list_files(entry)


def _is_folder_format(path: Path) -> bool:
    """Whether a folder of this name is a single input, such as a Zarr array."""
    reader = reader_of(path)
    return reader is not None and reader.is_folder


def _parse_partition(path: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in PurePath(path).parts[:-1])
    return {key: unquote(value) for key, equals, value in pairs if key and equals}


def _suggest(path: Path) -> str:
    if not path.parent.is_dir():
        return f" The folder {path.parent} does not exist, either. Check the path."
    near = get_close_matches(path.name, os.listdir(path.parent), n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else " Check the path."


# ---- formats -----------------------------------------------------------------------------------


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
        raise FileError(f"{file} does not exist. Check the path.")
    if file.is_dir() != reader.is_folder:
        expected, got = ("folder", "file") if reader.is_folder else ("file", "folder")
        raise FileError(f"expected a {expected} at {file}, by its suffix; got a {got}. Rename it.")
    if not (file.is_file() or file.is_dir()):
        raise FileError(f"{file} is neither a file nor a folder. Write its content to a file.")
    return reader(path, text_columns, number_columns)
