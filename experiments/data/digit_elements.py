"""MNIST digits as elements of large bags: 64 principal components, of each digit in nine places."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from experiments.data import mnist

DIM = 64  # they hold 86% of the variance
IMAGES = 5000  # at a time


class Elements(NamedTuple):
    """Elements of each split; needles are the last rows."""

    features: dict[str, Tensor]  # (n, 64) float32
    others: dict[str, int]  # number of rows that are no needles


@cache
def load(needle: int, *, made_up: bool = False) -> Elements:
    """Load the elements of the splits of `mnist.load`; a digit is in one split only.

    Args:
        needle: the digit that is a needle.
        made_up: whether to use synthetic digits instead, which need no file.
    """
    digits = mnist.load(made_up=made_up)
    mean, basis = _components(digits.images["train"])
    features, others = {}, {}
    for split, images in digits.images.items():
        is_needle = digits.labels[split] == needle
        parts = [images[~is_needle], images[is_needle]]
        projected = [torch.cat(list(_projected(part, mean, basis))) for part in parts]
        features[split], others[split] = torch.cat(projected), len(projected[0])
    return Elements(features, others)


def _components(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and principal components (784, 64) of images, all divided by one number.

    The number is such that the components have variance 1 on average.
    """
    flat = images.flatten(1).float()
    mean = flat.mean(0)
    covariance = (flat - mean).T @ (flat - mean) / len(flat)
    values, vectors = torch.linalg.eigh(covariance.double())
    return mean, (vectors[:, -DIM:] / values[-DIM:].mean().sqrt()).float()


def _projected(images: Tensor, mean: Tensor, basis: Tensor) -> Iterator[Tensor]:
    """Yield the components of images in all places."""
    padded = pad(images, (1, 1, 1, 1))
    for top, left in product(range(3), repeat=2):  # so that large bags repeat fewer elements
        moved = padded[:, top : top + mnist.SIDE, left : left + mnist.SIDE]
        for some in moved.split(IMAGES):
            yield (some.flatten(1) - mean) @ basis
