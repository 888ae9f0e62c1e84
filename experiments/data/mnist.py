"""MNIST: handwritten digits, 28x28 pixels."""

from __future__ import annotations

import gzip
import math
import zlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.data import sources, store
from setfold import FileError

SIDE = 28
HELD_OUT = 12  # one in 12 images of the official training set is held out
IMAGES, LABELS = 2051, 2049  # magic numbers of idx files
HELP = (
    "Download the four files of MNIST (train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz,"
    " t10k-images-idx3-ubyte.gz, t10k-labels-idx1-ubyte.gz) into one folder, from"
    " http://yann.lecun.com/exdb/mnist or a mirror, and pass the folder; or pass mnist.npz as"
    " distributed by Keras. For research; cite LeCun, Cortes and Burges."
)
# Seven-segment display: top, left, bottom, right of each segment, and the lit segments per digit.
SEGMENTS = [
    (7, 11, 8, 20),
    (7, 11, 16, 12),
    (7, 19, 16, 20),
    (15, 11, 16, 20),
    (15, 11, 24, 12),
    (15, 19, 24, 20),
    (23, 11, 24, 20),
]
LIT = ["012456", "25", "02346", "02356", "1235", "01356", "013456", "025", "0123456", "012356"]


class Digits(NamedTuple):
    """Pictures of each split, white on black, and their labels."""

    images: dict[str, Tensor]  # (n, 28, 28) uint8
    labels: dict[str, Tensor]  # (n,) int64


@cache
def load(*, made_up: bool = False) -> Digits:
    """Load the digits: the official "test" split, and 5,000 of 60,000 as "validation".

    Args:
        made_up: whether to return synthetic seven-segment digits instead, which need no file.
    """
    if made_up:
        return _clock_digits()
    tensors, _ = store.read("mnist", HELP)
    images, labels = tensors["train_images"], tensors["train_labels"].long()
    stay, out = store.hold_out(labels, len(labels) // HELD_OUT)
    return Digits(
        {"train": images[stay], "validation": images[out], "test": tensors["test_images"]},
        {"train": labels[stay], "validation": labels[out], "test": tensors["test_labels"].long()},
    )


def _clock_digits() -> Digits:
    """Make seven-segment digits with random positions and brightness."""
    sizes = [400, 200, 200]
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(sum(sizes)) % 10
    digits = torch.zeros(10, SIDE + 4, SIDE + 4)
    for digit, segments in enumerate(LIT):
        for top, left, bottom, right in (SEGMENTS[int(segment)] for segment in segments):
            digits[digit, top : bottom + 1, left : right + 1] = 1
    places = digits.unfold(1, SIDE, 1).unfold(2, SIDE, 1)  # (10, 5, 5, 28, 28)
    down, across = torch.randint(5, (2, len(labels)), generator=random)
    brightness = 0.5 + 0.5 * torch.rand(len(labels), 1, 1, generator=random)
    images = (255 * brightness * places[labels, down, across]).to(torch.uint8)
    return Digits(
        store.in_splits(images, sizes),
        store.in_splits(labels, sizes),
    )


def prepare(source: Path, folder: Path, progress: store.Progress) -> Path:
    """Write mnist.safetensors.

    Args:
        source: folder with the four idx files, with or without gzip, or an npz of x_train, y_train,
            x_test and y_test.
        folder: folder for the file.
        progress: callback with the number of finished parts and the total.
    """
    arrays = _compact(source) if source.suffix == ".npz" else _idx_files(source)
    tensors = {}
    for i, (name, array) in enumerate(arrays.items()):
        tensors[name] = torch.from_numpy(array)
        progress(i + 1, len(arrays))
    for split in ("train", "test"):
        images, labels = tensors[f"{split}_images"], tensors[f"{split}_labels"]
        if images.shape != (len(labels), SIDE, SIDE):
            raise FileError(
                f"{source}: {len(labels)} {split} labels, but images of shape "
                f"{tuple(images.shape)}; expected one 28x28 image per label. Download both files "
                "again."
            )
    return store.write("mnist", folder, tensors, {})


def _compact(source: Path) -> dict[str, np.ndarray]:
    """Read the four arrays of an npz file."""
    arrays = sources.read_arrays(source, "x_train", "y_train", "x_test", "y_test")
    return {
        "train_images": arrays["x_train"],
        "train_labels": arrays["y_train"],
        "test_images": arrays["x_test"],
        "test_labels": arrays["y_test"],
    }


def _idx_files(folder: Path) -> dict[str, np.ndarray]:
    """Read the arrays of the four idx files in a folder."""
    return {
        "train_images": _read_idx(_find(folder, "train-images", "idx3-ubyte"), IMAGES),
        "train_labels": _read_idx(_find(folder, "train-labels", "idx1-ubyte"), LABELS),
        "test_images": _read_idx(_find(folder, "t10k-images", "idx3-ubyte"), IMAGES),
        "test_labels": _read_idx(_find(folder, "t10k-labels", "idx1-ubyte"), LABELS),
    }


def _find(folder: Path, stem: str, suffix: str) -> Path:
    """Find a file by its official name or with a dot, with or without .gz."""
    names = [f"{stem}{joint}{suffix}{end}" for end in ("", ".gz") for joint in "-."]
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise FileError(
            f"neither {folder / names[0]} nor a .gz of it exists. Download all four files of MNIST "
            "into one folder and pass that folder."
        )
    return found[0]


def _read_idx(path: Path, magic: int) -> np.ndarray:
    """Read the array of an idx file: magic number, sizes, bytes."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"cannot read {path} ({error}). Download it again.") from error
    found = int.from_bytes(content[:4], "big")
    if found != magic:
        what = "images" if magic == IMAGES else "labels"
        raise FileError(
            f"{path} has the magic number {found}; expected {magic} for {what}. Download it again."
        )
    rank = magic % 256
    shape = [int.from_bytes(content[4 * i : 4 * i + 4], "big") for i in range(1, rank + 1)]
    head = 4 + 4 * rank
    if len(content) != head + math.prod(shape):
        raise FileError(
            f"{path} is truncated or too long: {len(content)} bytes for the shape {shape}. "
            "Download it again."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape).copy()
