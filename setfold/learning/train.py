"""Train a model on files, from rows and labels to a saved model and a report."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from setfold.core.models import load, save
from setfold.errors import InputError
from setfold.files.budget import BASE_BYTES, parse_size
from setfold.files.engines.task import Stamp
from setfold.learning.baselines import Baseline, fit_baselines
from setfold.learning.candidates import CANDIDATES
from setfold.learning.dataset import SetDataset, collect, count_elements
from setfold.learning.labels import (
    Labels,
    encode_targets,
    labels_in_rows,
    match_labels,
    read_labels,
)
from setfold.learning.loop import Progress, Settings, predict
from setfold.learning.metrics import Predictions, measure, metric_name, standard_error
from setfold.learning.search import Search, search
from setfold.learning.sources import Source
from setfold.learning.splits import TRAINING, VALIDATION, assign_splits
from setfold.learning.work_folder import is_interrupted, open_work_folder
from setfold.preprocessing.columns import columns_of
from setfold.preprocessing.fitting import ColumnFitter, Fitted
from setfold.preprocessing.targets import Classes, Target, target_of

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
BYTES_PER_ROW = 4000  # activations and gradients of one element
MIN_ROWS, MAX_ROWS = 1 << 10, 1 << 16


@dataclass(frozen=True)
class Result:
    """The result of a training.

    Args:
        target: What the model predicts.
        search: The candidates.
        baselines: The baselines.
        fitted: The columns.
        sets: The number of sets for training, validation and test.
        elements: The number of elements.
        left_out: The number of sets without labels and labels without sets.
        skipped: The number of bad rows.
        test: The test sets; the validation sets if there are none.
    """

    target: Target
    search: Search
    baselines: list[Baseline]
    fitted: Fitted
    sets: tuple[int, int, int]
    elements: int
    left_out: int
    skipped: int
    test: SetDataset


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
    test: float = 0.2,
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
    restart: bool = False,
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
        test: The share of sets that are used for nothing but the numbers that are reported. If it
            is 0, those of the validation sets are reported, which are too good.
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
        restart: Whether to discard an interrupted training.
        overwrite: Whether to replace an existing model.
        progress: Called after every step, with the name of the candidate.
        note: Called with a line of text when something was found out.

    >>> import pyarrow as pa, pyarrow.parquet as pq, setfold, tempfile
    >>> rows = {"user": [i % 40 for i in range(400)], "x": [i * (i % 40 % 2) for i in range(400)]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = pa.table({**rows, "odd": [user % 2 == 1 for user in rows["user"]]})
    ...     pq.write_table(table, f"{folder}/rows.parquet")
    ...     result = setfold.train_sets(
    ...         f"{folder}/rows.parquet",
    ...         f"{folder}/model.safetensors",
    ...         set="user",
    ...         target="odd",
    ...         encoder="statistics",
    ...     )
    ...     target, found, _ = setfold.evaluate_sets(
    ...         f"{folder}/model.safetensors", f"{folder}/rows.parquet", set="user"
    ...     )
    >>> result.sets, target.labels
    ((24, 8, 8), [False, True])
    """
    path = Path(out).absolute()
    _check_options(encoder, scale, times, validation, test, seed)
    _check_out(path, overwrite)
    paths = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    source = Source(paths, set, explode=explode, skip=skip_errors)
    kinds = source.kinds(features, {target, *([group] if group else [])})
    robust, age = scale == "robust", times == "age"
    fitter = ColumnFitter(kinds, robust=robust, categories=categories, log=log, age=age, seed=seed)
    limit = parse_size(memory) - BASE_BYTES
    settings = Settings(batch_rows=_batch_rows(limit), seed=seed, balanced=balanced)
    request = {
        "inputs": [
            [found.name or str(found.path), *Stamp.of(found.path)] for found in source.inputs
        ],
        "labels": None if labels is None else [str(labels), *Stamp.of(Path(labels))],
        "columns": [set, target, group, list(kinds), list(categories), list(log), list(center)],
        "options": [explode, task, encoder, scale, times, validation, test, epochs, skip_errors],
        "settings": asdict(settings),
    }
    with open_work_folder(path, request, resume=resume, restart=restart) as work:
        note(f"reading {_shown(list(kinds))} from {len(source.inputs)} files")
        known = _labels(source, labels, target, set, group)
        if skip_errors:  # splits are of the sets that have rows
            known = known.of(count_elements(source))
        goal, splits = assign_splits(known, target, task, (validation, test), seed)
        read = _read(source, fitter, list(kinds), known, goal, splits, work, limit // 4)
        if source.unusable and features is None:
            note(f"left out {_shown(source.unusable)}: not of a type that can be a feature")
        _note_left_out(read.fitted, note)
        training, choosing, testing = read.parts
        note(
            f"{len(training)} sets for training, {len(choosing)} for validation, {len(testing)} "
            f"for the test; {read.elements} elements"
        )
        reported = testing if len(testing) else choosing
        found = search(
            CANDIDATES if encoder == "auto" else [encoder],
            read.fitted.columns,
            goal,
            training,
            choosing,
            reported,
            settings,
            center=center,
            seconds=seconds,
            epochs=epochs,
            folder=work,
            progress=progress,
        )
        save(found.best.model, path)
    seen, _, unseen = found.statistics
    return Result(
        goal,
        found,
        fit_baselines(goal, seen, unseen, found.linear, seed),
        read.fitted,
        (len(training), len(choosing), len(testing)),
        read.elements,
        read.left_out,
        source.skipped,
        reported,
    )


class _Read(NamedTuple):
    """The sets for training, validation and test, and how their columns were read."""

    fitted: Fitted
    parts: tuple[SetDataset, SetDataset, SetDataset]
    elements: int
    left_out: int  # sets without labels or rows


def _read(
    source: Source,
    fitter: ColumnFitter,
    columns: list[str],
    labels: Labels,
    target: Target,
    splits: dict[str, int],
    folder: Path,
    memory: int,
) -> _Read:
    """Fit the columns to the training sets, then read all sets."""
    learned = {name for name, own in splits.items() if own == TRAINING}
    counts = count_elements(source, columns, learned, fitter.add, fitter.see_missing)
    fitted = fitter.finish()
    kept, left_out = match_labels(counts, labels, skip=source.skip)
    kept.sort(key=lambda name: splits[name])
    targets = encode_targets(target, [labels.values[name] for name in kept])
    data = collect(
        source, fitted.columns, kept, counts, targets, folder=folder, memory=memory
    ).without_empty()
    sizes = np.bincount([splits[name] for name in data.ids], minlength=3)
    _check_sizes(target, data, sizes)
    ends = np.cumsum([0, *sizes]).tolist()
    training, choosing, testing = (
        data.chosen(np.arange(*ends[i : i + 2])) for i in range(3)
    )
    left_out += len(kept) - len(data)
    return _Read(fitted, (training, choosing, testing), len(data.elements), left_out)


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

    Returns:
        What the model predicts, the predictions, and the sets. `summarize` measures them.

    >>> import setfold
    >>> target = setfold.Classes("kind", ["a", "b"])  # the example of `train_sets` calls this
    >>> found = Predictions(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 1]))
    >>> summarize(target, found)["accuracy"]
    1.0
    """
    loaded = load(model)
    target, columns = target_of(loaded), columns_of(loaded)
    if target is None or columns is None:
        raise InputError(f"{model} was not trained by setfold train, so it predicts no label.")
    names = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    source = Source(names, set, explode=explode, skip=skip_errors)
    counts = count_elements(source, columns.names)
    known = _labels(source, labels, target.name, set, None)
    kept, _ = match_labels(counts, known, skip=skip_errors)
    limit = parse_size(memory) - BASE_BYTES
    data = collect(
        source,
        columns,
        kept,
        counts,
        encode_targets(target, [known.values[name] for name in kept]),
        folder=Path(model).absolute().parent,
        memory=limit // 2,
    ).without_empty()
    return target, predict(loaded, data, MIN_ROWS * 8), data


def summarize(target: Target, found: Predictions) -> dict[str, Any]:
    """Return the metrics of some predictions, with the standard error of the first."""
    return {
        "sets": len(found.targets),
        **measure(target, found),
        f"standard error of {metric_name(target)}": standard_error(target, found),
    }


def parse_seconds(text: str) -> float:
    """Parse a duration.

    >>> parse_seconds("90s"), parse_seconds("10m"), parse_seconds("1.5h")
    (90.0, 600.0, 5400.0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh])\s*", text)
    if not match:
        raise InputError(f"cannot parse the time {text!r}; expected 90s, 10m or 1.5h.")
    return float(match[1]) * UNITS[match[2]]


