"""Compare the library with the formulas, number by number.

Where the exact number fits into the dtype, the library returns it up to rounding; where it does
not, it returns infinity with its sign. Where the library's own layers overflow on the way, it may
raise an error instead. A head is a module of the user: if it overflows, the numbers that it returns
may be infinite or NaN.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import setfold
from tests.differential import routes
from tests.differential.arithmetic import UNKNOWN, Arithmetic, Bounded, exact
from tests.differential.configurations import Configuration, draw_configuration, is_removable
from tests.differential.formulas import Formulas

RIGHT, REFUSED, INFINITE, OVERFLOWED = "right", "refused", "infinite", "overflowed"


def check(number: int) -> str:
    """Run one configuration.

    Returns:
        "right"; "refused", if the library rightly raised an error; "infinite", if some numbers are,
        because the exact ones do not fit into the dtype; or "overflowed", if a head overflows.

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
        compare_numbers(numbers, expected, arithmetic, f"set {number}\n{configuration}")
        if not np.isfinite(numbers).all():
            outcome = OVERFLOWED if arithmetic.overflows_in_module else INFINITE
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


def compare_numbers(
    found: np.ndarray, expected: Bounded, arithmetic: Arithmetic, where: str
) -> None:
    """Raise AssertionError if a number is neither right nor rightly infinite."""
    assert found.shape == expected.value.shape, (
        f"shape {found.shape} instead of {expected.value.shape}, {where}"
    )
    value, error, _ = expected
    known = error < UNKNOWN  # otherwise nothing is promised but a number
    close = np.isfinite(found) & (~known | (np.abs(found - value) <= error))
    outermost = np.sign(found) * value + np.where(known, error, 0.0)
    right = close | (np.isinf(found) & (outermost > arithmetic.largest))
    if arithmetic.overflows_in_module:
        right |= ~np.isfinite(found)
    if not right.all():
        place = tuple(np.argwhere(~right)[0])
        raise AssertionError(
            f"{(~right).sum()} of {right.size} numbers are wrong; at {place} {found[place]!r} "
            f"instead of {value[place]!r}, with an error of up to {error[place]:.3g}, {where}"
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
