"""The prepared files: where they are, what is said when one is missing, how one is written."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from setfold import FileError
from setfold.core import persist as files

FOLDER = "SETFOLD_DATA"
KIND = "data"
SPLITS = ("train", "validation", "test")

Progress = Callable[[int, int], None]  # how many are done, of how many


class MissingDataError(FileError):
    """A prepared file of a data set is not there."""


@dataclass(frozen=True)
class DataSet:
    """A data set as `python -m experiments prepare` knows it.

    Args:
        name: as the command line has it; with the suffix .safetensors, the name of its file.
        help: what to download, from where, under which terms.
        prepare: makes the file, of what was downloaded, in a folder; gives the file's path.
    """

    name: str
    help: str
    prepare: Callable[[Path, Path, Progress], Path]


def read(name: str, advice: str) -> tuple[dict[str, Tensor], Any]:
    """Read a prepared file.

    Args:
        name: of the data set.
        advice: what to download, for the message when the file is missing.

    Returns:
        The tensors, mapped from disk, and the description.
    """
    folder = os.environ.get(FOLDER)
    path = Path(folder or "") / f"{name}.safetensors"
    if not folder or not path.is_file():
        looked = f"there is no {path}" if folder else f"the variable {FOLDER} is not set"
        first = "" if folder else f"  export {FOLDER}=FOLDER  # any, for the prepared files\n"
        raise MissingDataError(
            f"the data set {name} is missing: {looked}.\n{advice}\nThen type\n"
            f"{first}  python -m experiments prepare {name} SOURCE\n"
            f"where SOURCE is what you downloaded; the file goes into ${FOLDER}."
        )
    _, tensors, description = files.read(path, KIND)
    return tensors, description


def write(name: str, folder: Path, tensors: dict[str, Tensor], description: Any) -> Path:
    """Write a prepared file, whole or not at all; an older one stays until the new one is whole."""
    path = folder / f"{name}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(path, KIND, tensors, description)
    except OSError as error:
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise FileError(
            f"cannot write {path}: {error.strerror}. It needs {size / 1e6:.0f} MB; nothing was "
            "left behind. Make room or name another folder."
        ) from error
    return path


def in_splits(values: Tensor, sizes: list[int]) -> dict[str, Tensor]:
    """Values (n, ...) cut into the three splits, in order."""
    return dict(zip(SPLITS, values.split(sizes), strict=True))


def hold_out(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Positions that stay and `count` positions that are held out: the same share of each class.

    >>> labels = torch.tensor([0, 1, 1, 0, 0, 0])
    >>> stay, out = hold_out(labels, 3)
    >>> len(stay), labels[out].sort().values
    (3, tensor([0, 0, 1]))
    """
    # RandomState, not Generator: numpy promises that its stream will never change.
    shuffled = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[by_class[torch.arange(count) * len(labels) // count]] = True  # evenly spread over them
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()
