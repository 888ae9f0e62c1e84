"""The compiled kernels as functions of tensors.

This, `slots.py`, `placed.py` and `tables.py` are the only places that decide whether a compiled kernel
runs. Every function returns None if it cannot: without a library, for other dtypes, devices and
layouts, and for shapes that do not fit together, which plain torch reports. The caller makes sure
that no compiler, tracer or transform is active and that no graph is recorded.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor, nn

from setfold.native import threads
from setfold.native.library import Kernels, choice
from setfold.native.threads import concatenate, join_softmax, total

ATTENTIONS = {"sigmoid": 0, "softmax": 1, "exponential": 2}  # as in attention.h
NO_MEMORY, NOT_FINITE, BAD_INDEX = 1, 2, 3  # as in export.h
MAX_NUMBER = (1 << 31) - 1  # the kernel numbers blocks, and pairs of slot and channel, in 32 bits
INTEGERS = (torch.int64, torch.int32)
PLAIN = (Tensor, nn.Parameter)  # subclasses may do anything
LINE = 64  # bytes of a cache line
MOST_KEPT = 1 << 24  # bytes of sums whose memory is kept for the next ones
LARGEST_MATRIX = 1 << 18  # numbers; a larger one leaves the cache, and torch multiplies faster


class Batch(NamedTuple):
    """Sets (B, n, d) in memory, as the kernels read them."""

    tensors: tuple[Tensor | None, ...]  # kept alive while a thread reads them
    start: int
    step: int  # numbers from one set to the next
    mask_start: int | None
    mask_step: int
    shape: tuple[int, int, int]

    def part(self, sets: slice, rows: slice) -> tuple[int | None, ...]:
        """What a kernel needs to know of some rows of some sets."""
        mask = self.mask_start
        if mask is not None:
            mask += sets.start * self.mask_step + rows.start
        return (
            self.start + 4 * (sets.start * self.step + rows.start * self.shape[2]),
            self.step,
            mask,
            self.mask_step,
            sets.stop - sets.start,
            rows.stop - rows.start,
            self.shape[2],
        )


def sums(elements: Tensor, mask: Tensor | None, matrix: Tensor, attention: str) -> Tensor | None:
    """sum_i W_ij [x_i, 1] (B, K, d + 1) in float64, with weights over slots.

    Args:
        elements: (B, n, d).
        mask: (B, n), True where present, or None.
        matrix: (d + 1, K), of the scores.
        attention: "sigmoid" or "softmax".
    """
    found = _prepare(elements, mask, matrix)
    if found is None or matrix.numel() > LARGEST_MATRIX:
        return None
    library, batch, matrix = found
    width, num_slots = batch.shape[2], matrix.shape[1]

    def run(sets: slice, rows: slice) -> Tensor:
        shape = (sets.stop - sets.start, num_slots, width + 1)
        out = elements.new_empty(shape, dtype=torch.float64)
        scores = (matrix.data_ptr(), num_slots, ATTENTIONS[attention])
        check(library.sums(*batch.part(sets, rows), *scores, out.data_ptr()))
        return out

    return _in_parts(run, batch.shape, num_slots, torch.add, torch.cat)


def softmax(elements: Tensor, mask: Tensor | None, matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """The peaks m (B, K) of the logits and sum_i exp(l_ij - m_j) [x_i, 1], in float64."""
    found = _prepare(elements, mask, matrix)
    if found is None or matrix.numel() > LARGEST_MATRIX:
        return None
    library, batch, matrix = found
    width, num_slots = batch.shape[2], matrix.shape[1]

    def run(sets: slice, rows: slice) -> tuple[Tensor, Tensor]:
        shape = (sets.stop - sets.start, num_slots)
        peaks = elements.new_empty(shape, dtype=torch.float64)
        out = elements.new_empty(*shape, width + 1, dtype=torch.float64)
        scores = (matrix.data_ptr(), num_slots)
        arguments = batch.part(sets, rows)
        check(library.softmax(*arguments, *scores, peaks.data_ptr(), out.data_ptr()))
        return peaks, out

    return _in_parts(run, batch.shape, num_slots, join_softmax, concatenate)


def gradients(
    elements: Tensor,
    mask: Tensor | None,
    matrix: Tensor,
    attention: str,
    upstream: Tensor,
    peaks: Tensor | None = None,
    need_elements: bool = False,
) -> tuple[Tensor | None, Tensor] | None:
    """dL/dx and dL/dA (d + 1, K), in float64, from dL/dsums (B, K, d + 1).

    Args:
        elements: (B, n, d).
        mask: (B, n), True where present, or None.
        matrix: (d + 1, K), of the scores.
        attention: "sigmoid" or "softmax" over slots, or "exponential" for a softmax over elements.
        upstream: dL/dsums.
        peaks: (B, K), finite, for "exponential".
        need_elements: whether to compute dL/dx; None otherwise.
    """
    found = _prepare(elements, mask, matrix)
    if found is None or matrix.numel() > LARGEST_MATRIX:
        return None
    library, batch, matrix = found
    upstream = upstream.to(torch.float32).contiguous()
    peaks = None if peaks is None else peaks.to(torch.float32).contiguous()
    elements_grad = elements.new_empty(elements.shape) if need_elements else None
    (_, length, width), num_slots = elements.shape, matrix.shape[1]

    def run(sets: slice, rows: slice) -> Tensor:
        out = matrix.new_empty(matrix.shape, dtype=torch.float64)
        to = None if elements_grad is None else elements_grad.data_ptr()
        if to is not None:
            to += 4 * width * (sets.start * length + rows.start)
        scores = (matrix.data_ptr(), num_slots, ATTENTIONS[attention])
        result = library.gradients(
            *batch.part(sets, rows),
            *scores,
            None if peaks is None else peaks.data_ptr() + 4 * sets.start * num_slots,
            upstream.data_ptr() + 4 * sets.start * num_slots * (width + 1),
            *(out.data_ptr(), to, length * width),
        )
        check(result)
        return out

    matrix_grad = _in_parts(run, batch.shape, num_slots, torch.add, total)
    return None if matrix_grad is None else (elements_grad, matrix_grad)


def extrema(
    elements: Tensor,
    mask: Tensor | None,
    matrix: Tensor,
    attention: str,
    values: Tensor,
    largest: bool,
    need_winners: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """The largest (or smallest) W_ij v_ic (B, K, d_out), and the elements that attain it.

    None, too, if a weight or a value is not finite.

    Args:
        elements: (B, n, d), with n at least 1.
        mask: (B, n), True where present, or None.
        matrix: (d + 1, K), of the scores.
        attention: "sigmoid" or "softmax" over slots.
        values: (d + 1, d_out), maps [x, 1] to values.
        largest: True for the maximum, False for the minimum.
        need_winners: whether to find the elements that attain it; None otherwise.
    """
    found = _prepare(elements, mask, matrix)
    if found is None or not is_plain(values) or values.shape[:-1] != matrix.shape[:1]:
        return None
    library, batch, matrix = found
    values = values.contiguous()
    num_slots, dim_out = matrix.shape[1], values.shape[1]
    if max(num_slots * dim_out, batch.shape[1]) > MAX_NUMBER:
        return None
    sign = 1.0 if largest else -1.0

    def run(sets: slice, rows: slice) -> tuple[Tensor, Tensor | None] | None:
        best = elements.new_empty(sets.stop - sets.start, num_slots, dim_out)
        winners = best.new_empty(best.shape, dtype=torch.long) if need_winners else None
        result = library.extrema(
            *batch.part(sets, rows),
            *(matrix.data_ptr(), num_slots, ATTENTIONS[attention]),
            *(values.data_ptr(), dim_out, sign, best.data_ptr()),
            None if winners is None else winners.data_ptr(),
        )
        if result == NOT_FINITE:
            return None
        check(result)
        return best, None if winners is None else winners.add_(rows.start)

    def better(left: Any, right: Any) -> Any:
        if left is None or right is None:
            return None
        wins = (right[0] > left[0]) if largest else (right[0] < left[0])
        pairs = zip(left, right, strict=True)
        return tuple(None if a is None else torch.where(wins, b, a) for a, b in pairs)

    return _in_parts(run, batch.shape, num_slots * dim_out, better, concatenate)


def ragged_sums(
    elements: Tensor, index: Tensor, batch_size: int, matrix: Tensor, attention: str
) -> Tensor | None:
    """`sums` (S, K, d + 1) of ragged rows (N, d), with the set of each row in `index` (N,).

    None, too, if an index is not from 0 to S - 1, or a logit is not finite.
    """
    library, numbers = choice.kernels, _numbers_of_sets(elements, index)
    if library is None or numbers is None or not _fits(elements, matrix):
        return None
    if matrix.numel() > LARGEST_MATRIX:
        return None
    matrix = matrix.contiguous()
    out = _room_for(batch_size, *matrix.shape[::-1])
    result = library.ragged_sums(
        *(elements.data_ptr(), numbers.data_ptr(), *elements.shape, batch_size),
        *(matrix.data_ptr(), matrix.shape[1], ATTENTIONS[attention], out.data_ptr()),
    )
    if result in (BAD_INDEX, NOT_FINITE):
        return None
    check(result)
    return out


def ragged_totals(elements: Tensor, index: Tensor, batch_size: int) -> Tensor | None:
    """The sums (S, d) of ragged rows (N, d), in float64, with the set of each row in `index` (N,).

    None, too, if an index is not from 0 to S - 1.
    """
    library, numbers = choice.kernels, _numbers_of_sets(elements, index)
    if library is None or numbers is None:
        return None
    out = elements.new_empty(batch_size, elements.shape[1], dtype=torch.float64)
    data = (elements.data_ptr(), numbers.data_ptr(), *elements.shape, batch_size)
    return out if library.ragged_totals(*data, out.data_ptr()) == 0 else None


def ragged_extremes(
    elements: Tensor, index: Tensor, batch_size: int, largest: bool
) -> Tensor | None:
    """The same with maxima, or minima; infinite for a set without rows."""
    library, numbers = choice.kernels, _numbers_of_sets(elements, index)
    if library is None or numbers is None:
        return None
    out = elements.new_empty(batch_size, elements.shape[1])
    data = (elements.data_ptr(), numbers.data_ptr(), *elements.shape, batch_size)
    return out if library.ragged_extremes(*data, largest, out.data_ptr()) == 0 else None


def _numbers_of_sets(elements: Tensor, index: Tensor) -> Tensor | None:
    """The set of each of some rows (N, d) as the kernels read it; None if they cannot read both."""
    if elements.dim() != 2 or not is_plain(elements) or not elements.is_contiguous():
        return None
    if index.shape != elements.shape[:1] or index.dtype not in INTEGERS or not index.is_cpu:
        return None
    return index.to(torch.long).contiguous()


class Room(threading.local):
    """Memory for arrays, used again when nothing refers to it: new pages take time, too.

    Each thread has its own.

    >>> room = Room()
    >>> first = room.empty((2, 3), np.float32).ctypes.data  # nothing refers to it
    >>> kept = room.empty((2, 3), np.float32)
    >>> kept.ctypes.data == first, room.empty((2, 3), np.float32).ctypes.data == first
    (True, False)
    """

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def __reduce__(self) -> tuple[type[Room], tuple[()]]:
        return Room, ()  # in another process it begins empty

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """An array of any content, aligned to cache lines."""
        size = prod(shape) * np.dtype(dtype).itemsize
        array = self._unused(size + LINE)
        start = -array.ctypes.data % LINE
        return array[start : start + size].view(dtype).reshape(shape)

    def _unused(self, size: int) -> np.ndarray:
        # An array is not used for much less than its size: what is kept would keep all of it.
        for array in self._arrays:
            if size <= array.size <= 2 * size and sys.getrefcount(array) == UNUSED:
                return array
        new = np.empty(size, np.uint8)
        self._arrays = [*self._arrays[-1:], new]
        return new


def _references() -> int:
    """The references to an array of `Room` that nothing else refers to.

    Versions of Python count the variable of a loop and the argument of getrefcount differently.
    """
    for array in [np.empty(0)]:
        return sys.getrefcount(array)
    raise AssertionError


UNUSED = _references()
_room = Room()


def _room_for(*shape: int) -> Tensor:
    """A tensor of float64 of any content, in memory that was used before if it is not large."""
    if 8 * prod(shape) > MOST_KEPT:
        return torch.empty(shape, dtype=torch.float64)
    return torch.from_numpy(_room.empty(shape, np.float64))


def one_set_sums(elements: Tensor, matrix: Tensor, attention: str) -> Tensor | None:
    """`sums` (1, K, d + 1) of one small set (1, n, d), in as few calls as possible.

    The matrix is one that an encoder derived from its weights: float32 like the elements, and
    contiguous.
    """
    library = choice.kernels
    if library is None or not (is_plain(elements) and elements.is_contiguous()):
        return None
    (_, length, width), (numbers, num_slots) = elements.shape, matrix.shape
    if numbers != width + 1:
        return None
    out = elements.new_empty(1, num_slots, numbers, dtype=torch.float64)
    result = library.sums(
        *(elements.data_ptr(), 0, None, 0, 1, length, width),
        *(matrix.data_ptr(), num_slots, ATTENTIONS[attention], out.data_ptr()),
    )
    if result == NOT_FINITE:
        return None
    check(result)
    return out


def encode(
    elements: Tensor, matrix: Tensor, attention: str, values: Tensor, divisor: int
) -> Tensor | None:
    """The encoding (1, K, d_out) of one small set (1, n, d): its sums times values, over a divisor.

    Matrix and values (d + 1, d_out) are those that an encoder derived from its weights.
    """
    library = choice.kernels
    if library is None or not (is_plain(elements) and elements.is_contiguous()):
        return None
    (_, length, width), (numbers, num_slots) = elements.shape, matrix.shape
    (rows, dim_out) = values.shape
    if not numbers == rows == width + 1:
        return None
    out = elements.new_empty(1, num_slots, dim_out)
    result = library.encode(
        *(elements.data_ptr(), length, width, matrix.data_ptr(), num_slots, ATTENTIONS[attention]),
        *(values.data_ptr(), dim_out, divisor, out.data_ptr()),
    )
    if result == NOT_FINITE:
        return None
    check(result)
    return out


def totals(elements: Tensor, mask: Tensor | None) -> Tensor | None:
    """The sums (B, d) of the elements (B, n, d) of each set, in float64."""
    library, batch = choice.kernels, batch_of(elements, mask)
    if library is None or batch is None:
        return None

    def run(sets: slice, rows: slice) -> Tensor:
        shape = (sets.stop - sets.start, batch.shape[2])
        out = elements.new_empty(shape, dtype=torch.float64)
        check(library.totals(*batch.part(sets, rows), out.data_ptr()))
        return out

    return _in_parts(run, batch.shape, 1, torch.add, torch.cat)


def can_multiply(elements: Tensor, mask: Tensor | None, matrix: Tensor) -> bool:
    """Whether there are kernels for elements (B, n, d) and the matrix (d + 1, K) of their scores."""
    return _prepare(elements, mask, matrix) is not None and matrix.numel() <= LARGEST_MATRIX


def _prepare(
    elements: Tensor, mask: Tensor | None, matrix: Tensor
) -> tuple[Kernels, Batch, Tensor] | None:
    """The kernels and what they read; None if they cannot."""
    library = choice.kernels
    batch = batch_of(elements, mask)
    if library is None or batch is None or not _fits(elements, matrix):
        return None
    return library, batch, matrix.contiguous()


def batch_of(elements: Tensor, mask: Tensor | None) -> Batch | None:
    """Elements (B, n, d) and their mask (B, n) as the kernels read them; None if they cannot."""
    if elements.dim() != 3 or not is_plain(elements):
        return None
    batch_size, length, width = elements.shape
    if not elements.is_contiguous() and elements.stride()[1:] != (width, 1):
        return None
    if mask is not None:
        if mask.shape != (batch_size, length) or mask.dtype != torch.bool or not mask.is_cpu:
            return None
        if type(mask) not in PLAIN or mask.layout != torch.strided or mask.stride(1) != 1:
            return None
    return Batch(
        (elements, mask),
        elements.data_ptr(),
        elements.stride(0),
        None if mask is None else mask.data_ptr(),
        0 if mask is None else mask.stride(0),
        (batch_size, length, width),
    )


def _fits(elements: Tensor, matrix: Tensor) -> bool:
    """Whether a kernel can multiply elements (..., d) with a matrix (d + 1, K)."""
    if matrix.dim() != 2 or not is_plain(matrix):
        return False
    return matrix.shape[0] == elements.shape[-1] + 1 and matrix.shape[1] > 0


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is an array of float32 in memory."""
    return (
        type(tensor) in PLAIN
        and tensor.dtype == torch.float32
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and not tensor.is_neg()
    )


class _NotFiniteError(Exception):
    """A logit, a weight or a value is not finite: torch computes what it can, and raises if not."""


def check(result: int) -> None:
    """Raise MemoryError if a kernel returned that it could not allocate its buffers."""
    if result == NO_MEMORY:
        raise MemoryError("a kernel of setfold could not allocate its buffers.")
    if result == NOT_FINITE:
        raise _NotFiniteError
    assert result == 0


def _in_parts(
    run: Callable[[slice, slice], Any],
    shape: tuple[int, int, int],
    width: int,
    join: Callable[[Any, Any], Any],
    gather: Callable[[list[Any]], Any],
) -> Any:
    """Run a kernel on all sets at once, or on parts of a large batch; see `threads`.

    None if a logit is not finite.
    """
    try:
        if prod(shape) * width <= threads.THREADED_WORK:
            return run(slice(0, shape[0]), slice(0, shape[1]))
        return threads.over_threads(run, shape, width, join, gather)
    except _NotFiniteError:
        return None
