"""ModelNet40: points on the surfaces of shapes of 40 classes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.data import meshes, sources, store
from setfold import FileError

POINTS = 2048
LEVELS = 32767  # int16 value of the coordinate 1.0
HELP = (
    "Download ModelNet40.zip (the meshes) from https://modelnet.cs.princeton.edu and pass the zip"
    " or the unpacked folder. For academic research only; shapes and derived data must not be"
    " redistributed."
)
MESH = re.compile(r"(?:^|/)(?P<kind>[^/]+)/(?P<split>train|test)/(?P<name>[^/]+)\.off$")


class Clouds(NamedTuple):
    """Point clouds of each split, centred and within the unit ball, and their labels."""

    points: dict[str, Tensor]  # (n, P, 3) float32
    labels: dict[str, Tensor]  # (n,) int64
    classes: list[str]


@cache
def load(*, made_up: bool = False) -> Clouds:
    """Load the clouds: the official "test" split, and a tenth of each class as "validation".

    Args:
        made_up: whether to return a few synthetic clouds of simple shapes, which need no file.
    """
    if made_up:
        return _simple_shapes()
    tensors, description = store.read("modelnet40", HELP)
    labels = tensors["train_labels"].long()
    points, scale = tensors["train_points"], tensors["scale"]
    stay, out = store.hold_out(labels, round(0.1 * len(labels)))
    return Clouds(
        {
            "train": points[stay] * scale,
            "validation": points[out] * scale,
            "test": tensors["test_points"] * scale,
        },
        {"train": labels[stay], "validation": labels[out], "test": tensors["test_labels"].long()},
        description["classes"],
    )


def _simple_shapes() -> Clouds:
    """Make randomly scaled spheres, cubes, cylinders and tori."""
    sizes = [64, 16, 16]
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(sum(sizes)) % 4
    gauss = torch.randn(len(labels), 256, 3, generator=random)
    height = 2 * torch.rand(len(labels), 256, 1, generator=random) - 1
    ball = gauss / gauss.norm(dim=-1, keepdim=True)
    box = gauss / gauss.abs().amax(dim=-1, keepdim=True)
    ring = gauss[..., :2] / gauss[..., :2].norm(dim=-1, keepdim=True)
    tube = torch.cat(
        [ring * (1 + 0.4 * (torch.pi * height).cos()), 0.4 * (torch.pi * height).sin()], dim=-1
    )
    shapes = torch.stack([ball, box, torch.cat([ring, height], dim=-1), tube], dim=1)
    points = shapes[torch.arange(len(labels)), labels]  # (96, 256, 3)
    points *= 0.7 + 0.6 * torch.rand(len(labels), 1, 3, generator=random)
    points -= points.mean(dim=1, keepdim=True)
    points /= points.norm(dim=-1).amax(dim=1)[:, None, None]
    return Clouds(
        store.in_splits(points, sizes),
        store.in_splits(labels, sizes),
        ["sphere", "cube", "cylinder", "torus"],
    )


def prepare(source: Path, folder: Path, progress: store.Progress) -> Path:
    """Write modelnet40.safetensors.

    Args:
        source: zip or folder with CLASS/train/NAME.off and CLASS/test/NAME.off, or an npz of
            points (x_train, y_train, x_test, y_test, scale, classes, missing).
        folder: folder for the file.
        progress: callback with the number of finished shapes and the total.
    """
    if source.suffix == ".npz":
        tensors, classes, missing = _compact(source)
        progress(1, 1)
    else:
        with sources.open_files(source) as files:
            tensors, classes = _sample(files, progress)
        missing = []
    return store.write("modelnet40", folder, tensors, {"classes": classes, "missing": missing})


def _compact(source: Path) -> tuple[dict[str, Tensor], list[str], list[str]]:
    """Read tensors, class names and names of missing shapes from an npz file."""
    names = ("x_train", "y_train", "x_test", "y_test", "scale", "classes", "missing")
    arrays = sources.read_arrays(source, *names)
    tensors = {
        "train_points": torch.from_numpy(arrays["x_train"]),
        "train_labels": torch.from_numpy(arrays["y_train"]),
        "test_points": torch.from_numpy(arrays["x_test"]),
        "test_labels": torch.from_numpy(arrays["y_test"]),
        "scale": torch.tensor(arrays["scale"].item()),
    }
    return tensors, arrays["classes"].tolist(), arrays["missing"].tolist()


def _sample(files: sources.Files, progress: store.Progress) -> tuple[dict[str, Tensor], list[str]]:
    """Draw points from all meshes; returns points, labels and class names."""
    found = [match for path in files.paths if (match := MESH.search(path))]
    classes = sorted({match["kind"] for match in found})
    if {match["split"] for match in found} != {"train", "test"}:
        raise FileError(
            f"{files.root} contains {len(found)} files CLASS/train/NAME.off or "
            "CLASS/test/NAME.off; expected some of both. Pass ModelNet40.zip or its folder."
        )
    points: dict[str, list[Tensor]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    for i, match in enumerate(found):
        points[match["split"]].append(_points(files, match))
        labels[match["split"]].append(classes.index(match["kind"]))
        progress(i + 1, len(found))
    tensors = {"scale": torch.tensor(1 / LEVELS)}
    for split in points:
        tensors[f"{split}_points"] = torch.stack(points[split])
        tensors[f"{split}_labels"] = torch.tensor(labels[split], dtype=torch.uint8)
    return tensors, classes


def _points(files: sources.Files, match: re.Match[str]) -> Tensor:
    """Draw points (P, 3) of one mesh, as int16."""
    content = files.read(match.string)
    try:
        points = meshes.sample(meshes.parse_off(content), POINTS, match["name"])
    except FileError as error:
        raise FileError(
            f"{files.root / match.string}: {error}. Download it again, or remove the shape."
        ) from error
    return torch.from_numpy((points * LEVELS).round().astype(np.int16))
