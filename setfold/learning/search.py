"""Train candidates under a time budget, and keep the one that is best on the validation sets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from setfold.core.persist import write_atomically
from setfold.learning.baselines import (
    copy_linear,
    fit_linear,
    fit_scales,
    statistics_of,
)
from setfold.learning.candidates import STATISTICS, Model, build_model
from setfold.learning.dataset import SetDataset
from setfold.learning.encoding import Sets
from setfold.learning.fit import RATE, WEIGHT_DECAY, FitSettings, History, Validate, fit
from setfold.learning.loop import Callback, Progress
from setfold.learning.metrics import Predictions, loss_of
from setfold.learning.objective import loss_for, predict, validate_on
from setfold.learning.processes import Processes
from setfold.preprocessing.columns import Columns
from setfold.preprocessing.targets import Target

MIN_EPOCHS, MAX_EPOCHS = 5, 300


@dataclass(frozen=True)
class Settings(FitSettings):
    """How to train a candidate: the settings of `fit`, and two more.

    Args:
        rate: The largest learning rate of AdamW.
        balanced: Whether to weigh classes inversely to their frequency.
    """

    rate: float = RATE
    balanced: bool = False


@dataclass(frozen=True)
class Trial:
    """A trained candidate.

    Args:
        name: Its name.
        model: The model, in evaluation mode.
        loss: Its loss on the validation sets, by which candidates are compared.
        found: What it predicts for the test sets.
        history: The course of its training; None if it was not trained by steps.
        seconds: How long it took.
    """

    name: str
    model: Model
    loss: float
    found: Predictions
    history: History | None
    seconds: float


@dataclass(frozen=True)
class Search:
    """What was tried.

    Args:
        best: The candidate with the least validation loss.
        trials: All candidates.
        linear: The fitted linear model of plain statistics.
        statistics: Standardized statistics and labels of the sets for training, validation and
            test, for baselines.
    """

    best: Trial
    trials: list[Trial]
    linear: Any
    statistics: list[tuple[np.ndarray, np.ndarray]]


def search(
    names: Sequence[str],
    columns: Columns,
    target: Target,
    training: SetDataset,
    validation: SetDataset,
    test: SetDataset,
    settings: Settings,
    *,
    center: Sequence[str] = (),
    seconds: float,
    epochs: int | None = None,
    folder: Path | None = None,
    progress: Callable[[str, Progress], None] | None = None,
) -> Search:
    """Train some candidates.

    Args:
        names: The candidates.
        columns: The columns of the table.
        target: What to predict.
        training: The training sets.
        validation: The sets that choose: between candidates, when to stop, how to regularize.
        test: The sets for which the predictions are returned.
        settings: How to train. The number of epochs follows from the time.
        center: Columns to center in each set.
        seconds: The time for all candidates together.
        epochs: The number of epochs of each candidate; None to derive it from the time.
        folder: A folder for checkpoints. Trainings that it contains are continued.
        progress: Called a few times a second, with the name of the candidate.
    """
    rows, processes = settings.batch_rows, Processes.current()
    torch.manual_seed(settings.seed)
    plain = build_model(STATISTICS, columns, target, center)
    splits = (training, validation, test)
    readouts = [statistics_of(plain, data, rows, processes) for data in splits]
    scale = fit_scales(plain, readouts[0])
    tables = [scale(found).double().numpy() for found in readouts]
    pairs = [(table, data.targets) for table, data in zip(tables, splits, strict=True)]
    linear = fit_linear(target, pairs[0], pairs[1], settings.balanced)
    copy_linear(plain, linear, target)
    contest = _Contest(
        settings, target, training, validation, test, processes, seconds / len(names)
    )
    trials = []
    for name in dict.fromkeys(names):
        started = time.monotonic()
        if name == STATISTICS:
            trials.append(contest.measure(name, plain, None, started))
            continue
        torch.manual_seed(settings.seed)
        model = build_model(name, columns, target, center)
        fit_scales(model, statistics_of(model, training, rows, processes))
        copy_linear(model, linear, target)
        history = contest.train(name, model, epochs, folder, _named(progress, name))
        trials.append(contest.measure(name, model, history, started))
    best = min(trials, key=lambda trial: trial.loss)
    return Search(best, trials, linear, pairs)


def _named(progress: Callable[[str, Progress], None] | None, name: str) -> Callback | None:
    return None if progress is None else lambda now: progress(name, now)


@dataclass(frozen=True)
class _Contest:
    """What all candidates have in common."""

    settings: Settings
    target: Target
    training: SetDataset
    validation: SetDataset
    test: SetDataset
    processes: Processes
    seconds: float  # for each candidate

    def measure(self, name: str, model: Model, history: History | None, started: float) -> Trial:
        """Predict with a trained candidate."""
        chosen, found = (
            predict(model, data, self.settings.batch_rows, self.processes)
            for data in (self.validation, self.test)
        )
        seconds = time.monotonic() - started
        return Trial(name, model, loss_of(self.target, chosen), found, history, seconds)

    def train(
        self,
        name: str,
        model: Model,
        epochs: int | None,
        folder: Path | None,
        callback: Callback | None,
    ) -> History:
        """Train a candidate; continue its training if the folder has a checkpoint of it."""
        epochs = epochs or self._plan_epochs(model, folder, name)
        path = None if folder is None else folder / f"{name}.safetensors"
        rows = self.settings.batch_rows
        validate = validate_on(self.target, self.validation, rows, self.processes)
        return self._fit(model, self.training, validate, epochs, path, callback)

    def _fit(
        self,
        model: Model,
        training: Sets,
        validate: Validate | None,
        epochs: int,
        path: Path | None = None,
        callback: Callback | None = None,
    ) -> History:
        settings = replace(self.settings, epochs=epochs)
        optimizer = torch.optim.AdamW(
            model.parameters(), settings.rate, weight_decay=WEIGHT_DECAY, fused=True
        )
        return fit(
            model,
            training,
            loss=loss_for(self.target, self.training, settings.balanced),
            validation=validate,
            settings=settings,
            optimizer=optimizer,
            checkpoint=path,
            callback=callback,
        )

    def _plan_epochs(self, model: Model, folder: Path | None, name: str) -> int:
        """Return how many epochs fit into the time of a candidate.

        The number is written to the folder, so that a resumed training has the same.
        """
        path = None if folder is None else folder / f"{name}.json"
        known = None
        if self.processes.first and path is not None and path.exists():
            known = json.loads(path.read_text())["epochs"]
        known = self.processes.from_first(known)
        if known is not None:
            return int(known)
        weights = {n: t.clone() for n, t in model.state_dict().items()}
        order = np.random.default_rng(self.settings.seed).permutation(len(self.training))
        part = _Some(self.training, order[: 4 * self.settings.batch_sets])
        few = _Some(self.training, order[:2])
        self._fit(model, few, None, 1)  # first calls take longer
        started = time.monotonic()
        self._fit(model, part, None, 1)
        each = (time.monotonic() - started) * len(self.training) / len(part)
        model.load_state_dict(weights)
        epochs = int(min(MAX_EPOCHS, max(MIN_EPOCHS, self.seconds / (1.3 * each))))
        epochs = int(self.processes.from_first(epochs))
        if self.processes.first and path is not None:
            write_atomically(path, json.dumps({"epochs": epochs}).encode())
        return epochs


class _Some:
    """Some sets of a data set; nothing is copied."""

    def __init__(self, data: SetDataset, numbers: np.ndarray) -> None:
        self.data, self.numbers = data, numbers
        self.lengths, self.release = data.lengths[numbers], data.release

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> tuple[np.ndarray, Any]:
        return self.data[int(self.numbers[number])]
