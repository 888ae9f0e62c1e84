"""Checkpoints of a training: safetensors files that are written atomically and never unpickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from setfold.core import persist
from setfold.errors import FileError, InputError

KIND = "training"

Weights = dict[str, Tensor]


@dataclass
class Standing:
    """The state of a training.

    Args:
        step: Number of steps done.
        seconds: Time for these steps.
        cpu_seconds: CPU time for these steps, of the first process.
        finished: Whether the training is finished.
        loss_sum: Sum of the losses since the last entry in `history`.
        loss_count: Number of losses in `loss_sum`.
        history: Epoch, loss and what was validated, one entry per validation.
        weights: Weights of the model; empty when finished.
        moments: Optimizer state by parameter; empty when finished.
        best: The best validated weights.
        notes: What a caller keeps beside it; serializable as JSON.
    """

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
    notes: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return everything but tensors and notes."""
        return {name: getattr(self, name) for name in PLAIN}

    def tensors(self) -> Weights:
        """Return all tensors by name."""
        found = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        found |= {f"best/{name}": tensor for name, tensor in self.best.items()}
        for place, moments in self.moments.items():
            for name, moment in moments.items():
                if isinstance(moment, Tensor):
                    found[f"moments/{place}/{name}"] = moment
                elif moment is not None:
                    raise InputError(
                        f"the optimizer keeps {name!r} as {type(moment).__name__}; checkpoints "
                        "hold tensors only. Use another optimizer, or no checkpoint."
                    )
        return found

    @classmethod
    def of(cls, plain: dict[str, Any], tensors: Weights, notes: dict[str, Any]) -> Standing:
        """Put a state together."""
        standing = cls(**plain, notes=notes)
        for path, tensor in tensors.items():
            home, _, name = path.partition("/")
            if home == "moments":
                place, _, name = name.partition("/")
                standing.moments.setdefault(int(place), {})[name] = tensor
            else:
                getattr(standing, home)[name] = tensor
        return standing


PLAIN = ("step", "seconds", "cpu_seconds", "finished", "loss_sum", "loss_count", "history")


def write(path: Path, standing: Standing, settings: Any) -> None:
    """Write a checkpoint of a training with these settings."""
    description = {"settings": settings, **standing.notes, "standing": standing.plain()}
    persist.write(path, KIND, standing.tensors(), description)


def read(path: Path, settings: Any, like: Weights) -> Standing | None:
    """Read the checkpoint of a training; return None if there is none.

    Args:
        path: The file.
        settings: The settings of the training; they must match those in the file.
        like: The weights of the model; names and shapes must match those in the file.

    Raises:
        FileError: The file is damaged, or belongs to another training.
    """
    if not path.exists():
        return None
    _, tensors, description = persist.read(path, KIND)
    try:
        plain = {name: description["standing"][name] for name in PLAIN}
        saved = description["settings"]
    except (KeyError, TypeError) as error:
        raise FileError(f"{path} was written by another version of this code.") from error
    if saved != settings:
        raise FileError(
            f"{path} is a checkpoint of a training with different settings. Use the same settings "
            "as before, or remove the file."
        )
    notes = {n: v for n, v in description.items() if n not in ("settings", "standing")}
    # cloned: torch's alignment of memory can affect the last bit
    standing = Standing.of(plain, {n: t.clone() for n, t in tensors.items()}, notes)
    for weights in (standing.weights, standing.best):
        if weights and _shapes(weights) != _shapes(like):
            raise FileError(
                f"{path} contains weights that do not match the model: its code has changed."
            )
    return standing


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}
