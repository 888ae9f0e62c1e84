"""Trains both models, or loads them if they were trained before."""

import hashlib
import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from demo import completion, digits, processes
from demo.live import classifier, shapes
from demo.live.parts import Part, digit_part, shape_part

Tensors = dict[str, Tensor]


class Job(NamedTuple):
    """A model to train.

    Args:
        title: what the progress bar says.
        file: where the weights are kept.
        mark: what the weights depend on.
        steps: the training steps.
        train: trains it; called with a counter.
    """

    title: str
    file: Path
    mark: str
    steps: int
    train: Callable[[Any], Tensors]

    def saved(self) -> Tensors | None:
        """Return the weights that were saved before; None if there are none of this model."""
        if not self.file.exists():
            return None
        with safe_open(self.file, "pt") as opened:
            if (opened.metadata() or {}).get("mark") != self.mark:
                return None
            return {name: opened.get_tensor(name) for name in opened.keys()}

    def run(self, done: Any) -> None:
        """Train it, and keep the weights; runs in its own process."""
        tensors = self.train(done)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial_file = self.file.with_suffix(".part")
        save_file(tensors, partial_file, {"mark": self.mark})
        partial_file.replace(self.file)


def train_digits(steps: int, done: Any) -> Tensors:
    """Train the model of `make demo` that has slots on a grid."""
    return _weights(completion.train(completion.grid_model, steps, done))


def train_shapes(steps: int, done: Any) -> Tensors:
    """Train the model that classifies point clouds."""
    return _weights(classifier.train(shapes.load(), steps, done))


def load(out: Path, digit_steps: int, shape_steps: int | None, console: Console) -> dict[str, Part]:
    """Return both parts of the page; train what is not in the folder `out`, side by side."""
    clouds = shapes.load()
    steps = shape_steps or classifier.STEPS[clouds.source]
    jobs = [
        Job(
            "complete digits",
            out / "digits.safetensors",
            _mark(digit_steps, completion, digits),
            digit_steps,
            partial(train_digits, digit_steps),
        ),
        Job(
            "classify shapes",
            out / "shapes.safetensors",
            _mark([steps, clouds.source, clouds.classes], classifier, shapes),
            steps,
            partial(train_shapes, steps),
        ),
    ]
    _train([job for job in jobs if job.saved() is None], console)
    complete, classify = completion.grid_model(), classifier.Classifier(len(clouds.classes))
    for job, model in zip(jobs, (complete, classify), strict=True):
        model.load_state_dict(job.saved() or {})
    return {"digits": digit_part(complete), "shapes": shape_part(classify, clouds)}


def _train(jobs: list[Job], console: Console) -> None:
    """Train models in one process each, with progress bars."""
    if not jobs:
        return
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        tasks = [bars.add_task(job.title, total=job.steps) for job in jobs]

        def show(done: list[int]) -> None:
            for task, steps_done in zip(tasks, done, strict=True):
                bars.update(task, completed=steps_done)

        processes.run([job.run for job in jobs], show)
        show([job.steps for job in jobs])


def _weights(model: nn.Module) -> Tensors:
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


def _mark(chosen: Any, *modules: Any) -> str:
    """Return a digest of what weights depend on: choices, and the code that trains."""
    text = json.dumps(chosen) + "".join(inspect.getsource(module) for module in modules)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
