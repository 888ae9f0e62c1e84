"""Check the arguments of public functions against their annotations."""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from setfold.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")


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
                if not _fits(given, options[key]):
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
