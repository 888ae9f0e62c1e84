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
from setfold.learning.loop import History, Progress, Settings, fit, predict
from setfold.learning.metrics import Predictions, loss_of
from setfold.preprocessing.columns import Columns
from setfold.preprocessing.targets import Target, target_of

MIN_EPOCHS, MAX_EPOCHS = 5, 300


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
        progress: Called after every step, with the name of the candidate.
    """
    rows = settings.batch_rows
    torch.manual_seed(settings.seed)
    plain = build_model(STATISTICS, columns, target, center)
    splits = (training, validation, test)
    readouts = [statistics_of(plain, data, rows) for data in splits]
    scale = fit_scales(plain, readouts[0])
    tables = [scale(found).double().numpy() for found in readouts]
    pairs = [(table, data.targets) for table, data in zip(tables, splits, strict=True)]
    linear = fit_linear(target, pairs[0], pairs[1], settings.balanced)
    copy_linear(plain, linear, target)
    trials = []
    for name in dict.fromkeys(names):
        started = time.monotonic()
        if name == STATISTICS:
            trials.append(_trial(name, plain, validation, test, None, started, rows))
            continue
        torch.manual_seed(settings.seed)
        model = build_model(name, columns, target, center)
        fit_scales(model, statistics_of(model, training, rows))
        copy_linear(model, linear, target)
        path = None if folder is None else folder / f"{name}.safetensors"
        plan = replace(
            settings,
            epochs=epochs
            or _plan_epochs(model, training, settings, seconds / len(names), folder, name),
        )
        note = None if progress is None else _named(progress, name)
        history = fit(model, training, validation, plan, checkpoint=path, progress=note)
        trials.append(_trial(name, model, validation, test, history, started, rows))
    best = min(trials, key=lambda trial: trial.loss)
    return Search(best, trials, linear, pairs)


def _trial(
    name: str,
    model: Model,
    validation: SetDataset,
    test: SetDataset,
    history: History | None,
    started: float,
    rows: int,
) -> Trial:
    target = target_of(model)
    assert target is not None
    loss = loss_of(target, predict(model, validation, rows))
    seconds = time.monotonic() - started
    return Trial(name, model, loss, predict(model, test, rows), history, seconds)


def _named(progress: Callable[[str, Progress], None], name: str) -> Callable[[Progress], None]:
    return lambda now: progress(name, now)


def _plan_epochs(
    model: Model,
    training: SetDataset,
    settings: Settings,
    seconds: float,
    folder: Path | None,
    name: str,
) -> int:
    """Return how many epochs fit into a time.

    The number is written to the folder, so that a resumed training has the same.
    """
    path = None if folder is None else folder / f"{name}.json"
    if path is not None and path.exists():
        return int(json.loads(path.read_text())["epochs"])
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    once = replace(settings, epochs=1)
    some = np.random.default_rng(settings.seed).permutation(len(training))[
        : 4 * settings.batch_sets
    ]
    part = _subset(training, some)
    few = _subset(part, np.arange(min(len(part), 2)))
    fit(model, few, few, once)  # first calls take longer
    started = time.monotonic()
    fit(model, part, few, once)
    each = (time.monotonic() - started) * len(training) / len(part)
    model.load_state_dict(weights)
    epochs = int(min(MAX_EPOCHS, max(MIN_EPOCHS, seconds / (1.3 * each))))
    if path is not None:
        write_atomically(path, json.dumps({"epochs": epochs}).encode())
    return epochs


def _subset(data: SetDataset, numbers: np.ndarray) -> SetDataset:
    """Some sets of a data set, copied."""
    elements = [data.rows(int(number)).numpy() for number in numbers]
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in elements])]).astype(np.int64)
    ids = [data.ids[int(number)] for number in numbers]
    return SetDataset(ids, np.concatenate(elements), offsets, data.targets[numbers])
