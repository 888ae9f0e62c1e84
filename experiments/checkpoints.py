"""Where a training stands, in a file that is whole at every moment.

The file is one of setfold's safetensors files: checked when it is read, and never unpickled.
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
    """Where a training stands.

    Args:
        circumstances: in which it began.
        step: how many steps are done.
        seconds: that they took.
        finished: whether there are no more to come.
        loss_sum: sum of the losses since the last entry in `history`.
        loss_count: how many those are.
        history: epoch, loss and validation metric, one entry for each validation.
        weights: of the model; empty when finished.
        moments: of the optimiser, by parameter; empty when finished.
        best: the weights to be kept.
    """

    circumstances: Circumstances
    step: int = 0
    seconds: float = 0.0
    finished: bool = False
    loss_sum: float = 0.0
    loss_count: int = 0
    history: dict[str, list[float]] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)
    moments: dict[int, Weights] = field(default_factory=dict)
    best: Weights = field(default_factory=dict)


PLAIN = ("step", "seconds", "finished", "loss_sum", "loss_count", "history")  # go into the header


def write(standing: Standing, folder: Path, settings: Any) -> None:
    """Write where a training with these settings stands."""
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
    """Where a training stands, None if it has not begun.

    A file that is damaged, or of something else, is put aside with a warning, and the training
    begins anew: what it holds is of no use to this training, but may be to somebody.

    Args:
        folder: of the training.
        settings: of the training; the file's must be the same.
        like: the model's weights, whose names and shapes the file's must have.
    """
    path = folder / NAME
    if not path.exists():
        return None
    try:
        return _read(path, settings, like)
    except FileError as error:
        aside = path.with_name(f"{path.name}.aside-{time.time_ns()}")
        path.rename(aside)
        warnings.warn(f"{error} It is now {aside}; the training begins anew.", stacklevel=2)
        return None


def _read(path: Path, settings: Any, like: Weights) -> Standing:
    _, tensors, description = files.read(path, KIND)
    try:
        circumstances = Circumstances(**description["circumstances"])
        plain = {name: description["standing"][name] for name in PLAIN}
    except (KeyError, TypeError) as error:
        raise FileError(f"{path} was written by another version of this code.") from error
    if description["settings"] != settings:
        raise FileError(f"{path} belongs to a training with other settings.")
    standing = Standing(circumstances, **plain)
    for name, tensor in tensors.items():
        tensor = tensor.clone()  # aligned as torch does it, on which the last bit may depend
        home, _, name = name.partition("/")
        if home == "moments":
            index, _, name = name.partition("/")
            standing.moments.setdefault(int(index), {})[name] = tensor
        else:
            getattr(standing, home)[name] = tensor
    for weights in (standing.weights, standing.best):
        if weights and _shapes(weights) != _shapes(like):
            raise FileError(
                f"{path} holds weights that do not fit the model: its code has changed since."
            )
    return standing


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}
