"""Arguments of constructors, validated."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from setfold.errors import InputError

MAX_SIZE = 2**31 - 1


# ---- constructors ------------------------------------------------------------------------------


def check_sizes(least: int = 1, **sizes: object) -> None:
    """Raise InputError unless every named size is an integer of at least `least`.

    >>> check_sizes(dim_in=3, num_slots=4)
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise InputError(f"{name} must be an integer of at least {least}; got {size!r}.")
        if size > MAX_SIZE:
            raise InputError(f"{name} must be an integer of at most {MAX_SIZE}; got {size!r}.")


def check_positive(**numbers: object) -> None:
    """Raise InputError unless every named number is positive and finite.

    >>> check_positive(epsilon=1e-5)
    """
    for name, number in numbers.items():
        real = isinstance(number, int | float) and not isinstance(number, bool)
        if not real or not 0 < number < math.inf:  # type: ignore[operator]  # mypy forgets `real`
            raise InputError(f"{name} must be a positive number; got {number!r}.")


def check_numbers(**numbers: object) -> None:
    """Raise InputError unless every named number is finite.

    >>> check_numbers(center=-2.5)
    """
    for name, number in numbers.items():
        real = isinstance(number, int | float) and not isinstance(number, bool)
        if not real or not math.isfinite(number):  # type: ignore[arg-type]  # mypy forgets `real`
            raise InputError(f"{name} must be a finite number; got {number!r}.")


def check_text(**texts: object) -> None:
    """Raise InputError unless every named value is text, and not empty.

    >>> check_text(name="amount")
    """
    for name, text in texts.items():
        if not isinstance(text, str) or not text:
            raise InputError(f"{name} must be text; got {text!r}.")


def check_flags(**flags: object) -> None:
    """Raise InputError unless every named flag is True or False.

    >>> check_flags(bias=True)
    """
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputError(f"{name} must be True or False; got {flag!r}.")


def check_modules(**modules: object) -> None:
    """Raise InputError unless every named module is a torch.nn.Module or None.

    >>> check_modules(features=nn.Linear(3, 4), head=None)
    """
    for name, module in modules.items():
        if not isinstance(module, nn.Module | None):
            raise InputError(f"{name} must be a torch.nn.Module or None; got {module!r}.")


def check_choice(allowed: tuple[str, ...], **choices: object) -> None:
    """Raise InputError unless every named choice is one of the allowed words.

    >>> check_choice(("max", "mean"), subtract="max")
    """
    for name, choice in choices.items():
        if choice not in allowed:
            words = ", ".join(map(repr, allowed))
            raise InputError(f"{name} must be one of {words}; got {choice!r}.")


def words_of(allowed: Sequence[str], name: str, given: Any) -> list[str]:
    """One word or several different ones, in order, each of them allowed.

    Raises:
        InputError: it is something else.

    >>> words_of(("max", "mean"), "aggregate", "max")
    ['max']
    """
    alone = isinstance(given, str) or not isinstance(given, Sequence)
    words = [given] if alone else [*given]
    if not words or any(word not in allowed for word in words) or len({*words}) < len(words):
        raise InputError(
            f"{name} must be one of {', '.join(allowed)}, or a list of different ones; got "
            f"{given!r}."
        )
    return words


def numbers_of(name: str, given: Any) -> tuple[float, ...]:
    """One finite number or several.

    Raises:
        InputError: it is something else.

    >>> numbers_of("low", 0), numbers_of("high", [1, 2.5])
    ((0.0,), (1.0, 2.5))
    """
    alone = isinstance(given, str) or not isinstance(given, Sequence)
    numbers = [given] if alone else [*given]
    for number in numbers:
        real = isinstance(number, int | float) and not isinstance(number, bool)
        if not real or not abs(number) <= sys.float_info.max:
            raise InputError(f"{name} must be finite numbers; got {given!r:.200}.")
    return tuple(float(number) for number in numbers)


def check_heads(num_heads: int, **widths: int) -> None:
    """Raise InputError unless the number of heads divides every named width.

    >>> check_heads(4, dim=64)
    """
    for name, width in widths.items():
        if width % num_heads:
            raise InputError(f"num_heads must divide {name}={width}; got {num_heads}.")
