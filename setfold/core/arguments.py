"""Checks of what constructors are given."""

from __future__ import annotations

from setfold.errors import InputError


def refuse_sizes(**sizes: object) -> None:
    """Raise unless every size, given by its name, is a whole number of at least 1.

    >>> refuse_sizes(dim_in=3, num_slots=4)
    """
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise InputError(f"{name} must be a whole number, 1 or more; got {size!r}.")


def refuse_other_than(allowed: tuple[str, ...], **choices: object) -> None:
    """Raise unless every choice, given by its name, is one of the allowed words.

    >>> refuse_other_than(("max", "mean"), subtract="max")
    """
    for name, choice in choices.items():
        if choice not in allowed:
            words = ", ".join(map(repr, allowed))
            raise InputError(f"{name} must be one of {words}; got {choice!r}.")


def refuse_uneven(num_heads: int, **widths: int) -> None:
    """Raise unless the number of heads divides every width, given by its name.

    >>> refuse_uneven(4, dim=64)
    """
    for name, width in widths.items():
        if width % num_heads:
            raise InputError(f"num_heads must divide {name}={width}; got {num_heads}.")
