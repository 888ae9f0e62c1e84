"""Estimators with scikit-learn's conventions, for sets.

A set is an array (n_i, d). `X` is a list of such arrays, an object array of them, a 3-D array
(sets, n, d), or a 2-D array, each row of which is a set with one element. With `set="user"` it is a
frame whose column "user" holds the set ids (pandas, polars, DuckDB, Arrow); the sets are then in the
order of their sorted ids, and `y` has one label for each, in this order, or is a dict by id.

    SetClassifier, SetRegressor   train what `setfold train` trains
    SetVectorizer                 one vector per set, for any other estimator
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, TransformerMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    check_is_fitted,
    check_random_state,
    validate_data,
)

from setfold.core.arguments import check_sizes
from setfold.core.composition import Composition
from setfold.core.primitives import SetEncoder
from setfold.encoders.summary import SummaryStatistics
from setfold.errors import InputError
from setfold.learning.candidates import Design, choose_names
from setfold.learning.dataset import SetDataset
from setfold.learning.encoding import encode_all
from setfold.learning.objective import predict
from setfold.learning.options import ENCODERS, SCALES
from setfold.learning.samples import (
    Samples,
    check_arrays,
    labels_for,
    plain_labels,
    samples_in_frame,
    samples_of,
)
from setfold.learning.search import Material, Search, Settings, search
from setfold.learning.splits import TRAINING, split, usual_folds
from setfold.preprocessing.columns import Columns
from setfold.preprocessing.fitting import ColumnFitter
from setfold.preprocessing.kinds import NumberColumn
from setfold.preprocessing.targets import Classes, Quantity, Target

LEAST = 1e-12  # standard deviation of a quantity that does not vary


class _SetEstimator(BaseEstimator):
    """What the estimators share: from X to a data set."""

    set: str | None

    def _read(self, given: Any, *, reset: bool) -> Samples:
        if self.set is not None:
            return samples_in_frame(given, self.set, None if reset else self.columns_)
        if isinstance(given, np.ndarray | torch.Tensor) and given.ndim == 3:
            given = list(np.asarray(given))
        if isinstance(given, np.ndarray) and given.dtype == object and given.ndim == 1:
            given = list(given)
        if isinstance(given, list | tuple) and check_arrays(given):
            first, *others = given
            arrays = [self._checked(first, reset=reset)]
            return samples_of(arrays + [self._checked(one, reset=False) for one in others])
        rows = self._checked(given, reset=reset)
        return samples_of(list(rows[:, None]))

    def _checked(self, rows: Any, *, reset: bool) -> np.ndarray:
        found: np.ndarray = validate_data(self, rows, dtype=[np.float32, np.float64], reset=reset)
        return found

    def _fit_columns(self, sets: Samples, seen: np.ndarray, scale: str) -> None:
        """Find the columns and their constants from some of the sets."""
        kinds = {name: array.type for name, array in sets.table.items()}
        fitter = ColumnFitter(kinds, robust=scale == "robust", seed=0)
        rows = pa.array(np.repeat(seen, np.diff(sets.offsets)))
        fitter.add({name: array.filter(rows) for name, array in sets.table.items()})
        numbers = [name for name, kind in kinds.items() if pa.types.is_floating(kind)]
        try:
            self.columns_ = fitter.finish().columns
        except InputError:
            if not numbers:
                raise
            self.columns_ = constant_columns(numbers)  # nothing varies: any constants will do

    def _data(self, sets: Samples, targets: np.ndarray) -> SetDataset:
        table = {name: sets.table[name] for name in self.columns_.names}
        elements = self.columns_.read(table).astype(np.float32)
        wrong = ~np.isfinite(elements)
        if wrong.any():
            row, place = np.argwhere(wrong)[0].tolist()
            name = [c.name for c in self.columns_.all for _ in range(c.width)][place]
            number = int(np.searchsorted(sets.offsets, row, side="right")) - 1
            raise InputError(
                f"set {sets.ids[number]!r} has a value of column {name!r} that is missing, NaN or "
                "infinite. The model takes missing values only where fit has seen some."
            )
        return SetDataset(sets.ids, elements, sets.offsets, targets)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


class _Predictor(_SetEstimator):
    def __init__(
        self,
        encoder: str = "auto",
        *,
        epochs: int = 50,
        validation: float = 0.2,
        scale: str = "standard",
        set: str | None = None,
        position: Sequence[str] = (),
        folds: int | None = None,
        rate: float = 2e-3,
        batch_sets: int = 32,
        batch_rows: int = 1 << 15,
        random_state: int | None = 0,
    ) -> None:
        self.encoder = encoder
        self.epochs = epochs
        self.validation = validation
        self.scale = scale
        self.set = set
        self.position = position
        self.folds = folds
        self.rate = rate
        self.batch_sets = batch_sets
        self.batch_rows = batch_rows
        self.random_state = random_state

    def _search(self, sets: Samples, target: Target, targets: np.ndarray) -> Search:
        if len(targets) < 2:
            raise InputError(
                "at least two sets are needed, one of them for validation; got 1 sample."
            )
        _check_choice("encoder", self.encoder, ("auto", *ENCODERS))
        _check_choice("scale", self.scale, SCALES)
        if not 0 < self.validation < 1:
            raise InputError(f"validation must be between 0 and 1; got {self.validation!r}.")
        if self.folds is not None:
            check_sizes(folds=self.folds)
        if isinstance(self.position, str):
            raise InputError(f"position must be a list of columns; got {self.position!r}.")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        number = self.folds or usual_folds(len(targets))
        chosen = split(None, targets, (self.validation, 0.0), number, seed)
        self._fit_columns(sets, (chosen == TRAINING) | (number > 1), self.scale)
        data, position = self._data(sets, targets), list(self.position)
        settings = Settings(
            epochs=self.epochs,
            batch_sets=self.batch_sets,
            batch_rows=self.batch_rows,
            rate=self.rate,
            seed=seed,
        )
        state = torch.random.get_rng_state()
        try:
            found = search(
                choose_names(self.encoder, None, position),
                Design(self.columns_, target, position=position),
                Material(data, chosen, data.chosen(np.arange(0))),
                settings,
                epochs=self.epochs,
            )
        finally:
            torch.random.set_rng_state(state)
        self.model_ = found.best.model
        self.encoder_ = found.best.name
        return found

    def _scores(self, given: Any) -> np.ndarray:
        check_is_fitted(self)
        sets = self._read(given, reset=False)
        data = self._data(sets, np.zeros(len(sets.ids), np.int64))
        # in float64, so that predictions do not depend on which sets are encoded together
        return predict(deepcopy(self.model_).double(), data, self.batch_rows).scores


class SetClassifier(ClassifierMixin, _Predictor):
    """Classify sets.

    Args:
        encoder: "auto" tries "statistics", "deep-sets", "slots" and "attention", and "places" if
            there is a position, and keeps the one that is best on sets held out; or one of these,
            or "instances".
        epochs: Passes over the training sets, at most; training stops early.
        validation: The share of sets that stop the training and choose between candidates.
        scale: "standard" or "robust".
        set: The column of set ids, if X is a frame.
        position: Columns that are the position of an element, such as ["x", "y"]. Columns of
            arrays are named "x0", "x1" and so on.
        folds: How many times sets are held out; None for 3 if there are 20 to 299 sets, else 1.
        rate: The largest learning rate.
        batch_sets: Sets per step.
        batch_rows: Elements that are encoded at a time.
        random_state: Seed of split, weights and training.

    Attributes:
        model_: An ordinary setfold module; save it with `setfold.save`.
        encoder_: The name of the candidate that was kept.
        classes_: The labels.

    >>> random = np.random.default_rng(0)
    >>> X = [random.standard_normal((random.integers(5, 20), 2)) * (1 + i % 2) for i in range(60)]
    >>> y = ["calm", "wild"] * 30
    >>> SetClassifier("statistics").fit(X, y).predict(X[:2])
    array(['calm', 'wild'], dtype='<U4')
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train on sets and their labels."""
        sets = self._read(X, reset=True)
        labels = labels_for(sets, y)
        check_classification_targets(labels)
        self.classes_, targets = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(
                "a classifier needs sets of at least two classes; got one class, "
                f"{plain_labels(self.classes_)[0]!r}."
            )
        self._search(sets, Classes("label", plain_labels(self.classes_)), targets.astype(np.int64))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the probability of each class, (sets, classes)."""
        return self._scores(X)

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the most probable label of each set."""
        scores = self._scores(X)
        found: np.ndarray = self.classes_[scores.argmax(1)]
        return found


class SetRegressor(RegressorMixin, _Predictor):
    """Predict a quantity of sets. Arguments and attributes are those of `SetClassifier`.

    >>> random = np.random.default_rng(0)
    >>> X = [random.standard_normal((n, 2)) for n in range(3, 63)]
    >>> y = [float(len(one)) for one in X]
    >>> SetRegressor("statistics").fit(X, y).score(X, y) > 0.9
    True
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train on sets and their quantities."""
        sets = self._read(X, reset=True)
        targets = np.asarray(labels_for(sets, y), np.float64)
        if not np.isfinite(targets).all():
            raise InputError("y must be finite; found NaN or infinity.")
        target = Quantity("y", float(targets.mean()), max(float(targets.std()), LEAST))
        self._search(sets, target, targets)
        return self

    def predict(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the quantity of each set."""
        return self._scores(X)


