"""The training loop of everything that is trained here: `setfold.fit` and the experiments.

A problem says what a step computes; the loop does the rest. A step is several losses, each of which
is differentiated before the next is computed, so that memory holds the graph of one.

The random numbers of a step follow from the seed and the number of the step. A training that was
interrupted and resumed ends with the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from setfold.core.weights import first_tensor
from setfold.errors import DivergedError, InputError
from setfold.learning.checkpoints import Standing
from setfold.learning.processes import CPU, Processes
from setfold.learning.schedules import cosine
from setfold.learning.seeds import Draw, Seeds, seed_torch

LOOK_EVERY = 0.25  # seconds between reading losses, which synchronizes with a GPU
SAVE_EVERY = 30.0  # seconds between checkpoints


class Problem(Protocol):
    """What is trained."""

    larger_is_better: bool  # of the first number that `validate` returns

    def items(self) -> int:
        """Return the number of training items."""

    def losses(self, model: nn.Module, batch: Tensor) -> Iterator[Tensor]:
        """Yield losses of items (B,). The loss of the step is their sum over all processes."""

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Measure a model in evaluation mode, without gradients; the first number chooses.

        Returns the same in all processes; nothing if there is no validation.
        """


@dataclass(frozen=True)
class Plan:
    """How to train.

    Args:
        epochs: Passes over the training items.
        batch_size: Items per step, over all processes.
        validations: How often to validate, at equal distances; at the end in any case.
        seeds: Of the order of items and of steps.
        validate_first: Whether to validate before the first step, too.
        schedule: From the fraction that is done to a factor of the learning rate.
        clip: The largest norm of the gradients; None to disable clipping.
        patience: Validations without improvement before the training stops; None to disable it.
    """

    epochs: int
    batch_size: int
    validations: int
    seeds: Seeds
    validate_first: bool = False
    schedule: Callable[[float], float] = cosine
    clip: float | None = None
    patience: int | None = None


class Progress(NamedTuple):
    """Where a training is, for a callback.

    Attributes:
        step: The number of steps that are done.
        epoch: The number of epochs that are done.
        epochs: The number of epochs of the training.
        loss: The loss of the last step.
        history: Epoch, mean loss and validated numbers, one entry per validation.
        validated: Whether `history` has a new entry.

    >>> Progress(8, 2.0, 5, 0.25, {"epoch": [2.0], "loss": [0.5], "error": [0.1]}, True).numbers
    {'loss': 0.25, 'error': 0.1}
    """

    step: int
    epoch: float
    epochs: int
    loss: float
    history: dict[str, list[float]]
    validated: bool

    @property
    def numbers(self) -> dict[str, float]:
        """The loss, and what was validated last."""
        last = {n: v[-1] for n, v in self.history.items() if n not in ("epoch", "loss") and v}
        return {"loss": self.loss} | last


Callback = Callable[[Progress], None]


