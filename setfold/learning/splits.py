"""Which sets are for training, which choose the model, and which test it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from setfold.errors import InputError
from setfold.learning.labels import Labels, encode_targets, target_from
from setfold.preprocessing.targets import Quantity, Target

TRAINING, VALIDATION, TEST = range(3)


def assign_splits(
    labels: Labels, target: str, task: str | None, shares: tuple[float, float], seed: int
) -> tuple[Target, dict[str, int]]:
    """Return what to predict, and the split of each set that has a label.

    Args:
        labels: The labels.
        target: The name of the target.
        task: "classification" or "regression"; None to infer it.
        shares: The shares of validation and test.
        seed: Of the choice.
    """
    names, values = list(labels.values), list(labels.values.values())
    goal = target_from(target, values, task)
    groups = None if labels.groups is None else [labels.groups[name] for name in names]
    found = split(groups, encode_targets(goal, values), shares, seed).tolist()
    if isinstance(goal, Quantity):  # mean and deviation of the training sets alone
        pairs = zip(values, found, strict=True)
        goal = target_from(target, [v for v, own in pairs if own == TRAINING], "regression")
    return goal, dict(zip(names, found, strict=True))


def split(
    groups: Sequence[str] | None, targets: np.ndarray, shares: tuple[float, float], seed: int
) -> np.ndarray:
    """Assign each set to TRAINING, VALIDATION or TEST.

    Groups are not split. Without groups, each class has about the same share in all splits. A class
    with a single set is for training, one with two sets for training and validation (if that has a
    share), and one with three or more has a set in every split that has a share.

    Args:
        groups: The group of each set, or None.
        targets: Class numbers or quantities.
        shares: The shares of validation and test.
        seed: Of the choice.
    """
    random = np.random.default_rng(seed)
    names = np.arange(len(targets)) if groups is None else np.unique(groups, return_inverse=True)[1]
    keys = random.permutation(names.max() + 1)[names]  # a random order of groups
    by_class = groups is None and targets.dtype.kind == "i"
    strata = targets if by_class else np.zeros(len(targets), int)
    found = np.full(len(targets), TRAINING)
    for stratum in np.unique(strata):
        places = np.flatnonzero(strata == stratum)
        order = np.unique(keys[places])
        ends = np.cumsum(_sizes(shares, len(order)))
        rank = np.searchsorted(order, keys[places])
        found[places[rank < ends[1]]] = TEST
        found[places[rank < ends[0]]] = VALIDATION
    if (found == VALIDATION).sum() < 1:
        raise InputError(
            f"{len(targets)} sets are too few to be split. Add sets, or change --validation and "
            "--test."
        )
    return found


def _sizes(shares: tuple[float, float], number: int) -> list[int]:
    """Return how many of some sets are for validation and for the test.

    Every split that has a share gets a set, as far as they suffice: training first, then
    validation, then the test.

    >>> [_sizes((0.2, 0.2), number) for number in (1, 2, 3, 4, 10)]
    [[0, 0], [1, 0], [1, 1], [1, 1], [2, 2]]
    >>> _sizes((0.4, 0.4), 5), _sizes((0.2, 0.0), 3), _sizes((0.45, 0.45), 4)
    ([2, 2], [1, 0], [2, 1])
    """
    ends = np.round(np.cumsum(shares) * number)
    wanted = [int(ends[0]), int(ends[1] - ends[0])]
    sizes, left = [], number - 1  # one for training
    for place, share in enumerate(shares):
        later = sum(other > 0 for other in shares[place + 1 :])
        least = min(1, left) if share > 0 else 0
        sizes.append(max(least, min(wanted[place], left - later)))
        left -= sizes[-1]
    return sizes
