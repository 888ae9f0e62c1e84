"""Train candidates under a time budget, and keep the one that is best on sets held out.

Folds hold sets out: one fold holds out a validation split; several folds hold out each set once, so
that few sets are enough to choose by. With several folds, a candidate is trained once more on all
sets, for as many epochs as the folds needed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from setfold.core.persist import write_atomically
from setfold.learning.baselines import (
    Baseline,
    LinearFits,
    copy_linear,
    fit_baselines,
    fit_linear,
    fit_scales,
    statistics_of,
)
from setfold.learning.candidates import (
    INSTANCES,
    STATISTICS,
    Design,
    Model,
    build_model,
    build_plain,
)
from setfold.learning.dataset import SetDataset
from setfold.learning.fit import RATE, WEIGHT_DECAY, FitSettings, History, fit
from setfold.learning.loop import Progress
from setfold.learning.metrics import Predictions, loss_of
from setfold.learning.objective import VALIDATION_LOSS, loss_for, predict, validate_on
from setfold.learning.processes import Processes

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
class Material:
    """The sets of a search.

    Args:
        known: The sets to learn from.
        folds: The fold that holds out each of these, (n,); -1 for sets that no fold holds out.
        test: Other sets, for the reported numbers only. If there are none, the reported numbers are
            of the sets that the folds hold out.
    """

    known: SetDataset
    folds: np.ndarray
    test: SetDataset

    @property
    def number(self) -> int:
        """The number of folds."""
        return 1 + int(self.folds.max())

    @property
    def reported(self) -> SetDataset:
        """The sets of the reported numbers."""
        return self.test if len(self.test) else self.known.chosen(np.flatnonzero(self.folds >= 0))


@dataclass(frozen=True)
class Trial:
    """A trained candidate.

    Args:
        name: Its name.
        model: The model, in evaluation mode.
        loss: Its loss on the sets held out, by which candidates are compared.
        found: What it predicts for the reported sets.
        histories: The course of its training on each fold; empty if it was not trained by steps.
        seconds: How long it took.
    """

    name: str
    model: Model
    loss: float
    found: Predictions
    histories: list[History]
    seconds: float


@dataclass(frozen=True)
class Search:
    """What was tried.

    Args:
        best: The candidate with the least loss on the sets held out.
        trials: All candidates.
        baselines: What one would do without a set encoder.
    """

    best: Trial
    trials: list[Trial]
    baselines: list[Baseline]


def search(
    names: Sequence[str],
    design: Design,
    data: Material,
    settings: Settings,
    *,
    seconds: float = 0.0,
    epochs: int | None = None,
    folder: Path | None = None,
    progress: Callable[[str, Progress], None] | None = None,
) -> Search:
    """Train some candidates.

    Args:
        names: The candidates.
        design: What they share.
        data: The sets.
        settings: How to train. The number of epochs follows from the time.
        seconds: The time for all candidates together.
        epochs: The number of epochs of each candidate; None to derive it from the time.
        folder: A folder for checkpoints. Trainings that it contains are continued.
        progress: Called a few times a second, with the name of the candidate.
    """
    return _Search(design, data, settings, folder, progress).run(names, seconds, epochs)


class _Search:
    def __init__(
        self,
        design: Design,
        data: Material,
        settings: Settings,
        folder: Path | None,
        progress: Callable[[str, Progress], None] | None,
    ) -> None:
        self.design, self.data, self.settings = design, data, settings
        self.folder, self.progress, self.processes = folder, progress, Processes.current()
        torch.manual_seed(settings.seed)
        self.plain, rows = build_plain(design), settings.batch_rows
        self.statistics = statistics_of(self.plain, data.known, rows, self.processes)
        self.linear: LinearFits = fit_linear(
            design.target, self.statistics, data.known.targets, data.folds, settings.balanced
        )

    def run(self, names: Sequence[str], seconds: float, epochs: int | None) -> Search:
        each = seconds / len(names)
        trials = [
            self._statistics() if name == STATISTICS else self._train(name, each, epochs)
            for name in dict.fromkeys(names)
        ]
        return Search(min(trials, key=lambda trial: trial.loss), trials, self._baselines())

    def _baselines(self) -> list[Baseline]:
        test, known = self.data.test, self.data.known
        unseen = None
        if len(test):
            unseen = self._readouts(self.plain, test), test.targets
        return fit_baselines(
            self.design.target,
            (self.statistics, known.targets),
            unseen,
            self.data.folds,
            self.linear,
            self.settings.seed,
        )

    def _statistics(self) -> Trial:
        started = time.monotonic()
        fit_scales(self.plain, self.statistics)
        copy_linear(self.plain, self.linear.whole, self.design.target)
        return self._trial(STATISTICS, self.plain, self.linear.held, [], started)

    def _train(self, name: str, seconds: float, epochs: int | None) -> Trial:
        started, settings, data = time.monotonic(), self.settings, self.data
        model = self._begin(name, self._seen(0), self.linear.by_fold[0])
        if epochs is None:
            number = data.number + (data.number > 1)
            epochs = self._plan_epochs(name, model, seconds / number)
        plan, histories = replace(settings, epochs=epochs), []
        scores: dict[int, np.ndarray] = {}
        for fold in range(data.number):
            seen, held = self._seen(fold), data.folds == fold
            model = self._begin(name, seen, self.linear.by_fold[fold])
            out = data.known.chosen(np.flatnonzero(held))
            training = data.known.chosen(np.flatnonzero(seen))
            histories.append(self._fit(f"{name}-{fold}", model, training, out, plan))
            found = self._predict(model, out)
            scores |= dict(zip(np.flatnonzero(held).tolist(), found.scores, strict=True))
        places = sorted(scores)
        guesses = Predictions(np.stack([scores[i] for i in places]), data.known.targets[places])
        if data.number > 1:
            model = self._train_on_all(name, plan, histories)
        return self._trial(name, model, guesses, histories, started)

    def _train_on_all(self, name: str, plan: Settings, histories: Sequence[History]) -> Model:
        """Train on all sets, for as many epochs as the folds needed."""
        best = [one["epoch"][int(np.argmin(one[VALIDATION_LOSS]))] for one in histories]
        epochs = int(np.median(best))
        everything = np.ones(len(self.data.known), bool)
        model = self._begin(name, everything, self.linear.whole)
        if epochs:
            self._fit(f"{name}-all", model, self.data.known, None, replace(plan, epochs=epochs))
        return model.eval()

    def _seen(self, fold: int) -> np.ndarray:
        """Which sets are for training in a fold."""
        return self.data.folds != fold

    def _begin(self, name: str, seen: np.ndarray, linear: object) -> Model:
        """Build a candidate that starts from a linear model of the statistics."""
        torch.manual_seed(self.settings.seed)
        model = build_model(name, self.design, self.statistics[seen])
        training = self.data.known.chosen(np.flatnonzero(seen))
        fit_scales(model, self._readouts(model, training))
        if name != INSTANCES:
            copy_linear(model, linear, self.design.target)
        return model

    def _readouts(self, model: Model, data: SetDataset) -> Tensor:
        return statistics_of(model, data, self.settings.batch_rows, self.processes)

    def _predict(self, model: Model, data: SetDataset) -> Predictions:
        return predict(model, data, self.settings.batch_rows, self.processes)

    def _fit(
        self,
        label: str | None,
        model: Model,
        training: SetDataset,
        held: SetDataset | None,
        plan: Settings,
    ) -> History:
        """Train a model; continue its training if the folder has a checkpoint of this label."""
        folder, progress, target = self.folder, self.progress, self.design.target
        validate = None
        if held is not None:
            validate = validate_on(target, held, plan.batch_rows, self.processes)
        optimizer = torch.optim.AdamW(
            model.parameters(), plan.rate, weight_decay=WEIGHT_DECAY, fused=True
        )
        callback = None
        if label is not None and progress is not None:
            callback = partial(progress, label)
        return fit(
            model,
            training,
            loss=loss_for(target, training, plan.balanced),
            validation=validate,
            settings=plan,
            optimizer=optimizer,
            checkpoint=None if folder is None or label is None else folder / f"{label}.safetensors",
            callback=callback,
        )

    def _trial(
        self,
        name: str,
        model: Model,
        held: Predictions,
        histories: list[History],
        started: float,
    ) -> Trial:
        found, seconds = held, time.monotonic() - started
        if len(self.data.test):
            found = self._predict(model, self.data.test)
        loss = loss_of(self.design.target, held)
        return Trial(name, model, loss, found, histories, seconds)

    def _plan_epochs(self, name: str, model: Model, seconds: float) -> int:
        """Return how many epochs fit into a time.

        The number is written to the folder, so that a resumed training has the same.
        """
        path = None if self.folder is None else self.folder / f"{name}.json"
        known = None
        if self.processes.first and path is not None and path.exists():
            known = json.loads(path.read_text())["epochs"]
        known = self.processes.from_first(known)
        if known is not None:
            return int(known)
        settings, sets = self.settings, self.data.known
        some = np.random.default_rng(settings.seed).permutation(len(sets))
        part, once = sets.chosen(some[: 4 * settings.batch_sets]), replace(settings, epochs=1)
        self._fit(None, model, sets.chosen(some[:2]), None, once)  # first calls take longer
        started = time.monotonic()
        self._fit(None, model, part, None, once)
        each = (time.monotonic() - started) * len(sets) / len(part)
        epochs = int(min(MAX_EPOCHS, max(MIN_EPOCHS, seconds / (1.3 * each))))
        epochs = int(self.processes.from_first(epochs))
        if self.processes.first and path is not None:
            write_atomically(path, json.dumps({"epochs": epochs}).encode())
        return epochs
