"""Train a model on files, from rows and labels to a saved model and a report."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from setfold.core.models import load, save
from setfold.errors import InputError
from setfold.files.budget import BASE_BYTES, parse_size
from setfold.learning.candidates import CANDIDATES
from setfold.learning.dataset import SetDataset, collect, count_elements
from setfold.learning.labels import (
    Labels,
    encode_targets,
    labels_in_rows,
    match_labels,
    read_labels,
    target_from,
)
from setfold.learning.loop import Progress, Settings, predict
from setfold.learning.metrics import Predictions, measure, metric_name, standard_error
from setfold.learning.search import Search, search
from setfold.learning.sources import Source
from setfold.preprocessing.columns import columns_of
from setfold.preprocessing.fitting import ColumnFitter, Fitted
from setfold.preprocessing.targets import Target, target_of

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
BYTES_PER_ROW = 4000  # activations and gradients of one element
MIN_ROWS, MAX_ROWS = 1 << 10, 1 << 16


@dataclass(frozen=True)
class Result:
    """The result of a training.

    Args:
        target: What the model predicts.
        search: The candidates and baselines.
        fitted: The columns.
        sets: The number of sets for training and for validation.
        elements: The number of elements.
        left_out: The number of sets without labels and labels without sets.
        skipped: The number of bad rows.
        training: The training sets.
        validation: The validation sets.
    """

    target: Target
    search: Search
    fitted: Fitted
    sets: tuple[int, int]
    elements: int
    left_out: int
    skipped: int
    training: SetDataset
    validation: SetDataset


def train_sets(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    target: str,
    labels: str | Path | None = None,
    set: str | None = None,
    features: Sequence[str] | None = None,
    explode: bool = False,
    group: str | None = None,
    task: str | None = None,
    encoder: str = "auto",
    seconds: float = 600.0,
    epochs: int | None = None,
    validation: float = 0.2,
    scale: str = "standard",
    center: Sequence[str] = (),
    categories: Sequence[str] = (),
    log: Sequence[str] = (),
    times: str = "age",
    balanced: bool = False,
    seed: int = 0,
    memory: str | int = "2GB",
    skip_errors: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[str, Progress], None] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Result:
    """Train a model that predicts a label of each set, and save it.

    Args:
        inputs: Files, folders or glob patterns, such as "events/*.parquet".
        out: The model, a .safetensors file.
        target: The column with the labels.
        labels: A table with one row per set. If None, the labels are in a column of the rows, and
            constant within each set.
        set: The column with the set ids. If None, each file is one set.
        features: The columns that are features. By default all that can be.
        explode: Whether each row holds many elements, as lists.
        group: A column, of the table of labels or of the rows. Sets of one group fall into the same
            split.
        task: "classification" or "regression". By default it follows from the labels.
        encoder: "auto", or one of "statistics", "deep-sets", "slots", "attention".
        seconds: The time for training.
        epochs: The number of epochs of each candidate; by default it follows from the time.
        validation: The share of sets that choose between candidates and stop the training.
        scale: "standard" (mean and standard deviation) or "robust" (median and quartiles).
        center: Columns to center in each set, such as the coordinates of point clouds. The model
            then reads a set twice.
        categories: Columns of whole numbers that are categories.
        log: Columns of numbers to take the logarithm of.
        times: "age" to read times relative to the last event of the set, which takes two passes
            over a set, or "calendar" for the time of day and the weekday only.
        balanced: Whether to weigh classes inversely to their frequency.
        seed: Of the split, the weights and the training.
        memory: The memory limit.
        skip_errors: Whether to leave out bad rows, sets without labels and labels without sets.
        resume: Whether to continue an interrupted training.
        overwrite: Whether to replace an existing model.
        progress: Called after every step, with the name of the candidate.
        note: Called with a line of text when something was found out.
    """
    path = Path(out)
    _check(path, encoder, scale, times, validation, overwrite or resume)
    names = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    source = Source(names, set, explode=explode, skip=skip_errors)
    kinds = source.kinds(features, {target, *([group] if group else [])})
    limit = parse_size(memory) - BASE_BYTES
    work = path.with_name(path.name + ".work")
    if work.exists() and not resume:
        shutil.rmtree(work)
    work.mkdir(parents=True, exist_ok=True)
    fitter = ColumnFitter(
        kinds,
        robust=scale == "robust",
        categories=categories,
        log=log,
        age=times == "age",
        seed=seed,
    )
    note(f"reading {len(source.inputs)} files: {', '.join(kinds)}")
    counts = count_elements(source, list(kinds), fitter.add)
    fitted = fitter.finish()
    for name, why in fitted.left_out.items():
        note(f"left out column {name}: {why}")
    known = _labels(source, labels, target, set, group, counts)
    kept, left_out = match_labels(counts, known, skip=skip_errors)
    values = [known.values[name] for name in kept]
    goal = target_from(target, values, task)
    groups = None if known.groups is None else [known.groups[name] for name in kept]
    chosen = split(kept, groups, encode_targets(goal, values), validation, seed)
    goal = target_from(
        target, [v for v, held in zip(values, chosen, strict=True) if not held], task
    )
    parts = []
    for held in (False, True):
        ids = [name for name, own in zip(kept, chosen, strict=True) if own == held]
        data = collect(
            source,
            fitted.columns,
            ids,
            counts,
            encode_targets(goal, [known.values[name] for name in ids]),
            None,
            path=work / ("validation" if held else "training"),
            memory=limit // 4,
        )
        parts.append(data)
    training, other = parts
    rows = min(MAX_ROWS, max(MIN_ROWS, 1 << (limit // 2 // BYTES_PER_ROW).bit_length() - 1))
    settings = Settings(batch_rows=rows, seed=seed, balanced=balanced)
    note(
        f"{len(training)} sets for training, {len(other)} for validation, "
        f"{len(training.elements) + len(other.elements)} elements"
    )
    found = search(
        CANDIDATES if encoder == "auto" else [encoder],
        fitted.columns,
        goal,
        training,
        other,
        settings,
        center=center,
        seconds=seconds,
        epochs=epochs,
        folder=work,
        progress=progress,
    )
    save(found.best.model, path)
    sizes = (len(training), len(other))
    elements = len(training.elements) + len(other.elements)
    result = Result(goal, found, fitted, sizes, elements, left_out, source.skipped, training, other)
    shutil.rmtree(work)
    return result


def evaluate_sets(
    model: str | Path,
    inputs: str | Path | Sequence[str | Path],
    *,
    labels: str | Path | None = None,
    set: str | None = None,
    explode: bool = False,
    memory: str | int = "2GB",
    skip_errors: bool = False,
) -> tuple[Target, Predictions, SetDataset]:
    """Predict the labels of sets with a trained model.

    Args:
        model: The model, written by `train_sets`.
        inputs: As for `train_sets`.
        labels: As for `train_sets`.
        set: As for `train_sets`.
        explode: As for `train_sets`.
        memory: As for `train_sets`.
        skip_errors: As for `train_sets`.
    """
    loaded = load(model)
    target, columns = target_of(loaded), columns_of(loaded)
    if target is None or columns is None:
        raise InputError(f"{model} was not trained by setfold train, so it predicts no label.")
    names = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    source = Source(names, set, explode=explode, skip=skip_errors)
    counts = count_elements(source, [], lambda table: None)
    known = _labels(source, labels, target.name, set, None, counts)
    kept, _ = match_labels(counts, known, skip=skip_errors)
    limit = parse_size(memory) - BASE_BYTES
    data = collect(
        source,
        columns,
        kept,
        counts,
        encode_targets(target, [known.values[name] for name in kept]),
        None,
        path=Path(f"{model}.evaluation"),
        memory=limit // 2,
    )
    return target, predict(loaded, data, MIN_ROWS * 8), data


def summarize(target: Target, found: Predictions) -> dict[str, Any]:
    """Return the metrics of some predictions, with the standard error of the first."""
    return {
        "sets": len(found.targets),
        **measure(target, found),
        f"standard error of {metric_name(target)}": standard_error(target, found),
    }


def split(
    ids: Sequence[str],
    groups: Sequence[str] | None,
    targets: np.ndarray,
    share: float,
    seed: int,
) -> np.ndarray:
    """Choose the sets for validation, (n,) bool: whole groups, and about the same of each class.

    Args:
        ids: The set ids.
        groups: The group of each set, or None.
        targets: Class numbers or quantities.
        share: The share of sets to choose.
        seed: Of the choice.
    """
    from sklearn.model_selection import GroupShuffleSplit, ShuffleSplit, StratifiedShuffleSplit

    held = np.zeros(len(ids), bool)
    places = np.arange(len(ids))
    options: dict[str, Any] = {"n_splits": 1, "test_size": share, "random_state": seed}
    if groups is not None:
        if len({*groups}) < 2:
            raise InputError("all sets are in one group, so there is nothing to validate on.")
        pairs = GroupShuffleSplit(**options).split(places, groups=list(groups))
    elif targets.dtype.kind == "i" and np.bincount(targets).min(initial=2) >= 2:
        wanted = max(int(share * len(ids)), len(np.unique(targets)))
        options["test_size"] = wanted
        pairs = StratifiedShuffleSplit(**options).split(places, targets)
    else:
        pairs = ShuffleSplit(**options).split(places)
    held[next(iter(pairs))[1]] = True
    return held


def parse_seconds(text: str) -> float:
    """Parse a duration.

    >>> parse_seconds("90s"), parse_seconds("10m"), parse_seconds("1.5h")
    (90.0, 600.0, 5400.0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", text)
    if not match:
        raise InputError(f"cannot parse the time {text!r}; expected 90s, 10m or 1.5h.")
    return float(match[1]) * UNITS[match[2]]


def _labels(
    source: Source,
    labels: str | Path | None,
    target: str,
    set: str | None,
    group: str | None,
    counts: dict[str, int],
) -> Labels:
    if labels is None:
        return labels_in_rows(source, target, group)
    return read_labels(labels, target, set, group, list(counts))


def _check(
    path: Path, encoder: str, scale: str, times: str, validation: float, may_replace: bool
) -> None:
    if path.exists() and not may_replace:
        raise InputError(f"{path} exists. Choose another name, or replace it with --overwrite.")
    if encoder != "auto" and encoder not in CANDIDATES:
        raise InputError(f"encoder must be one of auto, {', '.join(CANDIDATES)}; got {encoder!r}.")
    if scale not in ("standard", "robust"):
        raise InputError(f"scale must be 'standard' or 'robust'; got {scale!r}.")
    if times not in ("age", "calendar"):
        raise InputError(f"times must be 'age' or 'calendar'; got {times!r}.")
    if not 0 < validation < 1:
        raise InputError(f"validation must be a share between 0 and 1; got {validation}.")
