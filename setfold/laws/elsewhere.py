"""A fold in another process, for the law that states from different processes merge."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from setfold.core import persist as files
from setfold.core.models import load, save
from setfold.core.state import SetState
from setfold.core.structure import describe, foreign_names
from setfold.errors import SetfoldError

MODEL, ELEMENTS, STATE = "model.safetensors", "elements.safetensors", "state.safetensors"
TIMEOUT = 3600  # seconds; ends a process that hangs, however busy the machine is


def fold_in_another_process(model: Any, elements: Tensor, frame: tuple[Tensor, ...]) -> SetState:
    """Fold elements in a new Python process.

    Args:
        model: a streaming encoder that can be saved.
        elements: (B, n, d).
        frame: the slots to begin with.

    Raises:
        DescriptionError: the other process cannot load the model.
        SetfoldError: the other process failed.
    """
    allow = sorted(foreign_names(describe(model)))
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder, MODEL))
        tensors = {"elements": elements} | {f"slots.{i}": s for i, s in enumerate(frame)}
        description = {"allow": allow, "training": model.training}
        files.write(Path(folder, ELEMENTS), "chunk", tensors, description)
        command = [sys.executable, "-m", "setfold.laws.elsewhere", folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise SetfoldError(f"the process that folds elements failed: {last}")
        return SetState.load(Path(folder, STATE))


def _fold_here(folder: Path) -> None:
    """Fold in the other process: read the files in the folder, write the state."""
    torch.set_num_threads(1)
    _, tensors, description = files.read(folder / ELEMENTS, "chunk")
    model: Any = load(folder / MODEL, allow=description["allow"]).train(description["training"])
    elements = tensors.pop("elements")
    slots = [tensors[f"slots.{i}"] for i in range(len(tensors))]
    with torch.no_grad():
        empty = model.initial_state(elements.shape[0], **({"slots": slots} if slots else {}))
        model.update(empty, elements).save(folder / STATE)


if __name__ == "__main__":
    _fold_here(Path(sys.argv[1]))