class SetVectorizer(TransformerMixin, _SetEstimator):
    """One vector per set.

    Args:
        model: A set encoder, trained elsewhere. If None, the vectors are count, mean,
            standard deviation, minimum and maximum of each column.
        scale: "standard", "robust", or None to pass elements on as they are.
        set: The column of set ids, if X is a frame.
        batch_rows: Elements that are encoded at a time.

    >>> X = [np.ones((3, 2)), np.zeros((5, 2))]
    >>> SetVectorizer(scale=None).fit_transform(X).shape
    (2, 9)
    """

    def __init__(
        self,
        model: SetEncoder | None = None,
        *,
        scale: str | None = "standard",
        set: str | None = None,
        batch_rows: int = 1 << 15,
    ) -> None:
        self.model = model
        self.scale = scale
        self.set = set
        self.batch_rows = batch_rows

    def fit(self, X: Any, y: Any = None) -> Self:  # noqa: N803
        """Find the constants of the scale."""
        _check_choice("scale", self.scale, (None, *SCALES))
        if not isinstance(self.model, SetEncoder | None):
            raise InputError(
                f"model must be a set encoder or None; got {type(self.model).__name__}."
            )
        sets = self._read(X, reset=True)
        if self.scale is None:
            for name, array in sets.table.items():
                if not NumberColumn(name).fits(array.type):
                    raise InputError(
                        f"column {name!r} is {array.type}; with scale=None, columns must be "
                        "numbers. Leave it out, or choose a scale."
                    )
            self.columns_ = constant_columns(list(sets.table))
        else:
            self._fit_columns(sets, np.ones(len(sets.ids), bool), self.scale)
        self._n_features_out = self._encode(sets.first()).shape[1]
        return self

    def transform(self, X: Any) -> np.ndarray:  # noqa: N803
        """Return the vector of each set, (sets, width)."""
        check_is_fitted(self)
        return self._encode(self._read(X, reset=False))

    def _encode(self, sets: Samples) -> np.ndarray:
        data = self._data(sets, np.zeros(len(sets.ids), np.int64))
        model = self.model
        if model is None:
            model = Composition(SummaryStatistics(self.columns_.dim_out), self.columns_)
        found = encode_all(model, data, self.batch_rows)
        return found.flatten(1).double().numpy()

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Return the names of the numbers, such as "mean x"; of a model's, "encoding 0"."""
        check_is_fitted(self)
        if self.model is not None:
            names = [f"encoding {place}" for place in range(self._n_features_out)]
            return np.array(names, dtype=object)
        kinds = ("mean", "deviation", "minimum", "maximum")
        names = [f"{kind} {name}" for kind in kinds for name in self._names()]
        return np.array(["log count", *names], dtype=object)

    def _names(self) -> list[str]:
        return [
            column.name if column.dim_out == 1 else f"{column.name}.{place}"
            for column in self.columns_.all
            for place in range(column.dim_out)
        ]


def _check_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    if value not in choices:
        raise InputError(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}.")


def constant_columns(names: Sequence[str]) -> Columns:
    """Return columns of numbers that are passed on as they are."""
    return Columns([NumberColumn(name) for name in names])


__all__ = ["SetClassifier", "SetRegressor", "SetVectorizer"]
