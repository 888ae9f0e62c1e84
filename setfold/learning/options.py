"""What can be chosen about a training, checked. The command and the function share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from setfold.errors import InputError

TASKS = ("classification", "multiple-instance", "regression")
ENCODERS = ("statistics", "deep-sets", "slots", "attention", "places", "instances")
SCALES, TIMES = ("standard", "robust"), ("age", "calendar")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to learn, from which columns, and how.

    Args:
        target: The column with the labels.
        labels: A table with one row per set. If None, the labels are in a column of the rows, and
            constant within each set.
        set: The column with the set ids, or several: "run,event" or a list. If None, each file is
            one set.
        features: The columns that are features. If None, the vectors in `features` for files of
            slides, else all that can be.
        explode: Whether each row holds many elements, as lists.
        group: A column, of the table of labels or of the rows. Sets of one group fall into the same
            split.
        task: "classification", "regression", or "multiple-instance": classification by a weighted
            mean over elements, whose weights explain a prediction. If None, it is classification
            or regression, which follows from the labels.
        encoder: "auto", or one of "statistics", "deep-sets", "slots", "attention", "places" and
            "instances".
        seconds: The time for training.
        epochs: The number of epochs of each candidate; by default it follows from the time.
        validation: The share of sets that choose between candidates and stop the training.
        test: The share of sets that are used for nothing but the numbers that are reported. If it
            is 0, those of the validation sets are reported, which are too good.
        folds: How many times sets are held out for validation. With several folds every set is
            held out once, and each candidate is trained once more on all. If None, 3 for 20 to 299
            sets, else 1.
        scale: "standard" (mean and standard deviation) or "robust" (median and quartiles).
        center: Columns to center in each set, such as the coordinates of point clouds. The model
            then reads a set twice.
        position: Columns that are the position of an element, for the encoder "places". If None,
            columns that are named like coordinates, such as x, y and z.
        categories: Columns of whole numbers that are categories.
        log: Columns of numbers to take the logarithm of.
        times: "age" to read times relative to the last event of the set, which takes two passes
            over a set, or "calendar" for the time of day and the weekday only.
        balanced: Whether to weigh classes inversely to their frequency.
        seed: Of the split, the weights and the training.
        memory: The memory limit.
        skip_errors: Whether to leave out bad rows, sets without labels and labels without sets.

    Raises:
        InputError: A value is not possible.

    >>> TrainOptions(target="churned", set="user", encoder="slots").test
    0.2
    """

    target: str
    labels: str | Path | None = None
    set: str | Sequence[str] | None = None
    features: Sequence[str] | None = None
    explode: bool = False
    group: str | None = None
    task: str | None = None
    encoder: str = "auto"
    seconds: float = 600.0
    epochs: int | None = None
    validation: float = 0.2
    test: float = 0.2
    folds: int | None = None
    scale: str = "standard"
    center: Sequence[str] = ()
    position: Sequence[str] | None = None
    categories: Sequence[str] = ()
    log: Sequence[str] = ()
    times: str = "age"
    balanced: bool = False
    seed: int = 0
    memory: str | int = "2GB"
    skip_errors: bool = False

    def __post_init__(self) -> None:
        _check_choice("task", self.task, (None, *TASKS))
        _check_choice("encoder", self.encoder, ("auto", *ENCODERS))
        _check_choice("scale", self.scale, SCALES)
        _check_choice("times", self.times, TIMES)
        if not 0 <= self.seed < 2**32:
            raise InputError(f"seed must be from 0 to {2**32 - 1}; got {self.seed}.")
        if self.folds is not None and self.folds < 1:
            raise InputError(f"folds must be at least 1; got {self.folds}.")
        shares = self.validation > 0 and self.test >= 0 and self.validation + self.test < 1
        if not shares:
            raise InputError(
                "validation and test must be shares between 0 and 1, less than 1 together; got "
                f"{self.validation} and {self.test}."
            )


def _check_choice(name: str, value: str | None, choices: Sequence[str | None]) -> None:
    if value not in choices:
        known = ", ".join(choice for choice in choices if choice is not None)
        raise InputError(f"{name} must be one of {known}; got {value!r}.")
