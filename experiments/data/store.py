"""Read and write prepared files of data sets."""

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

Progress = Callable[[int, int], None]  # callback with the number done and the total


class MissingDataError(FileError):
    """Raised if the prepared file of a data set does not exist."""


@dataclass(frozen=True)
class DataSet:
    """A data set of `python -m experiments prepare`.

    Args:
        name: name on the command line; the file is called NAME.safetensors.
        help: what to download, where, and the terms of use.
        prepare: function of source, folder and progress that writes the file and returns its path.
    """

    name: str
    help: str
    prepare: Callable[[Path, Path, Progress], Path]


def read(name: str, advice: str) -> tuple[dict[str, Tensor], Any]:
    """Read a prepared file.

    Args:
        name: name of the data set.
        advice: what to download, for the message if the file is missing.

    Returns:
        The memory-mapped tensors and the description.
    """
    folder = os.environ.get(FOLDER)
    path = Path(folder or "") / f"{name}.safetensors"
    if not folder or not path.is_file():
        reason = f"{path} does not exist" if folder else f"the variable {FOLDER} is not set"
        first = "" if folder else f"  export {FOLDER}=FOLDER  # folder for prepared files\n"
        raise MissingDataError(
            f"the data set {name} is missing: {reason}.\n{advice}\nThen run\n"
            f"{first}  python -m experiments prepare {name} SOURCE\n"
            f"where SOURCE is the downloaded file or folder. It writes to ${FOLDER}."
        )
    _, tensors, description = files.read(path, KIND)
    return tensors, description


def write(name: str, folder: Path, tensors: dict[str, Tensor], description: Any) -> Path:
    """Write a prepared file atomically; an older file is kept until the new one is complete."""
    path = folder / f"{name}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(path, KIND, tensors, description)
    except OSError as error:
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise FileError(
            f"cannot write {path}: {error.strerror}. It needs {size / 1e6:.0f} MB. No partial file "
            "was left. Free some space or choose another folder."
        ) from error
    return path


def in_splits(values: Tensor, sizes: list[int]) -> dict[str, Tensor]:
    """Cut values (n, ...) into the three splits, in order."""
    return dict(zip(SPLITS, values.split(sizes), strict=True))


def hold_out(labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return positions to keep and `count` positions to hold out, stratified by class.

    >>> labels = torch.tensor([0, 1, 1, 0, 0, 0])
    >>> stay, out = hold_out(labels, 3)
    >>> len(stay), labels[out].sort().values
    (3, tensor([0, 0, 1]))
    """
    # RandomState instead of Generator: numpy guarantees that its stream never changes.
    shuffled = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[by_class[torch.arange(count) * len(labels) // count]] = True  # evenly spaced
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()
