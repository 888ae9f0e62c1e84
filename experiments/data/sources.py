"""Read downloaded files: folders, zip archives, npz arrays and pictures."""

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

HIDDEN = re.compile(r"(^|/)(\.|__MACOSX/)")  # hidden files and files that macOS adds
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError)


@dataclass(frozen=True)
class Files:
    """The files of a folder or a zip.

    Args:
        root: the folder or the zip, for messages.
        paths: sorted paths of the files in it.
        read: function that returns the content of a file.
    """

    root: Path
    paths: list[str]
    read: Callable[[str], bytes]


@contextmanager
def open_files(root: Path) -> Iterator[Files]:
    """Open a folder or a zip; ignores hidden files."""
    if root.is_dir():
        paths = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        yield Files(root, _visible(paths), lambda path: (root / path).read_bytes())
        return
    if not root.is_file():
        raise FileError(f"{root} does not exist; pass the downloaded file or folder.")
    try:
        archive = zipfile.ZipFile(root)
    except zipfile.BadZipFile as error:
        raise FileError(
            f"{root} is truncated or not a zip ({error}). Download it again, or pass a folder."
        ) from error

    def read(path: str) -> bytes:
        try:
            return archive.read(path)
        except (*DAMAGED, RuntimeError) as error:  # RuntimeError: unsupported compression
            raise FileError(
                f"cannot unpack {path} in {root} ({error}). Download the zip again, or unpack it "
                "and pass the folder."
            ) from error

    with archive:
        yield Files(root, _visible(archive.namelist()), read)


def _visible(paths: list[str]) -> list[str]:
    return sorted(path for path in paths if not path.endswith("/") and not HIDDEN.search(path))


def read_arrays(path: Path, *names: str) -> dict[str, np.ndarray]:
    """Read arrays of an npz file by name; raises for object arrays, which need pickle."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return {name: arrays[name] for name in names}
    except (OSError, KeyError, ValueError, *DAMAGED) as error:
        raise FileError(
            f"cannot read the arrays {', '.join(names)} of {path}: {error}. "
            "Pass another file, or the files from the data set's page."
        ) from error


def read_picture(content: bytes, name: str, side: int) -> Tensor:
    """Read the central square of a picture, resized with antialiasing.

    Args:
        content: content of a JPEG or any other file that Pillow reads.
        name: name of the file, for messages.
        side: side of the result in pixels.

    Returns:
        Pixels (side, side, 3), uint8.
    """
    try:
        with Image.open(io.BytesIO(content)) as picture:
            rgb = picture.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise FileError(f"cannot read the picture {name} ({error}). Download it again.") from error
    width, height = rgb.size
    short = min(width, height)
    left, top = (width - short) // 2, (height - short) // 2
    # Crop first: with `box`, resize would blend surrounding pixels into the border.
    square = rgb.crop((left, top, left + short, top + short))
    small = square.resize((side, side), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(small))
