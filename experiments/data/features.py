"""Compute features of pictures with any torch module, as a substitute for Tiny ImageNet's.

A module in a file is a program, whatever the format: TorchScript and torch.export files can contain
pickles and expressions that are evaluated on load. We refuse to unpickle anything but tensors, but
a malicious file can still do harm. Use only files that you made yourself, or a Python factory that
reads its weights with safetensors.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from sklearn.decomposition import PCA
from torch import Tensor, nn

from experiments.data import sources, store
from setfold import FileError, InputError

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
PLACE = re.compile(r"(?:^|/)(?P<split>train|val|test)/(?P<kind>[^/]+)/")
FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
OUTLIERS = 0.001  # fraction of features that is clipped in the conversion to int8


@dataclass(frozen=True)
class Extraction:
    """How to compute features of pictures. The defaults suit most networks trained on ImageNet.

    Args:
        module: network (B, 3, side, side) -> (B, ...). Either FILE.pt2 from torch.export.save,
            with a dynamic first dimension, or "package.module:factory", where the factory takes no
            arguments and returns an nn.Module.
        side: side of the pictures in pixels, after a central crop and resizing.
        mean: mean of each channel, whose values are in [0, 1].
        std: standard deviation of each channel.
        dims: number of principal components to keep; they are fitted on the training pictures.
        batch_size: number of pictures per batch.
    """

    module: str
    side: int = 224
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    dims: int = 256
    batch_size: int = 64


class Picture(NamedTuple):
    """A picture: path in the folder or zip, split ("train" or "val") and class."""

    path: str
    split: str
    kind: str


def prepare(
    source: Path, folder: Path, progress: store.Progress, *, extraction: Extraction
) -> Path:
    """Compute features of pictures and write tiny_imagenet.safetensors.

    Args:
        source: folder or zip with train/CLASS/... and val/CLASS/..., or val/images and
            val/val_annotations.txt as in Tiny ImageNet. With CLASS/... only, a tenth is held out
            for test. A folder test/ is ignored, because ImageNet's has no labels.
        folder: folder for the file.
        progress: callback with the number of finished pictures and the total.
        extraction: how to compute the features.
    """
    module = load_module(extraction.module)
    with sources.open_files(source) as files:
        pictures = find_pictures(files)
        kinds = sorted({picture.kind for picture in pictures})
        numbers = {kind: i for i, kind in enumerate(kinds)}
        labels = torch.tensor([numbers[picture.kind] for picture in pictures])
        train, test = _in_two(pictures, labels)
        # Try one picture first, to detect errors before hours of computation.
        one = _extract(module, files, pictures[:1], extraction, lambda done, total: None)
        _check_dims(extraction.dims, len(train), one.shape[1])
        raw = _extract(module, files, pictures, extraction, progress)
        words = _table(files, "words.txt")
    reduced, scale = _reduce(raw, train, extraction.dims)
    tensors = {
        "train_features": reduced[train],
        "train_labels": labels[train].to(torch.int16),
        "test_features": reduced[test],
        "test_labels": labels[test].to(torch.int16),
        "scale": scale,
    }
    names = [words.get(kind, kind) for kind in kinds]
    return store.write("tiny_imagenet", folder, tensors, {"names": names})


def _in_two(pictures: list[Picture], labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return positions of the pictures for training and for test."""
    tests = torch.tensor([picture.split == "val" for picture in pictures])
    if not tests.any():
        return store.hold_out(labels, -(-len(labels) // 10))
    return torch.nonzero(~tests).flatten(), torch.nonzero(tests).flatten()


def load_module(name: str) -> nn.Module:
    """Load the module of a .pt2 file or of "package.module:factory", in eval mode."""
    if name.endswith(".pt2"):
        return _load_exported(Path(name))
    package, colon, factory = name.partition(":")
    if not colon:
        raise InputError(f"expected FILE.pt2 or package.module:factory for a module; got {name!r}.")
    try:
        module = getattr(importlib.import_module(package), factory)()
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"cannot build a module with {name!r}: {error}. The package must be installed or be in "
            "the current folder."
        ) from error
    if not isinstance(module, nn.Module):
        raise InputError(f"{name!r} returned a {type(module).__name__}; expected an nn.Module.")
    return module.eval()


def _load_exported(path: Path) -> nn.Module:
    """Load a module with torch.export; refuses to unpickle anything but tensors."""
    if not path.is_file():
        raise FileError(f"{path} does not exist; create it with torch.export.save.")
    try:
        with _weights_only():
            return torch.export.load(path).module()
    except Exception as error:  # a damaged file can raise almost any exception
        raise FileError(
            f"torch.export cannot load {path} ({type(error).__name__}). Create it with "
            "torch.export.save from a module that contains only tensors."
        ) from error


@contextmanager
def _weights_only() -> Iterator[None]:
    """Make torch.load unpickle only tensors, even if torch.export requests more."""
    before = os.environ.get(FORCE_WEIGHTS_ONLY)
    os.environ[FORCE_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FORCE_WEIGHTS_ONLY]
        else:
            os.environ[FORCE_WEIGHTS_ONLY] = before


def find_pictures(files: sources.Files) -> list[Picture]:
    """List the pictures of a folder or zip with their splits and classes; see `prepare`."""
    paths = [path for path in files.paths if path.lower().endswith(SUFFIXES)]
    places = {path: place for path in paths if (place := PLACE.search(path))}
    if any(place["split"] == "train" for place in places.values()):
        annotated = _table(files, "val/val_annotations.txt")
        pictures = [
            Picture(path, place["split"], annotated.get(path.rpartition("/")[2], place["kind"]))
            for path, place in places.items()
            if place["split"] != "test"
        ]
    else:
        pictures = [Picture(path, "train", path.split("/")[-2]) for path in paths if "/" in path]
    known = {picture.kind for picture in pictures if picture.split == "train"}
    unknown = [picture for picture in pictures if picture.kind not in known]
    if not pictures or unknown:
        what = f"{unknown[0].path} of an unknown class" if unknown else "no pictures in folders"
        raise FileError(
            f"{files.root} contains {what}; expected train/CLASS/NAME.JPEG and "
            "val/CLASS/NAME.JPEG, or CLASS/NAME.JPEG. Pass the folder or zip as downloaded."
        )
    return pictures


def _table(files: sources.Files, name: str) -> dict[str, str]:
    """Read the first two columns of a Tiny ImageNet table; empty if there is none."""
    paths = [path for path in files.paths if path == name or path.endswith(f"/{name}")]
    lines = (line for path in paths for line in files.read(path).decode().splitlines())
    return dict(line.split("\t")[:2] for line in lines if "\t" in line)


@torch.no_grad()
def _extract(
    module: nn.Module,
    files: sources.Files,
    pictures: list[Picture],
    extraction: Extraction,
    progress: store.Progress,
) -> Tensor:
    """Compute the features (n, d) of the pictures."""
    mean, std = torch.tensor(extraction.mean), torch.tensor(extraction.std)
    features = []
    for start in range(0, len(pictures), extraction.batch_size):
        some = pictures[start : start + extraction.batch_size]
        pixels = torch.stack([_read(files, picture, extraction.side) for picture in some])
        channels = ((pixels / 255 - mean) / std).movedim(-1, 1)  # (B, 3, side, side)
        features.append(_apply(module, channels))
        progress(start + len(some), len(pictures))
    return torch.cat(features)


def _read(files: sources.Files, picture: Picture, side: int) -> Tensor:
    name = str(files.root / picture.path)
    return sources.read_picture(files.read(picture.path), name, side)


def _apply(module: nn.Module, channels: Tensor) -> Tensor:
    """Compute features (B, d) of pictures (B, 3, side, side)."""
    try:
        features = module(channels)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise InputError(
            f"the module failed on pictures {tuple(channels.shape)}: {error}. Set --side to the "
            "size that it expects, and export it with a dynamic first dimension."
        ) from error
    if not isinstance(features, Tensor) or len(features) != len(channels):
        got = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise InputError(
            f"the module must map pictures {tuple(channels.shape)} to features "
            f"({len(channels)}, ...); got {got}."
        )
    return features.float().flatten(1)


def _check_dims(dims: int, count: int, width: int) -> None:
    """Raise if there are more principal components than features or pictures."""
    if not 1 <= dims <= min(count, width):
        raise InputError(
            f"cannot keep {dims} dimensions of {width} features of {count} training pictures; "
            f"use 1 to {min(count, width)}."
        )


def _reduce(raw: Tensor, train: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """Compute principal components (n, dims) as int8, and the scale (dims,) to multiply by."""
    components = PCA(dims, random_state=0).fit(raw[train].numpy())
    reduced = components.transform(raw.numpy())
    scale = np.quantile(np.abs(reduced[train.numpy()]), 1 - OUTLIERS, axis=0) / 127
    scale = np.maximum(scale, np.finfo(np.float32).tiny).astype(np.float32)
    levels = np.clip(np.round(reduced / scale), -127, 127).astype(np.int8)
    return torch.from_numpy(levels), torch.from_numpy(scale)
