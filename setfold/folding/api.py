"""fold: stream chunks through an encoder in one call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from setfold.core.arguments import check_sizes
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.inputs import check_batch_size, check_kind
from setfold.core.passes import MultiPassSetEncoder
from setfold.core.primitives import SetEncoder
from setfold.core.weights import first_tensor
from setfold.errors import InputError
from setfold.folding.merge import agree, all_merge
from setfold.folding.messages import rank_and_size, report_failure
from setfold.folding.replay import Begin, Begun, replayable_fold
from setfold.folding.source import Array, Chunks, Source, Tiles, fresh_seed, seeded, type_names
from setfold.kernels.modes import transforms

EXACT, UNBIASED, SUBSET, AUTOGRAD = GRADIENTS = ("exact", "unbiased", "subset", "autograd")
Pass = Callable[[Begin, Source], Begun]
Foldable = StreamingSetEncoder | MultiPassSetEncoder


def fold(
    encoder: SetEncoder,
    chunks: Chunks,
    *,
    gradient: str = "exact",
    samples: int = 1,
    mask: Array | None = None,
    index: Array | None = None,
    batch_size: int | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Encode sets of any size, chunk by chunk.

    Only one chunk is in memory at a time. The chunks are read `encoder.passes` times. `gradient`
    chooses how gradients are computed; under `torch.no_grad` there are none, and all choices
    return the encoding of the whole set.

    - "exact": the gradients of the whole set, in the memory of one chunk. The backward pass reads
      the chunks once more, in the same order.
    - "unbiased": the encoding of the whole set, and gradients estimated from a few random chunks,
      which are kept. The estimate is right on average.
    - "subset": a few random chunks replace the set, in the encoding, too.
    - "autograd": keep the graph of all chunks, as PyTorch usually does. Memory grows with the set,
      and second derivatives are available.

    Args:
        encoder: any streaming encoder, or one of several passes.
        chunks: the elements of B sets, in one of these forms:
            a tensor or array (B, n, d), which may be memory-mapped; it is split automatically;
            an iterable of such chunks (B, n_i, d), or of pairs (elements, mask);
            an iterable of ragged chunks, pairs (elements (N_i, d), index (N_i,));
            a function that opens such a stream each time it is called.
        gradient: "exact", "unbiased", "subset" or "autograd".
        samples: the number of chunks to draw for "unbiased" and "subset".
        mask: (B, n), True where present, if `chunks` is one tensor or array.
        index: (N,), the set of each row, if `chunks` is one tensor or array (N, d).
        batch_size: the number B of sets of ragged chunks; if it is 1, the index is optional.
        group: processes over which the sets are spread, such as torch.distributed.group.WORLD. Each
            process folds its own chunks, and all get the encoding of all elements.

    Returns:
        The encoding (B, ...).

    Raises:
        InputError: the chunks do not fit the encoder, cannot be read as often as needed, or change
            between two reads.

    >>> import setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=3, num_slots=4, dim_slot=8, dim_out=8)
    >>> chunks = [torch.randn(1, 1000, 3) for _ in range(10)]
    >>> encoding = fold(encoder, chunks)
    >>> encoding.square().sum().backward()  # the gradients of all 10,000 elements
    >>> encoding.shape
    torch.Size([1, 4, 8])
    """
    foldable = _foldable(encoder)
    _check_arguments(gradient, samples, batch_size)
    _check_batch_norm(foldable)
    _check_parametrizations(gradient)
    # without gradients there is nothing to choose, and autograd keeps nothing
    way = gradient if torch.is_grad_enabled() else AUTOGRAD
    costly = not isinstance(foldable, StreamingSetEncoder) or foldable.has_features
    if isinstance(chunks, Array):
        chunks = _split(chunks, mask, index, batch_size, costly)
    elif mask is not None or index is not None:
        raise InputError("pass each chunk with its own mask or index, as a pair (elements, index).")
    several = foldable.passes != 1
    source = Source(
        chunks,
        like=first_tensor((foldable,)),
        again=several or way == EXACT,
        draws=several or way in (EXACT, UNBIASED),
        batch_size=batch_size,
        rank=0 if group is None else rank_and_size(group)[0],
    )
    if way == SUBSET:
        source = source.drawn(samples)
    _check_repeatable(foldable, source, way)
    one_pass = _pass(way, source, samples, group)
    if group is not None:
        one_pass = partial(_together, one_pass, foldable, way, group)
    return _folded(foldable, source, one_pass)


def _split(
    elements: Array, mask: Array | None, index: Array | None, batch_size: int | None, costly: bool
) -> Tiles:
    """Split whole sets into chunks: dense ones along their elements, ragged ones along the rows."""
    for name, given in (("chunks", elements), ("mask", mask), ("index", index)):
        if not isinstance(given, Array | None):
            raise InputError(f"{name} must be a tensor or an array; got {type_names(given)}.")
        if isinstance(given, Tensor):
            check_kind(name, given)
    if mask is not None and index is not None:
        raise InputError("pass a mask for dense sets or an index for ragged ones, not both.")
    if mask is not None and mask.dtype not in (torch.bool, np.bool_):
        raise InputError(f"mask must be bool, True where an element is present; got {mask.dtype}.")
    if index is not None or (batch_size == 1 and mask is None):
        return Tiles(elements, index, axis=0, costly=costly)
    return Tiles(elements, mask, axis=1, costly=costly)


def _folded(encoder: Foldable, source: Source, one_pass: Pass) -> Tensor:
    """The encoding, in as many passes as the encoder needs."""
    found: tuple[Tensor, ...] = ()
    for _ in range(encoder.passes):
        stage, state = one_pass(partial(_begun, encoder, found), source)
        found = (*found, stage.readout(state))
    if isinstance(encoder, StreamingSetEncoder):
        return found[0]
    return encoder.conclude(found, state.count)


