"""Checkpoints of a training, written atomically.

Checkpoints are safetensors files. They are validated when read and never unpickled.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.records import Circumstances
from setfold import FileError
from setfold.core import persist as files

KIND = "training"
NAME = "training.safetensors"

Weights = dict[str, Tensor]


@dataclass
class Standing:
    """The state of a training.

    Args:
        circumstances: code, versions and machine at the start.
        step: number of steps done.
        seconds: time for these steps.
        cpu_seconds: CPU time for these steps, of the first process.
        finished: whether the training is finished.
        loss_sum: sum of the losses since the last entry in `history`.
        loss_count: number of losses in `loss_sum`.
        history: epoch, loss and validation metric, one entry per validation.
        weights: weights of the model; empty when finished.
        moments: optimizer state by parameter; empty when finished.
        best: weights with the best validation metric.
    """

    circumstances: Circumstances
    step: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    finished: bool = False
    loss_sum: float = 0.0
    loss_count: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)
    moments: dict[int, Weights] = field(default_factory=dict)
    best: Weights = field(default_factory=dict)


# stored in the header
PLAIN = ("step", "seconds", "cpu_seconds", "finished", "loss_sum", "loss_count", "history")


def write(standing: Standing, folder: Path, settings: Any) -> None:
    """Write a checkpoint of a training with these settings."""
    tensors = {f"weights/{name}": tensor for name, tensor in standing.weights.items()}
    tensors |= {f"best/{name}": tensor for name, tensor in standing.best.items()}
    for index, moments in standing.moments.items():
        tensors |= {f"moments/{index}/{name}": tensor for name, tensor in moments.items()}
    plain = {name: getattr(standing, name) for name in PLAIN}
    description = {
        "settings": settings,
        "circumstances": dataclasses.asdict(standing.circumstances),
        "standing": plain,
    }
    files.write(folder / NAME, KIND, tensors, description)


def read(folder: Path, settings: Any, like: Weights) -> Standing | None:
    """Read the checkpoint of a training; returns None if there is none.

    If the file is damaged or belongs to another training, it is renamed, a warning is issued and
    the training starts from scratch.

    Args:
        folder: folder of the training.
        settings: settings of the training; they must match those in the file.
        like: weights of the model; names and shapes must match those in the file.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        return _read(path, settings, like)
    except FileError as error:
        aside = path.with_name(f"{path.name}.aside-{time.time_ns()}")
        path.rename(aside)
        warnings.warn(
            f"{error} Renamed it to {aside}; the training starts from scratch.", stacklevel=2
        )
        return None


def _read(path: Path, settings: Any, like: Weights) -> Standing:
    _, tensors, description = files.read(path, KIND)
    try:
        circumstances = Circumstances(**description["circumstances"])
        plain = {name: description["standing"][name] for name in PLAIN}
    except (KeyError, TypeError) as error:
        raise FileError(f"{path} was written by another version of this code.") from error
    if description["settings"] != settings:
        raise FileError(f"{path} belongs to a training with different settings.")
    standing = Standing(circumstances, **plain)
    for name, tensor in tensors.items():
        tensor = tensor.clone()  # torch's memory alignment, which can affect the last bit
        home, _, name = name.partition("/")
        if home == "moments":
            index, _, name = name.partition("/")
            standing.moments.setdefault(int(index), {})[name] = tensor
        else:
            getattr(standing, home)[name] = tensor
    for weights in (standing.weights, standing.best):
        if weights and _shapes(weights) != _shapes(like):
            raise FileError(
                f"{path} contains weights that do not match the model: its code has changed."
            )
    return standing


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}