class Loop:
    """A training in progress.

    Args:
        model: The model, on its device.
        problem: What is trained.
        optimizer: Its learning rates are the largest ones; the plan's schedule reduces them.
        plan: How to train.
        standing: Where to continue. The model keeps its weights if no step was done.
        processes: The processes that train together.
        save: Called with the state from time to time, in the first process.
        callback: Called after validations, and a few times a second, in the first process.
    """

    def __init__(
        self,
        model: nn.Module,
        problem: Problem,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        *,
        standing: Standing | None = None,
        processes: Processes | None = None,
        save: Callable[[Standing], None] | None = None,
        callback: Callback | None = None,
    ) -> None:
        items = problem.items()
        if items < 1 or plan.epochs < 1:
            raise InputError(
                f"nothing to train: {items} items and {plan.epochs} epochs. "
                "Both must be at least 1."
            )
        self.model, self.problem, self.optimizer, self.plan = model, problem, optimizer, plan
        self.standing = standing or Standing()
        self.processes = processes or Processes()
        self.save, self.callback = save, callback
        self.items, self.per_epoch = items, math.ceil(items / plan.batch_size)
        self.steps = plan.epochs * self.per_epoch
        notes = max(plan.validations, 1)
        self.note_at = {self.steps * (i + 1) // notes for i in range(notes)}
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        weight = first_tensor([model])
        self.device = CPU if weight is None else weight.device
        self.losses: list[Tensor] = []  # losses of the last steps that were not read yet

    def run(self) -> None:
        """Train. The model ends with its best weights (the last without validation), evaluating."""
        if not self.standing.finished:
            with self.processes.together():
                self._train()
            self.processes.from_first()  # a process may have failed after its last step
        self.model.load_state_dict(self.standing.best)
        self.model.eval()

    @property
    def epoch(self) -> float:
        """The number of epochs that are done."""
        return self.standing.step / self.per_epoch

    def _train(self) -> None:
        standing = self.standing
        standing.history = standing.history or {"epoch": [], "loss": []}
        if standing.step:
            self.model.load_state_dict(standing.weights)
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": standing.moments, "param_groups": groups})
        self.processes.share(self.model.state_dict().values())
        self.started = time.monotonic() - standing.seconds
        self.cpu_started = time.process_time() - standing.cpu_seconds
        self.next_look, self.next_save = 0.0, time.monotonic() + SAVE_EVERY
        if self.plan.validate_first and not standing.history["epoch"]:
            self._note()
        self.model.train()
        for batch in self._batches():
            self._step(batch)
            self._look()
            if standing.finished:
                break

    def _batches(self) -> Iterator[Tensor]:
        """Yield the items of each remaining step.

        Every item occurs once per epoch. Batch sizes differ by at most one, so that no batch is too
        small for BatchNorm.
        """
        first = self.standing.step
        for epoch in range(first // self.per_epoch, self.plan.epochs):
            seed = self.plan.seeds.of(Draw.ORDER, epoch)
            order = torch.randperm(self.items, generator=torch.Generator().manual_seed(seed))
            yield from order.tensor_split(self.per_epoch)[self.standing.step % self.per_epoch :]

    def _step(self, batch: Tensor) -> None:
        plan, step = self.plan, self.standing.step
        seed_torch(plan.seeds.of(Draw.STEP, step, 0), self.device)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * plan.schedule(step / self.steps)
        total: Tensor | None = None
        for loss in self.problem.losses(self.model, batch):
            self.processes.from_first()  # all have a loss; a backward pass can be a collective
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        total = self.processes.sum_gradients(self.parameters, total)
        self.processes.share(self.model.buffers())
        if plan.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(total)
        self.standing.step += 1

    def _look(self) -> None:
        """After a step: validate, save and show progress if it is time."""
        standing, now = self.standing, time.monotonic()
        note = standing.step in self.note_at
        if not note and now < self.next_look:
            return
        self.next_look = now + LOOK_EVERY
        last = self._settle()
        if note:
            self._note()
            self.model.train()
        # The callback first: what it writes may be ahead of a checkpoint, but not behind, since a
        # finished training is never resumed.
        if self.processes.first and self.callback is not None:
            plan = self.plan
            self.callback(
                Progress(standing.step, self.epoch, plan.epochs, last, standing.history, note)
            )
        if self.processes.first and (note or now >= self.next_save):
            self._save()

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
        standing, history, patience = self.standing, self.standing.history, self.plan.patience
        count = standing.loss_count
        history["epoch"].append(self.epoch)
        history["loss"].append(standing.loss_sum / count if count else math.nan)
        standing.loss_sum, standing.loss_count = 0.0, 0
        found, stale = self._validate(), 0
        for name, value in found.items():
            history.setdefault(name, []).append(value)
        for values in [history[name] for name in found][:1]:
            best = (max if self.problem.larger_is_better else min)(values)
            stale = len(values) - 1 - values.index(best)
        if stale == 0:
            standing.best = {n: t.clone() for n, t in self.model.state_dict().items()}
        done = standing.step == self.steps
        standing.finished = done or (patience is not None and stale >= patience)

    def _validate(self) -> dict[str, float]:
        # The same seed at every validation, so that only the weights differ.
        torch.manual_seed(self.plan.seeds.of(Draw.VALIDATION))
        self.model.eval()
        with torch.no_grad():
            found = self.problem.validate(self.model)
        for name, value in list(found.items())[:1]:
            if math.isnan(value):
                raise self._diverged(name, value, self.standing.step)
        return found

    def _save(self) -> None:
        standing, now = self.standing, time.monotonic()
        self.next_save = now + SAVE_EVERY
        standing.seconds = now - self.started
        standing.cpu_seconds = time.process_time() - self.cpu_started
        standing.weights, standing.moments = {}, {}
        if not standing.finished:
            standing.weights = self.model.state_dict()
            standing.moments = self.optimizer.state_dict()["state"]
        if self.save is not None:
            self.save(standing)

    def _diverged(self, what: str, value: Any, step: int) -> DivergedError:
        return DivergedError(
            f"the {what} is {value} at step {step} of {self.steps}, in epoch "
            f"{step // self.per_epoch + 1}. Lower the learning rate, clip the gradients, or scale "
            "the features."
        )