def _batch_rows(limit: int) -> int:
    """Return how many elements are encoded at a time, within the memory."""
    rows = min(MAX_ROWS, limit // 2 // BYTES_PER_ROW)
    if rows < MIN_ROWS:
        least = (BASE_BYTES + 2 * MIN_ROWS * BYTES_PER_ROW) // 10**6 + 1
        raise InputError(
            f"this is too little memory for training. Pass at least --memory {least}MB."
        )
    return 1 << rows.bit_length() - 1


def _shown(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _labels(
    source: Source,
    labels: str | Path | None,
    target: str,
    set: str | None,
    group: str | None,
) -> Labels:
    if labels is None:
        return labels_in_rows(source, target, group)
    return read_labels(labels, target, set, group, [found.name for found in source.inputs])


def _note_left_out(fitted: Fitted, note: Callable[[str], None]) -> None:
    for why in dict.fromkeys(fitted.left_out.values()):
        alike = [name for name, reason in fitted.left_out.items() if reason == why]
        note(f"left out {_shown(alike)}: {why}")


def _check_out(path: Path, overwrite: bool) -> None:
    if path.suffix != ".safetensors":
        raise InputError(f"a model must go to a .safetensors file; got {path.name}. Rename it.")
    if path.exists() and not overwrite and not is_interrupted(path):
        raise InputError(f"{path} exists. Choose another name, or replace it with --overwrite.")


def _check_sizes(target: Target, data: SetDataset, sizes: np.ndarray) -> None:
    """Raise InputError if there is too little to learn from."""
    learned = data.targets[: sizes[TRAINING]]
    if len(learned) < 2 or not sizes[VALIDATION]:
        raise InputError(f"{len(data)} sets are too few to be split. Add sets.")
    if isinstance(target, Classes) and len(np.unique(learned)) < 2:
        raise InputError(
            "all sets for training have the same class, because the groups are so large. Pass "
            "another --seed, or smaller groups."
        )


def _check_options(
    encoder: str, scale: str, times: str, validation: float, test: float, seed: int
) -> None:
    if not 0 <= seed < 2**32:
        raise InputError(f"seed must be from 0 to {2**32 - 1}; got {seed}.")
    if encoder != "auto" and encoder not in CANDIDATES:
        raise InputError(f"encoder must be one of auto, {', '.join(CANDIDATES)}; got {encoder!r}.")
    if scale not in ("standard", "robust"):
        raise InputError(f"scale must be 'standard' or 'robust'; got {scale!r}.")
    if times not in ("age", "calendar"):
        raise InputError(f"times must be 'age' or 'calendar'; got {times!r}.")
    if not (validation > 0 and test >= 0 and validation + test < 1):
        raise InputError(
            "validation and test must be shares between 0 and 1, less than 1 together; got "
            f"{validation} and {test}."
        )
