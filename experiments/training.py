"""The training loop: trains any task, on one or several processes, and can resume at any time.

The random numbers of a step depend only on the seed and the step number (and, when fine-tuning, on
the number of earlier trainings). No generator state needs to be saved, and an interrupted training
that is resumed ends with bitwise the same weights on the same machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from rich.console import Console
from torch import Tensor, nn

from experiments import checkpoints
from experiments.checkpoints import Standing
from experiments.processes import circumstances, hold_together, launch, mean_of
from experiments.progress import Display, Log
from experiments.recipe import Task, Training, as_json
from experiments.records import Circumstances
from setfold import InputError, SetfoldError
from setfold.core.persist import write_atomically

LOOK_EVERY = 0.25  # seconds between reading losses, which synchronises with a GPU
SAVE_EVERY = 45.0  # seconds between checkpoints
ASK_EVERY = 1.0  # seconds between attempts to acquire a lock


class Draw(StrEnum):
    """The purpose of random numbers; each has its own stream."""

    WEIGHTS = "weights"
    ORDER = "order"
    STEP = "step"
    VALIDATION = "validation"
    MEASUREMENT = "measurement"


class DivergedError(SetfoldError, ArithmeticError):
    """Raised if the loss is not finite or the validation metric is NaN."""


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


def seed_for(use: Draw, *numbers: int) -> int:
    """Derive a 63-bit seed from its purpose and some numbers.

    >>> seed_for(Draw.STEP, 0, 1) != seed_for(Draw.STEP, 1, 0)
    True
    """
    text = " ".join([use, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed torch like `torch.manual_seed`, but only for the device in use.

    `torch.manual_seed` takes a millisecond, because it formats a traceback for every other device.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


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
    fabric = launch(device, precision, threads)
    console = (console or Console()) if fabric.is_global_zero else Console(quiet=True)
    folder = out / "trainings" / _name(training, precision)
    here = circumstances(fabric, precision)
    announced = False
    while True:
        with hold_together(fabric, folder / "lock") as held:
            if held:
                fit = _Fit(training, fabric, folder, here, console)
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
    """A training in progress."""

    def __init__(
        self,
        training: Training[Task],
        fabric: Fabric,
        folder: Path,
        here: Circumstances,
        console: Console,
    ) -> None:
        self.training, self.fabric, self.folder, self.console = training, fabric, folder, console
        self.task, self.here = training.task, here
        items = self.task.items()
        if items < 1 or training.epochs < 1:
            raise InputError(
                f"nothing to train: {items} items and {training.epochs} epochs. "
                "Both must be at least 1."
            )
        self.steps_per_epoch = math.ceil(items / training.batch_size)
        self.steps = training.epochs * self.steps_per_epoch
        if items // self.steps_per_epoch < fabric.world_size:
            raise InputError(
                f"cannot split batches of {items // self.steps_per_epoch} items between "
                f"{fabric.world_size} processes. Start fewer processes or use a larger batch_size."
            )
        notes = max(training.validations, 1)
        self.note_at = {self.steps * (i + 1) // notes for i in range(notes)}
        self.settings = as_json(training)
        torch.manual_seed(self._seed(Draw.WEIGHTS))
        self.model = self.task.build()
        standing = None
        if fabric.is_global_zero:
            standing = checkpoints.read(folder, self.settings, self.model.state_dict())
        self.standing: Standing = fabric.broadcast(standing) or Standing(here)
        self.losses: list[Tensor] = []  # losses of the last steps that were not read yet

    def _seed(self, use: Draw, *numbers: int) -> int:
        """Derive a seed that differs from those of the training it starts from."""
        stage = _stage(self.training)
        return seed_for(use, self.training.seed, *numbers, *([stage] if stage else []))

    def begin_with(self, start: Trained) -> None:
        """Start from the weights of another training."""
        self.model.load_state_dict(start.model.state_dict())
        self.standing.circumstances = replace(self.here, commit=start.circumstances.commit)

    def run(self) -> Trained:
        """Run the remaining steps and return the trained model."""
        if not self.standing.finished:
            self._fit()
        standing = self.fabric.broadcast(self.standing)
        self.model.load_state_dict(standing.best)
        self.fabric.to_device(self.model)
        return Trained(
            self.model.eval(),
            standing.history,
            standing.seconds,
            standing.cpu_seconds,
            self.folder,
            standing.circumstances,
        )

    def _fit(self) -> None:
        standing = self.standing
        names = ("epoch", "loss", self.task.metric)[: 3 if self.training.validations else 2]
        standing.history = standing.history or {name: [] for name in names}
        standing.circumstances = standing.circumstances.then(self.here.commit)
        self._set_up()
        self.started = time.monotonic() - standing.seconds
        self.cpu_started = time.process_time() - standing.cpu_seconds
        self.next_look, self.next_save = 0.0, time.monotonic() + SAVE_EVERY
        self.log = None
        if self.fabric.is_global_zero:
            text = json.dumps(self.settings, indent=2) + "\n"
            write_atomically(self.folder / "settings.json", text.encode())
            self.log = Log(self.folder, standing.history, standing.step)
        try:
            with Display(self.console, self.training.epochs, self._epoch()) as self.display:
                for batch in self._batches():
                    self._step(batch)
                    self._look()
                    if standing.finished:
                        break
        finally:
            if self.log is not None:
                self.log.close()

    def _set_up(self) -> None:
        training, standing = self.training, self.standing
        # The fused implementation is three times as fast, also on the CPU.
        self.optimiser = torch.optim.Adam(
            self.model.parameters(), training.rate, weight_decay=training.weight_decay, fused=True
        )
        self.wrapped, self.stepper = self.fabric.setup(self.model, self.optimiser)
        if standing.step:
            self.model.load_state_dict(standing.weights)
            groups = self.optimiser.state_dict()["param_groups"]
            self.optimiser.load_state_dict({"state": standing.moments, "param_groups": groups})
        self.wrapped.train()

    def _epoch(self) -> float:
        return self.standing.step / self.steps_per_epoch

    def _batches(self) -> Iterator[Tensor]:
        """Yield the items of each remaining step.

        Every item occurs once per epoch. Batch sizes differ by at most one, so that no batch is too
        small for BatchNorm.
        """
        for epoch in range(self.standing.step // self.steps_per_epoch, self.training.epochs):
            generator = torch.Generator().manual_seed(self._seed(Draw.ORDER, epoch))
            order = torch.randperm(self.task.items(), generator=generator)
            batches = order.tensor_split(self.steps_per_epoch)
            yield from batches[self.standing.step - epoch * self.steps_per_epoch :]

    def _step(self, batch: Tensor) -> None:
        training, fabric, step = self.training, self.fabric, self.standing.step
        seed_torch(self._seed(Draw.STEP, step, fabric.global_rank), fabric.device)
        for group in self.optimiser.param_groups:
            group["lr"] = training.rate * training.schedule.at(step / self.steps)
        share = batch.tensor_split(fabric.world_size)[fabric.global_rank]
        loss = self.task.loss(self.wrapped, fabric.to_device(self.task.batch(share)))
        # Gradients are averaged over processes, and shares can differ by one item.
        fabric.backward(loss * (len(share) * fabric.world_size / len(batch)))
        if training.clip is not None:
            fabric.clip_gradients(
                self.wrapped, self.stepper, max_norm=training.clip, error_if_nonfinite=False
            )
        self.stepper.step()
        self.optimiser.zero_grad()
        self.losses.append(loss.detach())
        self.standing.step += 1

    def _look(self) -> None:
        """After a step: validate, save and show progress if it is time."""
        note, now = self.standing.step in self.note_at, time.monotonic()
        if not note and now < self.next_look:
            return
        self.next_look = now + LOOK_EVERY
        last = self._settle()
        if note:
            self._note()
        # Log first: resuming repairs a log that is ahead, but a finished training is never resumed.
        if note and self.log is not None:
            self.log.note(self.standing.history, self.standing.step)
        if self.fabric.is_global_zero and (note or now >= self.next_save):
            self._save()
        validated = self.standing.history.get(self.task.metric)
        shown = {"loss": last} | ({self.task.metric: validated[-1]} if validated else {})
        self.display.show(self._epoch(), shown)

    def _settle(self) -> float:
        """Accumulate the losses that were not read yet, and return the last one."""
        standing = self.standing
        losses = torch.stack(self.losses).tolist()
        for place, loss in enumerate(losses, standing.step - len(losses)):
            if not math.isfinite(loss):
                raise self._diverged("loss", loss, place)
            standing.loss_sum += loss  # one by one, so that the sum does not depend on timing
        standing.loss_count += len(losses)
        self.losses.clear()
        return float(losses[-1])

    def _note(self) -> None:
        """Validate, and keep the weights if they are the best so far."""
        standing, history = self.standing, self.standing.history
        history["epoch"].append(self._epoch())
        history["loss"].append(mean_of(self.fabric, standing.loss_sum / standing.loss_count))
        standing.loss_sum, standing.loss_count = 0.0, 0
        stale, values = 0, history.get(self.task.metric)
        if values is not None:
            values.append(self._validate())
            best = (max if self.task.larger_is_better else min)(values)
            stale = len(values) - 1 - values.index(best)
        if stale == 0:
            standing.best = {n: t.clone() for n, t in self.model.state_dict().items()}
        patience = self.training.patience
        standing.finished = standing.step == self.steps or (
            patience is not None and stale >= patience
        )

    def _validate(self) -> float:
        value: Any = None
        if self.fabric.is_global_zero:
            # Use the same seed at every validation, so that only the weights differ.
            torch.manual_seed(self._seed(Draw.VALIDATION))
            self.model.eval()
            with torch.no_grad():
                value = self.task.evaluate(self.model, "validation")[self.task.metric]
            self.wrapped.train()
        value = float(self.fabric.broadcast(value))
        if math.isnan(value):
            raise self._diverged(f"validation {self.task.metric}", value, self.standing.step)
        return value

    def _save(self) -> None:
        standing = self.standing
        now = time.monotonic()
        self.next_save = now + SAVE_EVERY
        standing.seconds = now - self.started
        standing.cpu_seconds = time.process_time() - self.cpu_started
        standing.weights, standing.moments = {}, {}
        if not standing.finished:
            standing.weights = self.model.state_dict()
            standing.moments = self.optimiser.state_dict()["state"]
        checkpoints.write(standing, self.folder, self.settings)

    def _diverged(self, what: str, value: float, step: int) -> DivergedError:
        return DivergedError(
            f"the {what} is {value} at step {step} of {self.steps}, in epoch "
            f"{step // self.steps_per_epoch + 1}. Try a lower learning rate or gradient clipping. "
            f"Settings of the training: {json.dumps(self.settings)}."
        )
