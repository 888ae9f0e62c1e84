"""`fit`: train a model on sets of any size."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from setfold.core.arguments import check_sizes
from setfold.core.persist import as_path
from setfold.core.weights import first_tensor
from setfold.errors import InputError
from setfold.learning import checkpoints
from setfold.learning.checkpoints import Standing
from setfold.learning.encoding import Sets, encode, lengths_of, micro_batches, pair, release
from setfold.learning.loop import Callback, Loop, Plan
from setfold.learning.processes import CPU, Processes
from setfold.learning.schedules import cosine
from setfold.learning.seeds import Seeds

RATE, WEIGHT_DECAY = 2e-3, 1e-2  # of the default optimizer

Loss = Callable[[Tensor, Any], Tensor]
Validate = Callable[[nn.Module], dict[str, float]]
History = dict[str, list[float]]


@dataclass(frozen=True)
class FitSettings:
    """How `fit` trains.

    Args:
        epochs: Passes over the training sets.
        batch_sets: Sets per step, over all processes.
        batch_rows: Elements that are encoded at a time.
        schedule: From the fraction of the training that is done, in [0, 1), to a factor of the
            optimizer's learning rate. By default the rate rises for a twentieth of the steps, then
            falls to zero along a cosine.
        clip: The largest norm of the gradients; None for no limit.
        patience: Epochs without improvement on the validation sets before training stops; None to
            never stop early.
        seed: Of the order of sets, dropout and random slots.

    >>> FitSettings(epochs=20, clip=None).batch_sets
    32
    """

    epochs: int = 100
    batch_sets: int = 32
    batch_rows: int = 1 << 15
    schedule: Callable[[float], float] = cosine
    clip: float | None = 1.0
    patience: int | None = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_sizes(epochs=self.epochs, batch_sets=self.batch_sets, batch_rows=self.batch_rows)
        check_sizes(0, seed=self.seed)
        if self.patience is not None:
            check_sizes(patience=self.patience)
        if not callable(self.schedule):
            raise InputError(f"schedule must be a function; got {self.schedule!r:.60}.")
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip must be positive, or None; got {self.clip!r:.60}.")

    def described(self) -> dict[str, Any]:
        """Return the settings as JSON; the schedule by its name."""
        name = getattr(self.schedule, "__qualname__", type(self.schedule).__qualname__)
        return asdict(self) | {"schedule": name}


def fit(
    model: nn.Module,
    sets: Sets,
    *,
    loss: Loss,
    validation: Sets | Validate | None = None,
    settings: FitSettings | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    checkpoint: str | Path | None = None,
    callback: Callback | None = None,
) -> History:
    """Train a model on sets of any size, in place.

    Sets of a step that fit are encoded together, without padding. A set with more than `batch_rows`
    elements is folded chunk by chunk, with exact gradients. So memory does not depend on the size
    of a set.

    In a process group (`torchrun`, `torch.distributed.init_process_group`), all processes call it
    with the same arguments. They share out the sets of each step, and spread a set with more than
    `batch_rows` elements over all of them. The result is that of one process, up to rounding and to
    what features draw at random. The first process writes checkpoints and calls the callback.

    Args:
        model: A set encoder, usually with a head. It ends in evaluation mode, with the weights that
            were best on the validation sets; without these, with the last.
        sets: The training sets, pairs of elements `(n_i, d)` and a label: a list, or a map-style
            dataset. Its attribute `lengths`, if it has one, is the number of elements of each set;
            otherwise every set is read once to find out. Elements are tensors or arrays, which may
            be memory-mapped.
        loss: A function of outputs and labels that returns the mean over the sets, such as
            `torch.nn.functional.cross_entropy`, or one number for each set.
        validation: Sets whose loss chooses the best weights, after each epoch; or a function of the
            model that returns numbers by name, the first of which is minimized.
        settings: How to train.
        optimizer: By default AdamW with a rate of 2e-3 and a weight decay of 0.01.
        checkpoint: A file for checkpoints. If it exists, the training continues from it and ends
            with the same bits, also after a kill.
        callback: Called with a `Progress` after each validation, and a few times a second.

    Returns:
        The history: epoch, mean training loss and validated numbers, one entry per epoch. With
        validation, the first entry is of the model before training.

    Raises:
        DivergedError: The loss is not finite.
        InputError: There is nothing to train, or sets or losses have another form.
        FileError: The checkpoint is damaged, or is of a training with other settings.

    >>> import setfold
    >>> _ = torch.manual_seed(0)
    >>> sets = [(torch.randn(5 + i, 2) + i % 2, i % 2) for i in range(40)]
    >>> model = setfold.DeepSets(nn.Linear(2, 8), 8, "mean", nn.Linear(8, 2))
    >>> history = fit(
    ...     model,
    ...     sets[:30],
    ...     loss=nn.functional.cross_entropy,
    ...     validation=sets[30:],
    ...     settings=FitSettings(epochs=5),
    ... )
    >>> history["validation loss"][-1] < history["validation loss"][0]
    True
    """
    settings = settings or FitSettings()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            f"{type(model).__name__} has no trainable parameters. Give it features or a head."
        )
    if optimizer is None:
        optimizer = torch.optim.AdamW(
            model.parameters(), RATE, weight_decay=WEIGHT_DECAY, fused=True
        )
    weight = first_tensor([model])
    processes = Processes.current(CPU if weight is None else weight.device)
    problem = _SetProblem(sets, loss, validation, settings.batch_rows, processes)
    plan = Plan(
        settings.epochs,
        settings.batch_sets,
        settings.epochs,
        Seeds(settings.seed),
        validation is not None,
        settings.schedule,
        settings.clip,
        settings.patience,
    )
    path = None if checkpoint is None else as_path(checkpoint)
    described = {
        "settings": settings.described(),
        "model": str(model),
        "optimizer": str(optimizer),
        "sets": len(sets),
    }
    described = json.loads(json.dumps(described))
    standing = _read(path, described, model, processes)

    def save(standing: Standing) -> None:
        if path is not None:
            checkpoints.write(path, standing, described)

    loop = Loop(
        model,
        problem,
        optimizer,
        plan,
        standing=standing,
        processes=processes,
        save=save,
        callback=callback,
    )
    loop.run()
    return loop.standing.history


def _read(
    path: Path | None, described: Any, model: nn.Module, processes: Processes
) -> Standing | None:
    """Read a checkpoint in the first process, for all."""
    if path is None:
        return None
    standing = None
    with processes.together():
        if processes.first:
            standing = checkpoints.read(path, described, model.state_dict())
    return processes.share_standing(standing)


class _SetProblem:
    """Sets with labels, as the loop takes them."""

    larger_is_better = False

    def __init__(
        self,
        sets: Sets,
        loss: Loss,
        validation: Sets | Validate | None,
        batch_rows: int,
        processes: Processes,
    ) -> None:
        self.sets, self.loss, self.validation = sets, loss, validation
        self.batch_rows, self.processes = batch_rows, processes
        self.lengths = lengths_of(sets)
        if validation is not None and not callable(validation):
            self.other_lengths = lengths_of(validation)
            if not len(validation):
                raise InputError("there are no validation sets. Pass some, or validation=None.")

    def items(self) -> int:
        return len(self.sets)

    def losses(self, model: nn.Module, batch: Tensor) -> Iterator[Tensor]:
        numbers = batch.tolist()
        # All processes compute the loss of all sets, so each contributes a part of it.
        for loss in self._parts(model, self.sets, self.lengths, numbers):
            yield loss / self.processes.size

    def validate(self, model: nn.Module) -> dict[str, float]:
        release(self.sets)
        if self.validation is None:
            return {}
        if callable(self.validation):
            return self.validation(model)
        numbers = list(range(len(self.validation)))
        parts = self._parts(model, self.validation, self.other_lengths, numbers)
        total = sum(float(part) for part in parts)
        release(self.validation)
        return {"validation loss": total}

    def _parts(
        self, model: nn.Module, sets: Sets, lengths: np.ndarray, numbers: list[int]
    ) -> Iterator[Tensor]:
        """Yield the share of each micro-batch in the mean loss."""
        for part in micro_batches(lengths, numbers, self.batch_rows):
            pairs = [pair(sets, number) for number in part]
            labels = default_collate([label for _, label in pairs])
            chosen = [elements for elements, _ in pairs]
            found = encode(model, chosen, self.batch_rows, self.processes)
            labels = _moved(labels, found.device)
            loss = self.loss(found, labels)
            if not isinstance(loss, Tensor) or loss.shape not in ((), (len(part),)):
                got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise InputError(
                    f"loss must return one number, or one for each of the {len(part)} sets; got "
                    f"{got}."
                )
            yield loss.sum() / len(numbers) if loss.dim() else loss * (len(part) / len(numbers))


def _moved(labels: Any, device: torch.device) -> Any:
    """Return collated labels on a device."""
    if isinstance(labels, Tensor):
        return labels.to(device)
    if isinstance(labels, dict):
        return {name: _moved(label, device) for name, label in labels.items()}
    return [_moved(label, device) for label in labels] if isinstance(labels, list) else labels
