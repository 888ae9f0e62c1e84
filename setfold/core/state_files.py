"""What a file says about states: their fields as JSON, and the form of their tensors.

A file may come from anywhere, so everything that the rest of setfold relies on is checked.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from setfold.core.statistic import DEFINED, Field, Fields, Parts, is_free, name_in_files
from setfold.errors import FileError

if TYPE_CHECKING:
    from setfold.core.state import SetState

MAX_COUNT = torch.iinfo(torch.long).max
TOTALS = (torch.float64, torch.float32)  # dtypes of statistics; float32 on MPS


def describe_fields(fields: Fields) -> dict[str, list[object]]:
    """Fields as JSON: by name, the statistic and the shape.

    >>> from setfold.core.statistic import Sum
    >>> describe_fields({"sum": Field(Sum(), (4, 9))})
    {'sum': ['Sum', [4, 9]]}
    """
    return {n: [name_in_files(type(f.statistic)), list(f.shape)] for n, f in fields.items()}


def fields_from(description: Any) -> dict[str, Field]:
    """Fields from what `describe_fields` returned; imports nothing.

    Raises:
        FileError: a statistic is not defined in this process.
        ValueError: the description is malformed.
    """
    if not isinstance(description, dict):
        raise ValueError(f"fields must be a JSON object; got {description!r:.60}")
    found = {}
    for name, entry in description.items():
        if not is_free(name):
            raise ValueError(f"a field cannot be named {name!r:.60}")
        if not (isinstance(entry, list) and [*map(type, entry)] == [str, list]):
            raise ValueError(f"the field {name!r} must be [statistic, shape]; got {entry!r:.60}")
        statistic, shape = entry
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"the shape of {name!r} must be sizes; got {shape!r:.60}")
        kind = DEFINED.get(statistic)
        if kind is None or inspect.isabstract(kind):
            raise FileError(
                f"the field {name!r} keeps the statistic {statistic}, which is not defined here: "
                "import the module that defines it before you load the state."
            )
        found[name] = Field(kind(), tuple(shape))
    return found


def names_of(fields: Fields) -> list[str]:
    """The names of the tensors that every state with these fields has, as in `SetState.tensors`."""
    parts = [
        f"{name}.{i}" for name, field in fields.items() for i in range(len(field.statistic.empty))
    ]
    return [*parts, "count"]


def check_form(state: SetState) -> None:
    """Raise ValueError unless the tensors have the form and range that the fields declare."""
    check_counts(state.count)
    sets = len(state.count)
    for name, field in state.fields.items():
        check_field(name, field, state.statistics[name], sets)
    for slots in state.frame:
        if slots.dim() != 3 or slots.shape[0] not in (1, sets):
            raise ValueError(f"slots must be (1, K, h) or ({sets}, K, h)")
        if not slots.is_floating_point() or not bool(slots.isfinite().all()):
            raise ValueError("slots must be finite numbers")
    if any(part.shape[:1] != state.count.shape for part in state.context):
        raise ValueError(f"contexts must be ({sets}, ...)")


def check_counts(count: Tensor) -> None:
    """Raise ValueError unless they are the numbers of elements of some sets."""
    if count.dtype != torch.long or count.dim() != 1 or bool((count < 0).any()):
        raise ValueError("counts must be int64 (B,), at least 0")
    sets = len(count)
    if sets and int(count.max()) > MAX_COUNT // sets and sum(count.tolist()) > MAX_COUNT:
        raise ValueError("the sum of the counts must be below 2**63")


def check_field(name: str, field: Field, parts: Parts, sets: int) -> None:
    """Raise ValueError unless parts have the form and range that a field declares."""
    for part, shape, empty in zip(parts, field.shapes, field.statistic.empty, strict=True):
        if tuple(part.shape) != (sets, *shape) or part.dtype not in TOTALS:
            raise ValueError(f"{name!r} must be float64 {(sets, *shape)}")
        if not _is_usable(part, empty):
            raise ValueError(f"{name!r} must be finite")


def _is_usable(part: Tensor, empty: float) -> bool:
    """Whether all values are finite, or infinite like those of an empty set."""
    if math.isfinite(part.sum().item()):  # a sum shows NaN and infinity, and takes less time
        return True
    return bool((part.isfinite() | (part == empty)).all())
