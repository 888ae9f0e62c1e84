"""Which sets are for training, which choose the model, and which test it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from setfold.errors import InputError
from setfold.learning.labels import Labels, encode_targets, target_from
from setfold.preprocessing.targets import Quantity, Target

TRAINING, TEST = -1, -2  # other sets are numbered by the fold that holds them out
FEW, MANY = 20, 300  # between them, one validation split is too small to choose by
FOLDS = 3


def usual_folds(sets: int) -> int:
    """Return how many folds hold out sets, unless the user chooses."""
    return FOLDS if FEW <= sets < MANY else 1


def assign_splits(
    labels: Labels,
    target: str,
    task: str | None,
    shares: tuple[float, float],
    folds: int | None,
    seed: int,
) -> tuple[Target, dict[str, int]]:
    """Return what to predict, and the split of each set that has a label.

    Args:
        labels: The labels.
        target: The name of the target.
        task: The kind of the target; None to infer it.
        shares: The shares of validation and test.
        folds: How many folds hold out sets; None for several if there are few sets.
        seed: Of the choice.
    """
    names, values = list(labels.values), list(labels.values.values())
    goal = target_from(target, values, task)
    groups = None if labels.groups is None else [labels.groups[name] for name in names]
    number = folds or usual_folds(len(names))
    found = split(groups, encode_targets(goal, values), shares, number, seed).tolist()
    if isinstance(goal, Quantity):  # mean and deviation without the test sets
        pairs = zip(values, found, strict=True)
        goal = target_from(target, [v for v, own in pairs if own != TEST], "regression")
    return goal, dict(zip(names, found, strict=True))


def split(
    groups: Sequence[str] | None,
    targets: np.ndarray,
    shares: tuple[float, float],
    folds: int,
    seed: int,
) -> np.ndarray:
    """Assign each set to TRAINING, to TEST, or to the fold that holds it out.

    Groups are not split. Without groups, each class has about the same share in all splits. A class
    with a single set is for training, one with two sets for training and validation (if that has a
    share), and one with three or more has a set in every split that has a share.

    Args:
        groups: The group of each set, or None.
        targets: Class numbers or quantities.
        shares: The shares of validation and test. Several folds hold out all sets that are not for
            the test, each once.
        folds: The number of folds.
        seed: Of the choice.

    >>> split(None, np.array([0, 0, 0, 0, 0, 1, 1, 1, 1, 1]), (0.2, 0.2), 1, seed=0)
    array([-1, -1,  0, -1, -2, -1, -1,  0, -1, -2])
    """
    random = np.random.default_rng(seed)
    names = np.arange(len(targets)) if groups is None else np.unique(groups, return_inverse=True)[1]
    keys = random.permutation(names.max() + 1)[names]  # a random order of groups
    by_class = groups is None and targets.dtype.kind == "i"
    strata = targets if by_class else np.zeros(len(targets), int)
    codes = np.array([*range(folds), TEST, TRAINING])
    found = np.full(len(targets), TRAINING)
    for turn, stratum in enumerate(np.unique(strata)):
        places = np.flatnonzero(strata == stratum)
        order = np.unique(keys[places])
        ends = np.cumsum(_sizes(shares, folds, len(order), turn))
        rank = np.searchsorted(order, keys[places])
        found[places] = codes[np.searchsorted(ends, rank, side="right")]
    if len({*found.tolist()} - {TRAINING, TEST}) < folds:
        raise InputError(
            f"{len(targets)} sets are too few to be split. Add sets, or change the shares of "
            "validation and test, or the number of folds."
        )
    return found


def _sizes(shares: tuple[float, float], folds: int, number: int, turn: int = 0) -> list[int]:
    """Return how many of some sets each fold holds out, and how many are for the test.

    Every split that has a share gets a set, as far as they suffice: training first, then
    validation, then the test.

    Args:
        shares: The shares of validation and test.
        folds: The number of folds.
        number: The number of sets.
        turn: Which of several folds gets the first set that is left over.

    >>> [_sizes((0.2, 0.2), 1, number) for number in (1, 2, 3, 4, 10)]
    [[0, 0], [1, 0], [1, 1], [1, 1], [2, 2]]
    >>> _sizes((0.4, 0.4), 1, 5), _sizes((0.2, 0.0), 1, 3), _sizes((0.45, 0.45), 1, 4)
    ([2, 2], [1, 0], [2, 1])
    >>> [_sizes((0.2, 0.2), 3, number) for number in (1, 2, 3, 10)]
    [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 1], [3, 3, 2, 2]]
    """
    if folds > 1:
        test = min(max(round(shares[1] * number), 1), max(number - 2, 0)) if shares[1] else 0
        rest = number - test if number > 1 else 0
        held = [rest // folds + ((fold - turn) % folds < rest % folds) for fold in range(folds)]
        return [*held, test]
    ends = np.round(np.cumsum(shares) * number)
    wanted = [int(ends[0]), int(ends[1] - ends[0])]
    sizes, left = [], number - 1  # one for training
    for place, share in enumerate(shares):
        later = sum(other > 0 for other in shares[place + 1 :])
        least = min(1, left) if share > 0 else 0
        sizes.append(max(least, min(wanted[place], left - later)))
        left -= sizes[-1]
    return sizes
