"""What a user has downloaded: a folder or a zip of files, a file of arrays, a picture."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from setfold import FileError

HIDDEN = re.compile(r"(^|/)(\.|__MACOSX/)")  # what macOS leaves in folders and archives
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError)


@dataclass(frozen=True)
class Files:
    """The files of a folder or a zip.

    Args:
        root: the folder or the zip, for messages.
        paths: of the files within it, sorted.
        read: gives the content of one.
    """

    root: Path
    paths: list[str]
    read: Callable[[str], bytes]


@contextmanager
def open_files(root: Path) -> Iterator[Files]:
    """The files of a folder or a zip, hidden ones left out."""
    if root.is_dir():
        paths = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        yield Files(root, _visible(paths), lambda path: (root / path).read_bytes())
        return
    if not root.is_file():
        raise FileError(f"there is no file or folder {root}; give what you downloaded.")
    try:
        archive = zipfile.ZipFile(root)
    except zipfile.BadZipFile as error:
        raise FileError(
            f"{root} is truncated or not a zip ({error}). Download it again, or give a folder."
        ) from error

    def read(path: str) -> bytes:
        try:
            return archive.read(path)
        except (*DAMAGED, RuntimeError) as error:  # RuntimeError: packed in a way unknown here
            raise FileError(
                f"{path} in {root} cannot be unpacked ({error}). Download the zip again, or unpack "
                "it and give the folder."
            ) from error

    with archive:
        yield Files(root, _visible(archive.namelist()), read)


def _visible(paths: list[str]) -> list[str]:
    return sorted(path for path in paths if not path.endswith("/") and not HIDDEN.search(path))


def read_arrays(path: Path, *names: str) -> dict[str, np.ndarray]:
    """Named arrays of an npz file; objects are refused, as they would have to be unpickled."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return {name: arrays[name] for name in names}
    except (OSError, KeyError, ValueError, *DAMAGED) as error:
        raise FileError(
            f"{path} cannot be read as arrays {', '.join(names)}: {error}. "
            "Give another file, or what the data set's own page offers."
        ) from error


def read_picture(content: bytes, name: str, side: int) -> Tensor:
    """The central square of a picture, made smaller or larger with antialiasing.

    Args:
        content: of a JPEG or any other file that Pillow reads.
        name: of the file, for messages.
        side: pixels of the result's sides.

    Returns:
        Pixels (side, side, 3), uint8.
    """
    try:
        with Image.open(io.BytesIO(content)) as picture:
            rgb = picture.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise FileError(
            f"{name} is not a picture that can be read ({error}). Download it again."
        ) from error
    width, height = rgb.size
    short = min(width, height)
    left, top = (width - short) // 2, (height - short) // 2
    # Cut out first: resize's own box would let what lies around it bleed into the border.
    square = rgb.crop((left, top, left + short, top + short))
    small = square.resize((side, side), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(small))
