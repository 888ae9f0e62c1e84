"""Run a kernel on parts of a large batch, in as many threads as torch has."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor

THREADED_WORK = 1 << 22  # multiplications of a product from which on threads pay


def over_threads(
    run: Callable[[slice, slice], Any],
    shape: tuple[int, int, int],
    width: int,
    join: Callable[[Any, Any], Any],
    gather: Callable[[list[Any]], Any],
) -> Any:
    """Run a kernel, on parts of a large batch in as many threads as torch has.

    Args:
        run: the kernel, on some rows of some sets. It releases the lock of the interpreter.
        shape: (B, n, d).
        width: products for each number of an element.
        join: combines the results of two parts of the same sets.
        gather: combines the results of different sets.
    """
    batch_size, length, dim = shape
    work = batch_size * length * dim * width
    most = max(batch_size, length)
    threads = min(torch.get_num_threads(), work // THREADED_WORK, most)
    if threads < 2:
        return run(slice(0, batch_size), slice(0, length))
    by_sets = batch_size >= threads
    total = batch_size if by_sets else length
    cuts = [slice(total * i // threads, total * (i + 1) // threads) for i in range(threads)]
    whole = slice(0, length if by_sets else batch_size)
    parts = [(cut, whole) if by_sets else (whole, cut) for cut in cuts]
    results = list(_pool(threads).map(lambda part: run(*part), parts))
    return gather(results) if by_sets else reduce(join, results)


@lru_cache(1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "setfold-kernels")


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


def total(results: list[Tensor]) -> Tensor:
    """The sum of the results of all parts."""
    return reduce(torch.add, results)


def concatenate(results: list[Any]) -> Any:
    """Tuples of tensors, set after set; None if one of them is None."""
    if any(result is None for result in results):
        return None
    parts = zip(*results, strict=True)
    return tuple(None if part[0] is None else torch.cat(part) for part in parts)


def join_softmax(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Peaks and sums of all elements, from those of two parts."""
    peaks = torch.maximum(left[0], right[0])
    highest = peaks.clamp_min(torch.finfo(peaks.dtype).min)  # -inf - (-inf) is NaN
    scaled = [sums * torch.exp(peak - highest).unsqueeze(-1) for peak, sums in (left, right)]
    return peaks, scaled[0] + scaled[1]
