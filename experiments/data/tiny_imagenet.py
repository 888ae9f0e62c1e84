"""Tiny ImageNet: features of pictures of 200 classes, computed by a frozen network."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.data import sources, store
from setfold import FileError

HELP = (
    "Download http://cs231n.stanford.edu/tiny-imagenet-200.zip and pass the zip or the unpacked"
    " folder, with a module that maps pictures to features: --module FILE.pt2 or"
    " --module package.module:factory. ImageNet's terms apply: for non-commercial research only;"
    " pictures and derived data must not be redistributed."
)


class Features(NamedTuple):
    """Features of each split, and their classes."""

    features: dict[str, Tensor]  # (n, 256) float32
    labels: dict[str, Tensor]  # (n,) int64
    names: list[str]


@cache
def load(*, made_up: bool = False) -> Features:
    """Load the features: "test" is the official validation set, "validation" a tenth of "train".

    Args:
        made_up: whether to return synthetic clusters of 20 classes, which need no file.
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
    """Make Gaussian clusters of 20 classes."""
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
    """Write tiny_imagenet.safetensors from existing features.

    Args:
        source: npz of x_train, y_train, x_val, y_val, scale and words. For pictures, see
            `experiments.data.features`.
        folder: folder for the file.
        progress: callback, called when the features have been read.
    """
    if source.suffix != ".npz":
        raise FileError(
            f"{source} is not an npz of features. To compute features of pictures, add "
            "--module FILE.pt2 or --module package.module:factory."
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
