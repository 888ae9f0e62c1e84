"""Arguments of constructors and of public functions, validated."""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import nn

from setfold.errors import InputError

MAX_SIZE = 2**31 - 1

P = ParamSpec("P")
T = TypeVar("T")


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


# ---- public functions --------------------------------------------------------------------------


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, which raises InputError if an argument is not of its annotated type.

    >>> @checked
    ... def double(number: int) -> int:
    ...     return 2 * number
    >>> double("a")
    Traceback (most recent call last):
    setfold.errors.InputError: double: number must be int; got str.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        hints = _hints_of(function)
        for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                options = _hints_of(get_args(hints[name])[0])
                known = {key: given for key, given in value.items() if key in options}
            else:
                options, known = hints, {name: value}
            for key, given in known.items():
                if key in options and not _fits(given, options[key]):  # `self` has no annotation
                    raise InputError(
                        f"{function.__name__}: {key} must be {_text(options[key])}; got "
                        f"{_type_of(given)}.{_advice(given)}"
                    )
        return function(*args, **kwargs)

    return call


@functools.cache
def _hints_of(annotated: Any) -> dict[str, Any]:
    return get_type_hints(annotated)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has an annotated type, as far as that can be told without using it up."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin in (Sequence, Iterable):
        is_text = isinstance(value, str | bytes)
        is_list = isinstance(value, list | tuple | set | frozenset)
        if is_list:
            return all(_fits(item, inner[0]) for item in value)
        return isinstance(value, origin) and not is_text
    if origin is Callable:
        return callable(value)
    if hint is Path:
        return isinstance(value, os.PathLike)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _text(hint: Any) -> str:
    """Return an annotation as it is written in code."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_text, inner))
    if origin in (Sequence, Iterable):
        return f"a list of {_text(inner[0])}"
    if origin is Callable:
        return "a function"
    return "None" if hint is type(None) else str(hint.__name__)


def _advice(value: Any) -> str:
    """Return what to do with a data frame where it does not belong."""
    is_frame = hasattr(value, "__arrow_c_stream__") or hasattr(value, "columns")
    return " Pass a data frame to setfold.encode_frame." if is_frame else ""


def _type_of(value: Any) -> str:
    """Return the type of a value, and of the first item of a list."""
    name = type(value).__name__
    return f"{name} of {type(value[0]).__name__}" if isinstance(value, list) and value else name
