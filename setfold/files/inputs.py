"""Find the input files: expand folders and glob patterns, and parse key=value folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from glob import glob, has_magic
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from setfold.errors import InputError
from setfold.files.readers import reader_of, suffixes


class Input(NamedTuple):
    """An input file.

    Args:
        path: The file.
        partition: The key=value folders in its path.
    """

    path: Path
    partition: dict[str, str]


def find_inputs(names: Sequence[str | Path]) -> list[Input]:
    """Return the files that names refer to, in the order of the names.

    A file that is found under several names, for example through links, is returned once, under
    the first name.

    Args:
        names: Files, folders and glob patterns such as "events/**/*.parquet". In a folder, all
            files with a known suffix are used, except those whose name begins with "." or "_". A
            name that exists literally is not treated as a pattern.
    """
    found: dict[str, Input] = {}
    for name in names:
        for path in sorted(_paths(str(name))):
            found.setdefault(os.path.realpath(path), Input(path, _parse_partition(path)))
    return list(found.values())


def _paths(name: str) -> list[Path]:
    path = Path(name)
    if path.exists():
        paths = list(_list_files(path))
        if not paths:
            expected = f"Expected one of {', '.join(suffixes())}."
            if path.is_dir():
                raise InputError(f"the folder {name} has no file with a known suffix. {expected}")
            raise InputError(f"unknown suffix of {name}. {expected}")
        return paths
    if not has_magic(name):
        raise InputError(f"there is no file or folder {name}.{_suggest(path)}")
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


def _parse_partition(path: Path) -> dict[str, str]:
    pairs = (part.partition("=") for part in path.parts[:-1])
    return {key: unquote(value) for key, equals, value in pairs if key and equals}


def _suggest(path: Path) -> str:
    if not path.parent.is_dir():
        return f" There is no folder {path.parent}, either. Check the path."
    near = get_close_matches(path.name, os.listdir(path.parent), n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else " Check the path."
