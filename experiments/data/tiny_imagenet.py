"""Tiny ImageNet: features of pictures of 200 classes, as a frozen network gives them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.data import sources, store
from setfold import FileError

HELP = (
    "Download tiny-imagenet-200.zip, from http://cs231n.stanford.edu/tiny-imagenet-200.zip, and"
    " give the zip or the folder that it holds, and a module that maps pictures to features:"
    " --module FILE.pt2 or --module package.module:factory. ImageNet's terms hold: for"
    " non-commercial research only; pictures and what is made of them must not be passed on."
)


class Features(NamedTuple):
    """Features of each split, and the classes that they belong to."""

    features: dict[str, Tensor]  # (n, 256) float32
    labels: dict[str, Tensor]  # (n,) int64
    names: list[str]


@cache
def load(*, made_up: bool = False) -> Features:
    """The features: "test" is the official validation set, "validation" a tenth of "train".

    Args:
        made_up: clusters of 20 classes instead, for which no file is needed.
    """
    if made_up:
        return _clusters()
    tensors, description = store.read("tiny_imagenet", HELP)
    labels = tensors["train_labels"].long()
    stay, out = store.hold_out(labels, len(labels) // 10)
    features, scale = tensors["train_features"], tensors["scale"]
    return Features(
        {
            "train": features[stay] * scale,
            "validation": features[out] * scale,
            "test": tensors["test_features"] * scale,
        },
        {"train": labels[stay], "validation": labels[out], "test": tensors["test_labels"].long()},
        description["names"],
    )


def _clusters() -> Features:
    """Gaussian clusters of 20 classes."""
    sizes = [800, 400, 400]
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(sum(sizes)) % 20
    centres = torch.randn(20, 256, generator=random)
    features = centres[labels] + 2 * torch.randn(len(labels), 256, generator=random)
    return Features(
        store.in_splits(features, sizes),
        store.in_splits(labels, sizes),
        [f"cluster {i}" for i in range(20)],
    )


def prepare(source: Path, folder: Path, progress: store.Progress) -> Path:
    """Make tiny_imagenet.safetensors in a folder, of features that are there already.

    Args:
        source: an npz of x_train, y_train, x_val, y_val, scale and words. Pictures need a module
            as well: see `experiments.data.features`.
        folder: where the file goes.
        progress: is told when the features are read.
    """
    if source.suffix != ".npz":
        raise FileError(
            f"{source} is not an npz of features. Pictures need a module that makes the features: "
            "add --module FILE.pt2 or --module package.module:factory."
        )
    names = ("x_train", "y_train", "x_val", "y_val", "scale", "words")
    arrays = sources.read_arrays(source, *names)
    tensors = {
        "train_features": torch.from_numpy(arrays["x_train"]),
        "train_labels": torch.from_numpy(arrays["y_train"]).to(torch.int16),
        "test_features": torch.from_numpy(arrays["x_val"]),
        "test_labels": torch.from_numpy(arrays["y_val"]).to(torch.int16),
        "scale": torch.from_numpy(arrays["scale"]),
    }
    progress(1, 1)
    return store.write("tiny_imagenet", folder, tensors, {"names": arrays["words"].tolist()})
