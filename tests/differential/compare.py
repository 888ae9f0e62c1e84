"""Compare the library with the formulas: the right answer, or an error where the dtype overflows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import setfold
from tests.differential import routes
from tests.differential.arithmetic import UNKNOWN, Arithmetic, Bounded, exact
from tests.differential.configurations import Configuration, draw_configuration, is_removable
from tests.differential.formulas import Formulas

RIGHT, REFUSED, OVERFLOWED = "right", "refused", "overflowed"


def check(number: int) -> str:
    """Run one configuration.

    Returns:
        "right"; "refused", if the library rightly raised an error; or "overflowed", if the encoding
        itself is infinite or NaN because its layers overflow in the dtype, as they do in PyTorch.
        A finite number is never wrong.

    Raises:
        AssertionError: with what reproduces it.
    """
    configuration = draw_configuration(number)
    try:
        found, slots = routes.run(configuration)
    except setfold.SetfoldError as error:
        return _refused(configuration, error)
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\n{configuration}") from error
    assert configuration.is_finite, f"elements are not finite, and nothing noticed\n{configuration}"
    assert found.dtype == configuration.dtype, f"the encoding is {found.dtype}\n{configuration}"
    sets = zip(slots, configuration.sets, configuration.gone, strict=True)
    outcome = RIGHT
    for number, (own, elements, gone) in enumerate(sets):
        arithmetic = Arithmetic(configuration.dtype)
        expected = _expected(configuration, arithmetic, own, elements, gone)
        numbers = found[number].double().numpy()
        if arithmetic.overflows and not np.isfinite(numbers).all():
            outcome, hidden = OVERFLOWED, ~np.isfinite(numbers)
            numbers = np.where(hidden, expected.value, numbers)
        _compare(numbers, expected, f"set {number}\n{configuration}")
    return outcome


def _expected(
    configuration: Configuration,
    arithmetic: Arithmetic,
    slots: tuple[Tensor, ...],
    elements: Tensor,
    gone: Tensor,
) -> Bounded:
    rows, removed = ([exact(row) for row in some.double().numpy()] for some in (elements, gone))
    own = [level.double().numpy() for level in slots]
    return Formulas(arithmetic).encode(configuration.encoder, own, rows, removed)


def _compare(found: np.ndarray, expected: Bounded, where: str) -> None:
    assert found.shape == expected.value.shape, (
        f"shape {found.shape} instead of {expected.value.shape}, {where}"
    )
    known = expected.error < UNKNOWN  # otherwise nothing is promised but a number
    off = np.abs(found - expected.value)
    wrong = ~np.isfinite(found) | (known & ~(off <= expected.error))
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0])
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} numbers are wrong; at {place} {found[place]!r} instead "
            f"of {expected.value[place]!r}, with an error of up to {expected.error[place]:.3g}, "
            f"{where}"
        )


def _refused(configuration: Configuration, error: setfold.SetfoldError) -> str:
    """Whether an error is right: elements that are not finite, overflow, or removal."""
    if not configuration.is_finite:
        assert isinstance(error, setfold.NonFiniteError), f"{error!r}\n{configuration}"
        return REFUSED
    if isinstance(error, setfold.NotRemovableError):
        assert configuration.route.removes, f"{error!r}\n{configuration}"
        assert not is_removable(configuration.encoder), f"{error!r}\n{configuration}"
        return REFUSED
    assert _overflows(configuration), f"{type(error).__name__}: {error}\n{configuration}"
    return REFUSED


def _overflows(configuration: Configuration) -> bool:
    """Whether the formulas overflow in the dtype, for some set with all that was added to it."""
    slots = tuple(level[0].detach() for level in configuration.encoder.initial_state(1).frame)
    for elements, gone in zip(configuration.sets, configuration.gone, strict=True):
        arithmetic = Arithmetic(configuration.dtype)
        every = torch.cat([elements, gone])
        _expected(configuration, arithmetic, slots, every, every[:0])
        if arithmetic.overflows:
            return True
    return False
