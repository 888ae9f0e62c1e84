"""Point clouds of shapes: made up here, or those of ModelNet40 if SETFOLD_DATA names its folder.

A cloud is a set of points (x, y, z) with z upwards, centred, within the unit ball.
"""

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

SEED = 2021
POINTS = 512  # of a cloud
CLASSES = ["sphere", "box", "cylinder", "cone", "torus", "table", "chair", "airplane"]
EACH = 250  # clouds of each class to train on
FOLDER, FILE = "SETFOLD_DATA", "modelnet40.safetensors"  # what `experiments prepare` writes

Part = tuple[tuple[float, float, float], tuple[float, float, float]]  # centre and size of a box
TABLE: list[Part] = [
    ((0, 0, 0.9), (2, 1.4, 0.15)),
    *(((x, y, 0.4), (0.15, 0.15, 0.9)) for x in (-0.9, 0.9) for y in (-0.6, 0.6)),
]
CHAIR: list[Part] = [
    ((0, 0, 0), (1, 1, 0.12)),
    ((0, -0.45, 0.6), (1, 0.12, 1.2)),
    *(((x, y, -0.5), (0.1, 0.1, 1)) for x in (-0.42, 0.42) for y in (-0.42, 0.42)),
]
AIRPLANE: list[Part] = [
    ((0, 0, 0), (2.2, 0.22, 0.24)),
    ((0.1, 0, 0.02), (0.5, 2.2, 0.05)),
    ((-1, 0, 0.1), (0.25, 0.8, 0.05)),
    ((-1, 0, 0.3), (0.25, 0.05, 0.5)),
]


class Clouds(NamedTuple):
    """Clouds (n, P, 3), and the number of the class of each (n,)."""

    train: Tensor
    train_labels: Tensor
    unseen: Tensor  # one of each class after the other: 0, 1, 2, ...
    unseen_labels: Tensor
    classes: list[str]
    source: str


def load(each: int = EACH) -> Clouds:
    """Load ModelNet40 if its prepared file is there; make clouds up otherwise.

    Args:
        each: how many clouds of each class to make up.
    """
    file = Path(os.environ.get(FOLDER, "")) / FILE
    return _modelnet40(file) if os.environ.get(FOLDER) and file.exists() else made_up(each)


def made_up(each: int) -> Clouds:
    """Make clouds up: simple shapes of random proportions, turned about the vertical axis."""
    random = torch.Generator().manual_seed(SEED)
    held = 4  # of each class
    found = [_clouds(kind, each + held, random) for kind in range(len(CLASSES))]
    labels = torch.arange(len(CLASSES))
    return Clouds(
        torch.cat([clouds[held:] for clouds in found]),
        labels.repeat_interleave(each),
        torch.stack([clouds[:held] for clouds in found], 1).flatten(0, 1),
        labels.repeat(held),
        CLASSES,
        "made up in code",
    )


def _clouds(kind: int, number: int, random: torch.Generator) -> Tensor:
    """Make clouds (number, POINTS, 3) of one class."""
    gauss = torch.randn(number, POINTS, 3, generator=random)
    level = torch.rand(number, POINTS, 1, generator=random)
    ball = gauss / gauss.norm(dim=-1, keepdim=True)
    ring = gauss[..., :2] / gauss[..., :2].norm(dim=-1, keepdim=True)
    turn = 2 * math.pi * level
    points = {
        "sphere": lambda: ball,
        "box": lambda: gauss / gauss.abs().amax(dim=-1, keepdim=True),
        "cylinder": lambda: torch.cat([ring * 0.6, 2.4 * level - 1.2], -1),
        "cone": lambda: torch.cat([ring * level.sqrt(), 1.6 - 1.6 * level.sqrt()], -1),
        "torus": lambda: torch.cat([ring * (1 + 0.35 * turn.cos()), 0.35 * turn.sin()], -1),
        "table": lambda: _boxes(TABLE, gauss, level),
        "chair": lambda: _boxes(CHAIR, gauss, level),
        "airplane": lambda: _boxes(AIRPLANE, gauss, level),
    }[CLASSES[kind]]()
    points = points * (0.75 + 0.5 * torch.rand(number, 1, 3, generator=random))
    angle = 0.3 * torch.randn(number, generator=random)  # most shapes face the same way
    cosine, sine = angle.cos(), angle.sin()
    turned = torch.stack([cosine, -sine, sine, cosine], -1).view(number, 2, 2)
    points = torch.cat([points[..., :2] @ turned, points[..., 2:]], -1)
    points = points - points.mean(1, keepdim=True)
    return points / points.norm(dim=-1).amax(1)[:, None, None]


def _boxes(parts: list[Part], gauss: Tensor, level: Tensor) -> Tensor:
    """Points on the surfaces of boxes, as many on each as its surface deserves."""
    centres, sizes = (torch.tensor([part[place] for part in parts]) for place in (0, 1))
    areas = (sizes * sizes.roll(1, 1)).sum(1)
    which = torch.searchsorted(areas.cumsum(0) / areas.sum(), level[..., 0].contiguous())
    which = which.clamp(max=len(parts) - 1)
    # Points of a cube, moved along a random axis to its surface, are spread evenly over it.
    spread = torch.special.ndtr(gauss) - 0.5
    stretched = spread * sizes[which]
    gap = (0.5 * sizes[which] - stretched.abs()) / sizes[which].amax(-1, keepdim=True)
    nearest = torch.nn.functional.one_hot(gap.argmin(-1), 3).bool()
    flat = torch.where(nearest, 0.5 * sizes[which] * spread.sign(), stretched)
    return flat + centres[which]


def _modelnet40(file: Path) -> Clouds:
    """Read the first points of each cloud; the test split is held out."""
    with safe_open(file, "pt") as opened:
        scale = opened.get_tensor("scale")
        train, unseen = (
            opened.get_slice(f"{split}_points")[:, :POINTS] * scale for split in ("train", "test")
        )
        labels, unseen_labels = (
            opened.get_tensor(f"{split}_labels").long() for split in ("train", "test")
        )
        classes = json.loads(opened.metadata()["setfold"])["description"]["classes"]
    by_class = [(unseen_labels == kind).nonzero().flatten()[:2] for kind in range(len(classes))]
    order = torch.stack(by_class, 1).flatten()
    return Clouds(train, labels, unseen[order], unseen_labels[order], classes, "ModelNet40")
