"""The training loop for sets of any size.

A step takes some sets. Sets that fit are encoded together, as ragged micro-batches of at most
`batch_rows` elements. A larger set is folded chunk by chunk, with exact gradients. So memory does
not depend on the size of a set.

The random numbers of a step depend on the seed and the number of the step only. A training that was
interrupted and resumed ends with the same bits.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from setfold.core import persist
from setfold.errors import FileError, SetfoldError
from setfold.folding.api import fold
from setfold.learning.dataset import SetDataset
from setfold.learning.metrics import Predictions, loss_of, measure, metric_name
from setfold.preprocessing.targets import Classes, Quantity, Target, target_of

SAVE_EVERY = 20.0  # seconds between checkpoints
KIND = "training"


class DivergedError(SetfoldError, ArithmeticError):
    """Raised if the loss of a training is not finite."""


@dataclass(frozen=True)
class Settings:
    """How to train.

    Args:
        epochs: Passes over the training sets.
        batch_sets: Sets per step.
        batch_rows: Elements that are encoded at a time.
        rate: The largest learning rate of AdamW; it rises for a twentieth of the steps and then
            falls to zero along a cosine.
        weight_decay: Weight decay of AdamW.
        clip: The largest norm of the gradients.
        patience: Epochs without improvement on the validation sets before training stops.
        seed: Of the order of sets, dropout and random slots.
        balanced: Whether to weigh classes inversely to their frequency.
    """

    epochs: int = 100
    batch_sets: int = 32
    batch_rows: int = 1 << 15
    rate: float = 2e-3
    weight_decay: float = 1e-2
    clip: float = 1.0
    patience: int = 20
    seed: int = 0
    balanced: bool = False


class Progress(NamedTuple):
    """Where a training is, for a callback."""

    epoch: float
    epochs: int
    loss: float
    validation: dict[str, float]


@dataclass
class _Standing:
    """What a checkpoint keeps."""

    step: int = 0
    epochs: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    metric: list[float] = field(default_factory=list)
    loss_sum: float = 0.0
    loss_count: int = 0
    finished: bool = False
    weights: dict[str, Tensor] = field(default_factory=dict)
    best: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[int, dict[str, Tensor]] = field(default_factory=dict)


PLAIN = (
    "step",
    "epochs",
    "losses",
    "validation",
    "metric",
    "loss_sum",
    "loss_count",
    "finished",
)


@dataclass(frozen=True)
class History:
    """The course of a training, one entry per epoch.

    Args:
        epochs: The number of epochs.
        losses: The training loss.
        validation: The validation loss.
        metric: The validation metric.
    """

    epochs: list[float]
    losses: list[float]
    validation: list[float]
    metric: list[float]


def fit(
    model: nn.Module,
    training: SetDataset,
    validation: SetDataset,
    settings: Settings,
    *,
    checkpoint: Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> History:
    """Train a model in place; it ends with the weights that are best on the validation sets.

    Args:
        model: A model whose head ends with `Classes` or `Quantity`.
        training: The training sets.
        validation: The sets on which training is stopped and the best weights are chosen.
        settings: How to train.
        checkpoint: A file for checkpoints. If it exists, the training continues from it.
        progress: Called after every step.

    Raises:
        DivergedError: The loss is not finite.
    """
    return _Fit(model, training, validation, settings, checkpoint, progress).run()


@torch.no_grad()
def predict(model: nn.Module, data: SetDataset, batch_rows: int) -> Predictions:
    """Return what a model predicts for all sets of a data set."""
    target = target_of(model)
    assert target is not None
    found = encode_all(model, data, batch_rows).double()
    scores = found.softmax(1) if isinstance(target, Classes) else found.squeeze(1)
    return Predictions(scores.numpy(), data.targets)


@torch.no_grad()
def encode_all(model: nn.Module, data: SetDataset, batch_rows: int) -> Tensor:
    """Return the output of a model in evaluation mode for all sets."""
    model.eval()
    found = [
        encode(model, data, batch, batch_rows)
        for batch in micro_batches(data.lengths, range(len(data)), batch_rows)
    ]
    data.release()
    return torch.cat(found)


def encode(model: nn.Module, data: SetDataset, sets: Sequence[int], batch_rows: int) -> Tensor:
    """Return the output of a model for some sets, which are one micro-batch."""
    dtype = next((weight.dtype for weight in model.parameters()), torch.float32)
    if len(sets) == 1 and data.lengths[sets[0]] > batch_rows:
        (number,) = sets
        total = int(data.lengths[number])

        def chunks() -> Iterator[Tensor]:
            for start in range(0, total, batch_rows):
                yield data.rows(number, start, start + batch_rows).unsqueeze(0).to(dtype)

        return fold(model, chunks)  # type: ignore[arg-type]
    rows, index = data.ragged(sets)
    found: Tensor = model(rows.to(dtype), index=index, batch_size=len(sets))
    return found


def micro_batches(lengths: np.ndarray, sets: Sequence[int], batch_rows: int) -> Iterator[list[int]]:
    """Split sets into lists of at most so many elements; a larger set is a list of its own.

    >>> list(micro_batches(np.array([3, 4, 9, 2]), [0, 1, 2, 3], batch_rows=8))
    [[0, 1], [2], [3]]
    """
    found: list[int] = []
    rows = 0
    for number in sets:
        size = int(lengths[number])
        if found and rows + size > batch_rows:
            yield found
            found, rows = [], 0
        found.append(number)
        rows += size
    if found:
        yield found


class _Fit:
    def __init__(
        self,
        model: nn.Module,
        training: SetDataset,
        validation: SetDataset,
        settings: Settings,
        checkpoint: Path | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        target = target_of(model)
        assert target is not None, "the head of the model must end with its target"
        self.model, self.training, self.validation = model, training, validation
        self.settings, self.path, self.progress = settings, checkpoint, progress
        self.target: Target = target
        self.per_epoch = math.ceil(len(training) / settings.batch_sets)
        self.steps = settings.epochs * self.per_epoch
        self.weights = _class_weights(target, training) if settings.balanced else None
        self.optimizer = torch.optim.AdamW(
            model.parameters(), settings.rate, weight_decay=settings.weight_decay, fused=True
        )
        self.standing = self._resume()
        self.next_save = time.monotonic() + SAVE_EVERY

    def run(self) -> History:
        standing, settings = self.standing, self.settings
        if not standing.epochs:
            self._validate(0.0, math.nan)  # what training starts from may be the best
        for step in range(standing.step, self.steps):
            if standing.finished:
                break
            self._step(step, self._batch(step))
            standing.step = step + 1
            if standing.step % self.per_epoch == 0:
                mean = standing.loss_sum / standing.loss_count
                self._validate(standing.step / self.per_epoch, mean)
                standing.loss_sum, standing.loss_count = 0.0, 0
                stale = len(standing.validation) - 1 - int(np.argmin(standing.validation))
                standing.finished = stale >= settings.patience
            if time.monotonic() >= self.next_save:
                self._save()
        standing.finished = True
        self._save()
        self.model.load_state_dict(standing.best)
        self.model.eval()
        return History(standing.epochs, standing.losses, standing.validation, standing.metric)

    def _batch(self, step: int) -> list[int]:
        epoch, place = divmod(step, self.per_epoch)
        generator = torch.Generator().manual_seed(_seed(self.settings.seed, "order", epoch))
        order = torch.randperm(len(self.training), generator=generator)
        return order.tensor_split(self.per_epoch)[place].tolist()

    def _step(self, step: int, sets: list[int]) -> None:
        settings, standing = self.settings, self.standing
        torch.manual_seed(_seed(settings.seed, "step", step))
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate * _schedule(step / self.steps)
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total, whole = 0.0, self._weight(sets)
        for part in micro_batches(self.training.lengths, sets, settings.batch_rows):
            found = encode(self.model, self.training, part, settings.batch_rows)
            loss = self._loss(found, self.training.targets[part]) / whole
            if not math.isfinite(loss.item()):
                raise DivergedError(
                    f"the loss is {loss.item()} at step {step} of {self.steps}. Lower the learning "
                    "rate, or scale the features with --scale robust."
                )
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        standing.loss_sum += total
        standing.loss_count += 1
        if self.progress is not None:
            shown = dict(zip(("loss", metric_name(self.target)), self._latest(), strict=True))
            self.progress(Progress((step + 1) / self.per_epoch, settings.epochs, total, shown))

    def _latest(self) -> tuple[float, float]:
        return self.standing.validation[-1], self.standing.metric[-1]

    def _weight(self, sets: list[int]) -> float:
        """Return the weight of all sets of a step."""
        if self.weights is None:
            return float(len(sets))
        return float(self.weights[self.training.targets[sets]].sum())

    def _loss(self, found: Tensor, targets: np.ndarray) -> Tensor:
        wanted = torch.from_numpy(targets)
        if isinstance(self.target, Classes):
            weights = None if self.weights is None else self.weights.to(found.dtype)
            return cross_entropy(found, wanted, weights, reduction="sum")
        scale = self.target.scale
        wide = wanted.to(found.dtype)
        return mse_loss(found.squeeze(1) / scale, wide / scale, reduction="sum")

    def _validate(self, epoch: float, loss: float) -> None:
        standing = self.standing
        torch.manual_seed(_seed(self.settings.seed, "validation", 0))
        found = predict(self.model, self.validation, self.settings.batch_rows)
        standing.epochs.append(epoch)
        standing.losses.append(loss)
        standing.validation.append(loss_of(self.target, found))
        standing.metric.append(measure(self.target, found)[metric_name(self.target)])
        if standing.validation[-1] == min(standing.validation):
            standing.best = {n: t.clone() for n, t in self.model.state_dict().items()}
        self.training.release()

    # ---- checkpoints ---------------------------------------------------------------------------

    def _description(self) -> dict[str, Any]:
        return {"settings": asdict(self.settings), "model": str(self.model)}

    def _save(self) -> None:
        self.next_save = time.monotonic() + SAVE_EVERY
        if self.path is None:
            return
        standing = self.standing
        tensors = {f"best/{name}": tensor for name, tensor in standing.best.items()}
        if not standing.finished:
            tensors |= {f"weights/{n}": t for n, t in self.model.state_dict().items()}
            for place, moments in self.optimizer.state_dict()["state"].items():
                tensors |= {f"moments/{place}/{n}": t for n, t in moments.items()}
        plain = {name: getattr(standing, name) for name in PLAIN}
        plain["losses"] = [None if math.isnan(loss) else loss for loss in standing.losses]
        persist.write(self.path, KIND, tensors, self._description() | {"standing": plain})

    def _resume(self) -> _Standing:
        if self.path is None or not self.path.exists():
            return _Standing()
        _, tensors, description = persist.read(self.path, KIND)
        plain = description.get("standing", {})
        if {n: description.get(n) for n in ("settings", "model")} != self._description():
            raise FileError(
                f"{self.path} is a checkpoint of a training with other settings. Start over with "
                "--restart."
            )
        plain["losses"] = [math.nan if loss is None else loss for loss in plain["losses"]]
        standing = _Standing(**plain)
        for path, tensor in tensors.items():
            home, _, name = path.partition("/")
            own = tensor.clone()  # aligned as torch does it, which affects the last bit
            if home == "moments":
                place, _, name = name.partition("/")
                standing.moments.setdefault(int(place), {})[name] = own
            else:
                getattr(standing, home)[name] = own
        if not standing.finished:
            self.model.load_state_dict(standing.weights)
            groups = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({"state": standing.moments, "param_groups": groups})
        return standing


def _schedule(progress: float, warmup: float = 0.05) -> float:
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def _class_weights(target: Target, data: SetDataset) -> Tensor | None:
    if isinstance(target, Quantity):
        return None
    counts = np.bincount(data.targets, minlength=len(target.labels))
    return torch.from_numpy(len(data) / (len(counts) * np.maximum(counts, 1)))


def _seed(seed: int, use: str, number: int) -> int:
    text = f"{use} {seed} {number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
