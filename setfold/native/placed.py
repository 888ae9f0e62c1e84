"""The compiled kernels for attention by distance, as functions of tensors; see `dispatch`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from setfold.native.dispatch import NOT_FINITE, Batch, batch_of, check, is_plain
from setfold.native.library import Kernels, choice
from setfold.native.threads import over_threads

KINDS = {"features": 0, "offsets": 1, "squares": 2}  # as in places.c
MAX_REACH = 12.0  # beyond it weights may be 0 within reach
MAX_SIZE = 1 << 24  # nodes of an axis that float32 can number
MAX_PAIRS = 1 << 16  # slots that an element meets; more take more memory than torch needs
CROWDED = 4  # pairs for each slot from which on threads have more to do than to add up their sums


class Neighbourhood(NamedTuple):
    """Which slots of a regular grid an element meets, and how."""

    shape: tuple[int, ...]  # of the grid
    windows: tuple[int, ...]  # nodes on each axis that an element meets
    radius: float  # how far they are, in units of the grid
    width: float
    reach: float
    normalized: bool


class _Places(ctypes.Structure):  # as in places.c
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("axes", "features", "kinds")),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("shape", "windows", "kind")),
        *((name, ctypes.c_float) for name in ("radius", "width", "limit")),
        ("normalized", ctypes.c_int32),
    )


class _Elements(ctypes.Structure):  # likewise
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("positions", "features", "shown")),
        *((name, ctypes.c_int64) for name in ("sets", "length", "step", "features_step")),
        *((name, ctypes.c_int64) for name in ("row_step", "shown_step")),
    )


def placed_sums(
    positions: Tensor,
    features: Tensor,
    mask: Tensor | None,
    near: Neighbourhood,
    values: tuple[str, ...],
    squared: bool,
) -> Tensor | None:
    """The sums (B, K, C) in float64 of weighted values, their squares if `squared`, and weights.

    None, too, if a number that is not hidden is not finite.

    Args:
        positions: (B, n, p), in units of the grid.
        features: (B, n, f).
        mask: (B, n), True where present, or None.
        near: the slots that an element meets.
        values: what is weighted: some of "features", "offsets" and "squares".
        squared: whether to sum the squares of the values as well.
    """
    found = _prepare(positions, features, mask, near)
    if found is None:
        return None
    library, batch = found
    places, channels = _describe(near, features.shape[2], values)
    shape = (_size(near.shape), channels * (2 if squared else 1) + 1)

    def run(sets: slice, rows: slice) -> Tensor | None:
        out = positions.new_zeros(sets.stop - sets.start, *shape, dtype=torch.float64)
        some = _elements(batch, features, sets, rows)
        result = library.placed_sums(some, ctypes.byref(places), squared, out.data_ptr())
        if result == NOT_FINITE:
            return None
        check(result)
        return out

    return _over_threads(run, batch, near, torch.add)


def placed_extrema(
    positions: Tensor,
    features: Tensor,
    mask: Tensor | None,
    near: Neighbourhood,
    values: tuple[str, ...],
    largest: bool,
) -> Tensor | None:
    """The largest (or smallest) weighted values (B, K, C); -inf (or inf) for untouched slots.

    The other arguments are those of `placed_sums`.
    """
    found = _prepare(positions, features, mask, near)
    if found is None:
        return None
    library, batch = found
    places, channels = _describe(near, features.shape[2], values)
    shape = (_size(near.shape), channels)
    sign = 1.0 if largest else -1.0

    def run(sets: slice, rows: slice) -> Tensor | None:
        best = positions.new_full((sets.stop - sets.start, *shape), -sign * torch.inf)
        some = _elements(batch, features, sets, rows)
        result = library.placed_extrema(some, ctypes.byref(places), sign, best.data_ptr())
        if result == NOT_FINITE:
            return None
        check(result)
        return best

    return _over_threads(run, batch, near, torch.maximum if largest else torch.minimum)


def _prepare(
    positions: Tensor, features: Tensor, mask: Tensor | None, near: Neighbourhood
) -> tuple[Kernels, Batch] | None:
    """The kernels and what they read; None if they cannot."""
    library = choice.kernels
    if library is None or not (is_plain(positions) and is_plain(features)):
        return None
    if positions.dim() != 3 or features.dim() != 3 or features.shape[:2] != positions.shape[:2]:
        return None
    if features.numel() and features.shape[2] > 1 and features.stride(2) != 1:
        return None
    if positions.shape[2] != len(near.shape) or max(near.shape) > MAX_SIZE:
        return None
    fits = all(0 < w <= size for w, size in zip(near.windows, near.shape, strict=True))
    if not fits or not near.width > 0 or not near.reach <= MAX_REACH:
        return None
    if _size(near.windows) > MAX_PAIRS:
        return None
    batch = batch_of(positions, mask)
    return None if batch is None else (library, batch)


def _describe(near: Neighbourhood, features: int, values: tuple[str, ...]) -> tuple[_Places, int]:
    """The arguments of a kernel, and the number of channels."""
    axes = len(near.shape)
    sizes = ctypes.c_int64 * axes
    kinds = [KINDS[name] for name in values]
    places = _Places(
        *(axes, features, len(kinds)),
        *(sizes(*near.shape), sizes(*near.windows), (ctypes.c_int64 * len(kinds))(*kinds)),
        *(near.radius, near.width, near.reach**2, near.normalized),
    )
    return places, sum(axes if kind else features for kind in kinds)


def _elements(batch: Batch, features: Tensor, sets: slice, rows: slice) -> Any:
    start, step, shown, shown_step, number, length, _ = batch.part(sets, rows)
    features_step, row_step, _ = features.stride()
    skipped = sets.start * features_step + rows.start * row_step
    return ctypes.byref(
        _Elements(
            *(start, features.data_ptr() + 4 * skipped, shown, number, length),
            *(step, features_step, row_step, shown_step),
        )
    )


def _over_threads(
    run: Callable[[slice, slice], Tensor | None],
    batch: Batch,
    near: Neighbourhood,
    join: Callable[[Tensor, Tensor], Tensor],
) -> Tensor | None:
    def join_all(left: Tensor | None, right: Tensor | None) -> Tensor | None:
        return None if left is None or right is None else join(left, right)

    def gather(results: list[Tensor | None]) -> Tensor | None:
        found = [result for result in results if result is not None]
        return torch.cat(found) if len(found) == len(results) else None

    pairs, (batch_size, length, _) = _size(near.windows), batch.shape
    crowded = pairs * length > CROWDED * _size(near.shape)
    if batch_size == 1 and not crowded:
        return run(slice(0, 1), slice(0, length))
    return over_threads(run, batch.shape, pairs, join_all, gather)


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
