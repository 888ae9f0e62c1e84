"""The compiled kernels of the Slot Set Encoder on one set, as functions of tensors; see `dispatch`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from setfold.native.dispatch import ATTENTIONS, LARGEST_MATRIX, NOT_FINITE, PLAIN, check, is_plain
from setfold.native.library import Kernels, choice

SIZES = 9  # numbers in front of the pointers, as in slots.c
LANES = 16  # of the widest vector
MOST_WORK = 1 << 24  # multiplications of a product; with more, several threads are faster


class SlotTensors(NamedTuple):
    """A set and the parameters of an encoder, in the order of slots.c.

    The slots (K, h) are `base` or, with noise, base + deviation * noise.
    """

    elements: Tensor  # (1, n, d)
    base: Tensor  # (K, h), or (h,) with noise
    deviation: Tensor | None  # (h,)
    noise: Tensor | None  # (K, h)
    norm: Tensor  # (h,)
    norm_bias: Tensor | None
    query: Tensor  # (d_key, h)
    query_bias: Tensor | None
    key: Tensor  # (d_key, d)
    key_bias: Tensor | None
    value: Tensor  # (d_out, d)
    value_bias: Tensor | None


class Settings(NamedTuple):
    """What shapes an encoding beside tensors."""

    num_slots: int
    attention: str  # "sigmoid" or "softmax", both over slots
    divisor: int  # of the sums
    epsilon: float  # of the layer norm


class Kept(NamedTuple):
    """What the backward pass needs of the forward pass, beside the tensors."""

    library: Kernels  # their vectors determine the layout of the room
    arguments: array[int]
    shapes: Sequence[tuple[int, ...]]
    room: Tensor


def can_encode_slots(elements: Tensor, query: Tensor, value: Tensor, num_slots: int) -> bool:
    """Whether `encode_slots` can read the elements, and there is not too much to compute.

    Args:
        elements: (1, n, d).
        query: (d_key, h), a weight.
        value: (d_out, d), a weight.
        num_slots: the number K of slots.
    """
    if choice.kernels is None or not (is_plain(elements) and elements.is_contiguous()):
        return False
    return _plan(_sizes(elements, query, value, num_slots), False) is not None


def encode_slots(given: Sequence[Tensor | None], settings: Settings) -> tuple[Tensor, Kept] | None:
    """The encoding (1, K, d_out) of one set, and what is kept for the backward pass.

    None, too, if a number is not finite, or if there is too much to compute for one thread.

    Args:
        given: `SlotTensors`.
        settings: whatever else shapes the encoding.
    """
    library = choice.kernels
    elements, _, _, noise, _, _, query, _, _, _, value, _ = given
    if library is None or elements is None or query is None or value is None:
        return None
    num_slots, attention, divisor, epsilon = settings
    sizes = _sizes(elements, query, value, num_slots)
    plan = _plan(sizes, noise is not None)
    pointers = None if plan is None else _pointers(given, plan[0])
    if plan is None or pointers is None:
        return None
    shapes, few, numbers = plan
    arguments = array("q", [*sizes, ATTENTIONS[attention], divisor, few, *pointers])
    room, out = elements.new_empty(numbers), elements.new_empty(1, num_slots, sizes[-1])
    start, _ = arguments.buffer_info()
    result = library.encode_slots(
        *(start, start + 8 * SIZES, epsilon, room.data_ptr(), numbers, out.data_ptr())
    )
    if result == NOT_FINITE:
        return None
    check(result)
    return out, Kept(library, arguments, shapes, room)


def encode_slots_back(
    given: Sequence[Tensor | None], kept: Kept, upstream: Tensor, needs: Sequence[bool]
) -> list[Tensor | None] | None:
    """The gradients of `encode_slots`, from dL/dencoding; None for those that are not needed.

    None, too, if the tensors are not where they were, or other kernels have been chosen.
    """
    library, arguments, shapes, room = kept
    pointers = _pointers(given, shapes) if library is choice.kernels else None
    if pointers is None or array("q", pointers) != arguments[SIZES:]:
        return None
    upstream = upstream.contiguous()
    if not is_plain(upstream):
        return None
    grads, to = [], []
    for tensor, need in zip(given, needs, strict=True):
        grad = torch.empty_like(tensor) if need and tensor is not None else None
        grads.append(grad)
        to.append(0 if grad is None else grad.data_ptr())
    start, found = arguments.buffer_info()[0], array("q", to)
    result = library.encode_slots_back(
        *(start, start + 8 * SIZES, room.data_ptr(), upstream.data_ptr()), found.buffer_info()[0]
    )
    check(result)
    return grads


def _sizes(elements: Tensor, query: Tensor, value: Tensor, num_slots: int) -> tuple[int, ...]:
    (_, length, dim), (dim_key, dim_slot), (dim_out, _) = elements.shape, query.shape, value.shape
    return length, dim, num_slots, dim_slot, dim_key, dim_out


def _pointers(
    given: Sequence[Tensor | None], shapes: Sequence[tuple[int, ...]]
) -> list[int] | None:
    """The addresses of tensors; None if the kernels cannot read them."""
    found = []
    for tensor, shape in zip(given, shapes, strict=True):
        if tensor is None:
            found.append(0)
            continue
        if tensor.shape != shape or type(tensor) not in PLAIN or tensor.dtype != torch.float32:
            return None
        if not (tensor.is_cpu and tensor.is_contiguous()) or tensor.is_neg():
            return None
        found.append(tensor.data_ptr())
    return found


@lru_cache(1024)
def _plan(
    sizes: tuple[int, ...], noisy: bool
) -> tuple[Sequence[tuple[int, ...]], bool, int] | None:
    """The shapes of `SlotTensors`, the order of the products (see slots.c), and the size of the room.

    None if there is too much to compute for one thread, or for products without blocks.
    """
    length, dim, num_slots, dim_slot, dim_key, dim_out = sizes
    largest = max(dim_key * dim_slot, dim_key * dim, dim_out * dim)
    if length * dim * num_slots > MOST_WORK or largest > LARGEST_MATRIX:
        return None
    row, slots = (dim_slot,), (num_slots, dim_slot)
    shapes = (
        *((1, length, dim), row if noisy else slots, row, slots, row, row),
        *((dim_key, dim_slot), (dim_key,), (dim_key, dim), (dim_key,), (dim_out, dim), (dim_out,)),
    )
    # multiplications of both orders, forward and backward
    few = length * (2 * dim_key * dim + 3 * dim_key * dim_slot + 2 * dim_out * dim)
    few += 3 * length * num_slots * (dim_slot + dim_out)
    many = num_slots * (3 * (dim_key * (dim + dim_slot) + dim_out * dim) + 5 * length * dim)
    room = num_slots * (dim_key + 2 * (dim + 1))
    if few < many:
        room = length * (dim_key + dim_slot + 1 + dim_out + num_slots + LANES)
    return shapes, few < many, num_slots * (2 * dim_slot + 1) + room
