"""Train any task, on one or several processes; a training can be resumed at any time.

The loop is that of `setfold.fit` (setfold/learning/loop.py). Here are what experiments add: a folder
for each training, found again by its settings; a lock; the circumstances; logs.
"""

from __future__ import annotations

import dataclasses
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from experiments.processes import Place, circumstances, hold_together, launch
from experiments.progress import Display, Log
from experiments.recipe import Task, Training, as_json
from experiments.records import Circumstances
from setfold import DivergedError, FileError, InputError, SetfoldError
from setfold.core.persist import write_atomically
from setfold.learning import checkpoints
from setfold.learning.checkpoints import Standing
from setfold.learning.loop import Loop, Plan, Progress
from setfold.learning.seeds import Draw, Seeds, seed_for, seed_torch

NAME = "training.safetensors"
ASK_EVERY = 1.0  # seconds between attempts to acquire a lock


class BusyError(SetfoldError):
    """Raised if another process is running this training."""


@dataclass(frozen=True)
class Trained:
    """The result of a training.

    Args:
        model: model in eval mode, with the best validated weights (the last without validation).
        history: epoch, loss and validation metric at each validation.
        seconds: total training time, including time before a resume.
        cpu_seconds: total CPU time, of the first process.
        folder: folder of the training.
        circumstances: code, versions and machine of the training.
    """

    model: nn.Module
    history: dict[str, list[float]]
    seconds: float
    cpu_seconds: float
    folder: Path
    circumstances: Circumstances


def train(
    training: Training[Task],
    *,
    out: Path,
    device: str = "auto",
    precision: str = "32-true",
    threads: int | None = None,
    console: Console | None = None,
    wait: bool = True,
) -> Trained:
    """Run a training, resume it, or load it if it is finished.

    Args:
        training: the training to run.
        out: folder for all trainings; each has its own subfolder.
        device: "auto", "cpu", "cuda" or "mps".
        precision: "32-true" or "bf16-mixed".
        threads: number of CPU threads of torch; None for torch's default.
        console: console for progress; None for the default.
        wait: whether to wait if another process runs the same training. If False, raises BusyError.
    """
    place = launch(device, precision, threads)
    console = (console or Console()) if place.processes.first else Console(quiet=True)
    folder = out / "trainings" / _name(training, precision)
    announced = False
    while True:
        with hold_together(place.processes, folder / "lock") as held:
            if held:
                fit = _Fit(training, place, folder, console)
                if training.start is not None and not fit.standing.step:
                    start = train(
                        training.start,
                        out=out,
                        device=device,
                        precision=precision,
                        threads=threads,
                        console=console,
                        wait=wait,
                    )
                    fit.begin_with(start)
                return fit.run()
        if not wait:
            raise BusyError(f"another process is running the training in {folder}.")
        if not announced:
            console.print(f"waiting for another process that trains in {folder}", soft_wrap=True)
            announced = True
        time.sleep(ASK_EVERY)


def _name(training: Training[Task], precision: str) -> str:
    """Return the name of a training's folder."""
    name = f"{type(training.task).__name__.lower()}-{training.key}"
    return name if precision == "32-true" else f"{name}-{precision}"


def _stage(training: Training[Task]) -> int:
    """Return the number of trainings that this one starts from."""
    return 0 if training.start is None else 1 + _stage(training.start)