def _begun(encoder: Foldable, found: tuple[Tensor, ...], sets: int | None) -> Begun:
    """The encoder of the next pass and its empty state, given what the earlier passes found."""
    if sets is None:
        raise InputError(
            "fold needs at least one chunk; got none. For an empty set, use "
            "encoder.readout(encoder.initial_state(1))."
        )
    if isinstance(encoder, StreamingSetEncoder):
        return encoder, encoder.initial_state(sets)
    return encoder.begin(found, sets)


def _pass(way: str, source: Source, samples: int, group: ProcessGroup | None) -> Pass:
    """The function that makes one pass over the chunks."""
    if way == UNBIASED:
        replayed: Pass = partial(replayable_fold, samples=samples, group=group)
    elif way == EXACT and source.repeatable and not source.holds_one:  # one may keep its graph
        replayed = partial(replayable_fold, group=group)
    else:
        return _plain_fold
    if transforms():
        raise InputError(
            f"torch.func and forward-mode AD cannot read chunks again, as gradient={way!r} does: "
            'use gradient="autograd", which keeps the graph.'
        )
    return replayed


def _plain_fold(begin: Begin, source: Source) -> Begun:
    """Absorb one chunk after the other; with gradients, autograd keeps the graph."""
    begun: Begun | None = None
    for number, chunk in source.read():
        encoder, state = begun or begin(source.sets_in(chunk))
        with source.same_draws(number, chunk.elements.device):
            state = encoder.update(state, chunk.elements, mask=chunk.mask, index=chunk.index)
            begun = encoder, state
    return begun or begin(None)


def _together(
    one_pass: Pass, model: Foldable, way: str, group: ProcessGroup, begin: Begin, source: Source
) -> Begun:
    """One pass over the chunks of all processes, with the same slots, into one state."""
    weight = first_tensor((model,))
    device = torch.device("cpu") if weight is None else weight.device
    alike = {"gradient": way, "training": model.training}

    def begin_alike(sets: int | None) -> Begun:
        agreed, seed = agree(sets, fresh_seed(), alike, group, device)
        with seeded(seed, device):
            return begin(agreed)

    with report_failure(group, device):
        encoder, state = one_pass(begin_alike, source)
    return encoder, all_merge(state, group)


# ---- validation --------------------------------------------------------------------------------


def _check_arguments(gradient: str, samples: int, batch_size: int | None) -> None:
    if gradient not in GRADIENTS:
        raise InputError(f"gradient must be one of {', '.join(GRADIENTS)}; got {gradient!r}.")
    check_sizes(samples=samples)
    if batch_size is not None:
        check_batch_size(batch_size)


def _check_repeatable(encoder: Foldable, source: Source, way: str) -> None:
    """Raise InputError if chunks must be read again and cannot."""
    if source.repeatable:
        return
    instead = "Pass a list, a tensor, a DataLoader or a function that opens the stream"
    if encoder.passes != 1:
        raise InputError(
            f"{type(encoder).__name__} reads its chunks {encoder.passes} times, and an iterator can "
            f"be read only once. {instead}. For a stream that cannot be read again, use an encoder "
            "with passes == 1."
        )
    shaping = chain(*(module.parameters(recurse=False) for module in _shaping(encoder)))
    if way == EXACT and any(parameter.requires_grad for parameter in shaping):
        raise InputError(
            "exact gradients read the chunks again in the backward pass, and an iterator can be "
            f"read only once. {instead}; or use torch.no_grad() if you need no gradients, "
            'gradient="unbiased", which keeps a few chunks, or gradient="autograd", which keeps the '
            "graph of all."
        )


def _check_batch_norm(encoder: Foldable) -> None:
    """Raise InputError if the features of an element depend on its chunk; a head is free to."""
    for module in _shaping(encoder):
        if not isinstance(module, _BatchNorm):
            continue
        if module.training or module.running_mean is None:
            mode = "in training mode" if module.training else "without running statistics"
            raise InputError(
                f"{type(module).__name__} {mode} normalizes by the chunk that it sees, so that the "
                f"encoding of {type(encoder).__name__} would depend on how the set is split. Call "
                "model.eval(), or use such layers only in the head."
            )


def _check_parametrizations(gradient: str) -> None:
    """Raise InputError if weights that were derived without a graph would be cached."""
    if torch.is_grad_enabled() and gradient in (EXACT, UNBIASED) and parametrize._cache_enabled:
        raise InputError(
            "inside parametrize.cached() weights that were computed without a graph are cached and "
            'get no gradients: fold outside of it, or with gradient="autograd".'
        )


def _shaping(encoder: Foldable) -> set[nn.Module]:
    """All modules except those of the head, which only sees the result of the fold."""
    if isinstance(encoder, StreamingSetEncoder):
        return {part for module in encoder.shaping_modules() for part in module.modules()}
    head = set() if encoder.head is None else set(encoder.head.modules())
    return set(encoder.modules()) - head


def _foldable(encoder: Any) -> Foldable:
    if isinstance(encoder, Foldable):
        if any(map(is_lazy, encoder.parameters())):
            raise InputError(
                "a lazy layer does not know its size yet: call the model on a few elements first."
            )
        return encoder
    if isinstance(encoder, SetEncoder):
        reason = getattr(encoder, "obstacle", "it has no states")
        raise InputError(
            f"{type(encoder).__name__} cannot be folded ({reason}): call it on whole sets, or use "
            "an encoder whose `passes` is not None."
        )
    raise InputError(
        f"fold takes a set encoder; got {type(encoder).__name__}. If the model is wrapped or "
        "compiled, fold the encoder inside; its features may be compiled."
    )
