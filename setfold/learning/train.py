"""Train a model on files, from rows and labels to a saved model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from setfold.core.models import load, save
from setfold.errors import InputError
from setfold.files.budget import BASE_BYTES, parse_size
from setfold.files.engines.task import Stamp
from setfold.learning.candidates import Design, choose_names
from setfold.learning.dataset import SetDataset, collect, count_elements
from setfold.learning.labels import (
    Labels,
    encode_targets,
    labels_in_rows,
    match_labels,
    read_labels,
)
from setfold.learning.loop import Progress
from setfold.learning.metrics import Predictions, measure, metric_name, standard_error
from setfold.learning.objective import predict
from setfold.learning.options import TrainOptions
from setfold.learning.positions import choose_position
from setfold.learning.processes import Processes
from setfold.learning.search import Material, Search, Settings, search
from setfold.learning.sources import Source
from setfold.learning.splits import TEST, TRAINING, assign_splits
from setfold.learning.work_folder import is_interrupted, open_work_folder, work_folder_of
from setfold.preprocessing.columns import columns_of
from setfold.preprocessing.fitting import ColumnFitter, Fitted
from setfold.preprocessing.targets import Classes, Target, target_of

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
BYTES_PER_ROW = 6000  # activations and gradients of one element, as measured
MIN_ROWS, MAX_ROWS = 1 << 10, 1 << 16


@dataclass(frozen=True)
class Result:
    """The result of a training.

    Args:
        task: "classification", "multiple-instance" or "regression".
        target: What the model predicts.
        search: The candidates and the baselines.
        data: The sets.
        fitted: The columns.
        left_out: The number of sets without labels or elements, and of labels without sets.
        skipped: The number of bad rows.
    """

    task: str
    target: Target
    search: Search
    data: Material
    fitted: Fitted
    left_out: int
    skipped: int

    @property
    def sets(self) -> tuple[int, int, int]:
        """The number of sets for training, validation and test.

        With several folds, sets for validation are for training, too, in other folds.
        """
        held = int((self.data.folds >= 0).sum())
        training = len(self.data.known) - (held if self.data.number == 1 else 0)
        return training, held, len(self.data.test)

    @property
    def elements(self) -> int:
        """The number of elements of all sets."""
        return int(self.data.known.lengths.sum() + self.data.test.lengths.sum())


def train_sets(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    options: TrainOptions,
    *,
    resume: bool = False,
    restart: bool = False,
    overwrite: bool = False,
    progress: Callable[[str, Progress], None] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Result:
    """Train a model that predicts a label of each set, and save it.

    In a process group, all processes call it with the same arguments. They share out the sets, and
    spread a set that is larger than a batch over all of them. The first one writes the files.

    Args:
        inputs: Files, folders or glob patterns, such as "events/*.parquet".
        out: The model, a .safetensors file.
        options: What to learn, and how.
        resume: Whether to continue an interrupted training.
        restart: Whether to discard an interrupted training.
        overwrite: Whether to replace an existing model.
        progress: Called a few times a second, with the name of the candidate.
        note: Called with a line of text when something was found out.

    >>> import pyarrow as pa, pyarrow.parquet as pq, setfold, tempfile
    >>> rows = {"user": [i % 40 for i in range(400)], "x": [i * (i % 40 % 2) for i in range(400)]}
    >>> options = setfold.TrainOptions(target="odd", set="user", encoder="statistics")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = pa.table({**rows, "odd": [user % 2 == 1 for user in rows["user"]]})
    ...     pq.write_table(table, f"{folder}/rows.parquet")
    ...     model = f"{folder}/model.safetensors"
    ...     result = setfold.train_sets(f"{folder}/rows.parquet", model, options)
    ...     target, found, _ = setfold.evaluate_sets(model, f"{folder}/rows.parquet", set="user")
    >>> result.sets, target.labels
    ((32, 32, 8), [False, True])
    """
    path = Path(out).absolute()
    _check_out(path, overwrite)
    paths = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    source = Source(paths, options.set, explode=options.explode, skip=options.skip_errors)
    kinds = source.kinds(options.features, {options.target, *filter(None, [options.group])})
    fitter = _fitter(options, kinds)
    limit = parse_size(options.memory) - BASE_BYTES
    settings = Settings(batch_rows=_batch_rows(limit), seed=options.seed, balanced=options.balanced)
    request = _request(source, options, list(kinds), settings)
    processes = Processes.current()
    with processes.together(), _work(processes, path, request, resume, restart) as work:
        note(f"reading {_shown(list(kinds))} from {len(source.inputs)} files")
        read = _read(source, fitter, options, list(kinds), work, limit // 4, processes)
        data, left_out = read.data, source.unusable | read.fitted.left_out
        for why in dict.fromkeys(left_out.values()):
            note(f"left out {_shown([n for n, own in left_out.items() if own == why])}: {why}")
        if read.empty:
            note(f"left out {read.empty:,} sets without elements")
        note(describe_splits(data))
        position = choose_position(options.position, read.fitted.columns)
        names = choose_names(options.encoder, options.task, position)
        if options.position is None and "places" in names:
            note(f"{_shown(position)}: taken for positions, because of the names (--position)")
        found = search(
            names,
            Design(read.fitted.columns, read.target, options.center, position),
            data,
            settings,
            seconds=options.seconds,
            epochs=options.epochs,
            folder=work,
            progress=progress,
        )
        if processes.first:
            save(found.best.model, path)
    task = options.task or task_of(read.target)
    return Result(task, read.target, found, data, read.fitted, read.left_out, source.skipped)


def task_of(target: Target) -> str:
    """Return the task that follows from a target."""
    return "classification" if isinstance(target, Classes) else "regression"


def describe_splits(data: Material) -> str:
    """Say in one line which sets are for what."""
    known, held, test = len(data.known), int((data.folds >= 0).sum()), len(data.test)
    elements = int(data.known.lengths.sum() + data.test.lengths.sum())
    if data.number > 1:
        text = f"{known} sets for training and validation, in {data.number} folds"
    else:
        text = f"{known - held} sets for training, {held} for validation"
    return f"{text}, {test} for the test; {elements:,} elements"


def _fitter(options: TrainOptions, kinds: dict[str, pa.DataType]) -> ColumnFitter:
    return ColumnFitter(
        kinds,
        robust=options.scale == "robust",
        categories=options.categories,
        log=options.log,
        age=options.times == "age",
        seed=options.seed,
    )


def _request(
    source: Source, options: TrainOptions, columns: list[str], settings: Settings
) -> dict[str, Any]:
    """Return what determines the result; a training that is resumed must have the same."""
    chosen = asdict(options) | {"labels": None if options.labels is None else str(options.labels)}
    del chosen["memory"], chosen["seconds"]  # what they determine is in the settings, or kept
    files = [found.path for found in source.inputs]
    files += [] if options.labels is None else [Path(options.labels)]
    return {
        "inputs": [[str(path), *Stamp.of(path)] for path in files],
        "columns": columns,
        "options": chosen,
        "settings": settings.described(),
    }


@contextmanager
def _work(
    processes: Processes, path: Path, request: dict[str, Any], resume: bool, restart: bool
) -> Iterator[Path]:
    """Open the work folder, in the first process for all."""
    if processes.first:
        with open_work_folder(path, request, resume=resume, restart=restart) as folder:
            processes.from_first()
            yield folder
            processes.from_first()  # all are done with it
    else:
        processes.from_first()
        yield work_folder_of(path)
        processes.from_first()


class _Read(NamedTuple):
    """The sets, and how their labels and columns were read."""

    target: Target
    fitted: Fitted
    data: Material
    left_out: int  # sets without labels or elements
    empty: int  # sets without elements


def _read(
    source: Source,
    fitter: ColumnFitter,
    options: TrainOptions,
    columns: list[str],
    folder: Path,
    memory: int,
    processes: Processes,
) -> _Read:
    """Read labels, fit the columns to the training sets, then read all sets."""
    labels = _labels(source, options.labels, options.target, options.group)
    if options.skip_errors:  # splits are of the sets that have rows
        labels = labels.of(count_elements(source))
    shares = options.validation, options.test
    target, splits = assign_splits(
        labels, options.target, options.task, shares, options.folds, options.seed
    )
    several = max(splits.values()) > 0  # each set is for training, in all folds but one
    learned = {name for name, own in splits.items() if own == TRAINING or (several and own != TEST)}
    counts = count_elements(source, columns, learned, fitter.add, fitter.see_missing)
    fitted = fitter.finish()
    kept, left_out = match_labels(counts, labels, skip=source.skip)
    targets = encode_targets(target, [labels.values[name] for name in kept])
    data = collect(
        source,
        fitted.columns,
        kept,
        counts,
        targets,
        folder=folder,
        memory=memory,
        processes=processes,
    ).without_empty()
    own = np.array([splits[name] for name in data.ids])
    known = np.flatnonzero(own != TEST)
    material = Material(data.chosen(known), own[known], data.chosen(np.flatnonzero(own == TEST)))
    _check_sizes(target, material)
    empty = len(kept) - len(data)
    return _Read(target, fitted, material, left_out + empty, empty)


def evaluate_sets(
    model: str | Path,
    inputs: str | Path | Sequence[str | Path],
    *,
    labels: str | Path | None = None,
    set: str | Sequence[str] | None = None,
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
    source.choose(columns.names)
    counts = count_elements(source, columns.names)
    known = _labels(source, labels, target.name, None)
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
    group: str | None,
) -> Labels:
    if labels is None:
        return labels_in_rows(source, target, group)
    return read_labels(labels, target, source.keys, group, [found.name for found in source.inputs])


def _check_out(path: Path, overwrite: bool) -> None:
    if path.suffix != ".safetensors":
        raise InputError(f"a model must go to a .safetensors file; got {path.name}. Rename it.")
    if path.exists() and not overwrite and not is_interrupted(path):
        raise InputError(f"{path} exists. Choose another name, or replace it with --overwrite.")


def _check_sizes(target: Target, data: Material) -> None:
    """Raise InputError if there is too little to learn from."""
    held = data.folds >= 0
    if len(data.known) < 3 or not held.any() or (data.folds != 0).sum() < 2:
        raise InputError(f"{len(data.known)} sets are too few to be split. Add sets.")
    for fold in range(data.number):
        learned = data.known.targets[data.folds != fold]
        if isinstance(target, Classes) and len(np.unique(learned)) < 2:
            raise InputError(
                "all sets for training have the same class, because the groups are so large. Pass "
                "another --seed, or smaller groups."
            )
