"""From names in a command to files: folders, patterns, and what a path tells of its rows."""

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
    """A file, and what its folders tell of it.

    Args:
        path: the file.
        partition: the key=value parts of its path.
    """

    path: Path
    partition: dict[str, str]


def find_inputs(names: Sequence[str | Path]) -> list[Input]:
    """The files that names stand for, in the names' order.

    A file that has several names, as by links, counts once, under the first of them.

    Args:
        names: files; folders, in which all files with a known suffix are taken, but none whose name
            begins with "." or "_"; patterns such as "events/**/*.parquet". What exists under
            exactly this name is no pattern.
    """
    found: dict[str, Input] = {}
    for name in names:
        for path in sorted(_paths(str(name))):
            found.setdefault(os.path.realpath(path), Input(path, _partition(path)))
    return list(found.values())


def _paths(name: str) -> list[Path]:
    path = Path(name)
    if path.exists():
        paths = list(_below(path))
        if not paths:
            known = ", ".join(suffixes())
            what = f"the folder {name} holds no file" if path.is_dir() else f"{name} is no file"
            raise InputError(f"{what} with a known suffix; known are {known}.")
        return paths
    if not has_magic(name):
        raise InputError(f"there is no file or folder {name}.{_suggestion(path)}")
    paths = [p for match in glob(name, recursive=True) for p in _below(Path(match))]
    if not paths:
        known = ", ".join(suffixes())
        raise InputError(
            f"the pattern {name} matches no file with a known suffix; known are {known}."
        )
    return paths


def _below(path: Path) -> Iterator[Path]:
    """The file itself, or the files in a folder, if they can be read."""
    if any(_is_store(parent) for parent in path.parents):
        return
    if not path.is_dir() or _is_store(path):
        if reader_of(path):
            yield path
        return
    for entry in path.iterdir():
        loops = entry.is_symlink() and path.resolve().is_relative_to(entry.resolve())
        if not entry.name.startswith((".", "_")) and not loops:
            yield from _below(entry)


def _is_store(path: Path) -> bool:
    """Whether a folder of this name is one input, as a Zarr is."""
    reader = reader_of(path)
    return reader is not None and reader.is_folder


def _partition(path: Path) -> dict[str, str]:
    pairs = (part.partition("=") for part in path.parts[:-1])
    return {key: unquote(value) for key, equals, value in pairs if key and equals}


def _suggestion(path: Path) -> str:
    if not path.parent.is_dir():
        return f" There is no folder {path.parent} either."
    near = get_close_matches(path.name, os.listdir(path.parent), n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""