class _Fit:
    """A training with its files."""

    def __init__(
        self, training: Training[Task], place: Place, folder: Path, console: Console
    ) -> None:
        self.training, self.place, self.folder, self.console = training, place, folder, console
        self.here = circumstances(place)
        self.seeds = Seeds(training.seed, _stage(training))
        self.settings = as_json(training)
        torch.manual_seed(self.seeds.of(Draw.WEIGHTS))
        self.model = training.task.build().to(place.device)
        standing = None
        if place.processes.first:
            standing = _read(folder / NAME, self.settings, self.model.state_dict())
        found = place.processes.share_standing(standing)
        self.standing = found or Standing(notes=_noted(self.here))

    def begin_with(self, start: Trained) -> None:
        """Start from the weights of another training."""
        self.model.load_state_dict(start.model.state_dict())
        self.standing.notes = _noted(replace(self.here, commit=start.circumstances.commit))

    def run(self) -> Trained:
        """Run the remaining steps and return the trained model."""
        standing = self.standing
        loop = self._loop()
        if standing.finished:
            loop.run()
        else:
            made = Circumstances(**standing.notes["circumstances"])
            standing.notes = _noted(made.then(self.here.commit))
            self._run(loop)
        return Trained(
            self.model,
            standing.history,
            standing.seconds,
            standing.cpu_seconds,
            self.folder,
            Circumstances(**standing.notes["circumstances"]),
        )

    def _loop(self) -> Loop:
        training = self.training
        # The fused implementation is three times as fast, also on the CPU.
        optimizer = torch.optim.Adam(
            self.model.parameters(), training.rate, weight_decay=training.weight_decay, fused=True
        )
        plan = Plan(
            training.epochs,
            training.batch_size,
            training.validations,
            self.seeds,
            schedule=training.schedule.at,
            clip=training.clip,
            patience=training.patience,
        )
        return Loop(
            self.model,
            _OfTask(training, self.place),
            optimizer,
            plan,
            standing=self.standing,
            processes=self.place.processes,
            save=lambda standing: checkpoints.write(self.folder / NAME, standing, self.settings),
            callback=self._show,
        )

    def _run(self, loop: Loop) -> None:
        self.log = None
        if self.place.processes.first:
            text = json.dumps(self.settings, indent=2) + "\n"
            write_atomically(self.folder / "settings.json", text.encode())
            self.log = Log(self.folder, self.standing.history, self.standing.step)
        try:
            with Display(self.console, self.training.epochs, loop.epoch) as self.display:
                loop.run()
        except DivergedError as error:
            settings = json.dumps(self.settings)
            raise DivergedError(f"{error} Settings of the training: {settings}.") from error
        finally:
            if self.log is not None:
                self.log.close()

    def _show(self, now: Progress) -> None:
        if now.validated and self.log is not None:
            self.log.note(now.history, now.step)
        self.display.show(now.epoch, now.numbers)


class _OfTask:
    """A task as the loop takes it: each process takes a share of the items of a step."""

    def __init__(self, training: Training[Task], place: Place) -> None:
        self.training, self.task, self.place = training, training.task, place
        self.larger_is_better = self.task.larger_is_better
        items, size = self.task.items(), place.processes.size
        least = items // max(1, -(-items // training.batch_size))
        if size > 1 and least < size:
            raise InputError(
                f"cannot split batches of {least} items between {size} processes. Start fewer "
                "processes or use a larger batch_size."
            )

    def items(self) -> int:
        return self.task.items()

    def losses(self, model: nn.Module, batch: Tensor) -> Iterator[Tensor]:
        processes = self.place.processes
        if processes.rank:  # all were seeded alike
            seed_torch(seed_for(Draw.STEP, torch.initial_seed(), processes.rank), processes.device)
        share = batch.tensor_split(processes.size)[processes.rank]
        with self.place.rounded():
            loss = self.task.loss(model, self.place.moved(self.task.batch(share)))
        yield loss * (len(share) / len(batch))

    def validate(self, model: nn.Module) -> dict[str, float]:
        if not self.training.validations:
            return {}
        value: Any = None
        if self.place.processes.first:
            value = self.task.evaluate(model, "validation")[self.task.metric]
        return {self.task.metric: float(self.place.processes.from_first(value))}


def _noted(made: Circumstances) -> dict[str, Any]:
    return {"circumstances": dataclasses.asdict(made)}


def _read(path: Path, settings: Any, like: dict[str, Tensor]) -> Standing | None:
    """Read a checkpoint; one that cannot be used is renamed, and the training starts over."""
    try:
        standing = checkpoints.read(path, settings, like)
        if standing is not None and "circumstances" not in standing.notes:
            raise FileError(f"{path} was written by another version of this code.")
    except FileError as error:
        aside = path.with_name(f"{path.name}.aside-{time.time_ns()}")
        path.rename(aside)
        warnings.warn(
            f"{error} Renamed it to {aside}; the training starts from scratch.", stacklevel=2
        )
        return None
    return standing
