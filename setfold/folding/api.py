"""Stream chunks through an encoder in one call, as often as the encoder must see them."""

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

from setfold.core.encoder import SetEncoder, StreamingSetEncoder
from setfold.core.passes import MultiPassSetEncoder
from setfold.core.statistic import STATISTICS
from setfold.core.weights import first_tensor
from setfold.errors import InputError
from setfold.folding import merge as distributed
from setfold.folding.messages import shared_failure, standing
from setfold.folding.piece import Array, Tiles, kind_of
from setfold.folding.replay import Begin, Begun, absorbed, replayable_fold
from setfold.folding.source import Chunks, Source, fresh_seed, seeded

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
    """Encode sets of any size, chunk by chunk: begin, absorb each chunk, read out.

    Only one chunk is looked at at a time, and the chunks are read `encoder.passes` times. What
    differs is where gradients come from; under `torch.no_grad` there are none, and every way gives
    the encoding of the whole set.

    - "exact": those of the whole set, in the memory of one chunk: the backward pass reads the chunks
      once more.
    - "unbiased": the encoding of the whole set, and gradients from a few chunks, drawn at random and kept
      until then: right on average, and as cheap as those chunks.
    - "subset": a few chunks drawn at random stand in for the set, in the encoding too.
    - "autograd": the graph of all chunks is kept, as ordinary PyTorch does: memory grows with the
      set, and second derivatives are there.

    Args:
        encoder: any streaming encoder, or one of several passes.
        chunks: the elements of B sets, in one of these forms:
            a tensor or array (B, n, d), which is cut by itself; it may be mapped from a file;
            an iterable of such chunks (B, n_i, d), with masks as pairs (elements, mask);
            an iterable of ragged chunks, pairs (elements (N_i, d), index (N_i,));
            a function that opens such a stream anew.
        gradient: "exact", "unbiased", "subset" or "autograd".
        samples: how many chunks are drawn for "unbiased" and "subset".
        mask: (B, n), True where present, if `chunks` is one tensor or array.
        index: (N,), the set of each row, if `chunks` is one tensor or array (N, d).
        batch_size: the number B of sets of ragged chunks; of 1, the index may be left out.
        group: processes over which the sets are spread, such as torch.distributed.group.WORLD. Each
            folds its own chunks, and all get the encoding of all elements.

    Returns:
        The encoding (B, ...).

    >>> import setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=3, num_slots=4, dim_slot=8, dim_out=8)
    >>> chunks = [torch.randn(1, 1000, 3) for _ in range(10)]
    >>> encoding = fold(encoder, chunks)
    >>> encoding.square().sum().backward()  # the gradients of all 10,000 elements
    >>> encoding.shape
    torch.Size([1, 4, 8])
    """
    foldable = _foldable(encoder)
    _refuse_odd(gradient, samples)
    _refuse_batch_norm(foldable)
    _refuse_cached(gradient)
    # without gradients there is nothing to choose, and autograd keeps nothing
    way = gradient if torch.is_grad_enabled() else AUTOGRAD
    costly = not isinstance(foldable, StreamingSetEncoder) or foldable.has_features
    if isinstance(chunks, Array):
        chunks = _cut(chunks, mask, index, batch_size, costly)
    elif mask is not None or index is not None:
        raise InputError("give each chunk its own mask or index, as a pair (elements, index).")
    several = foldable.passes != 1
    source = Source(
        chunks,
        like=first_tensor((foldable,)),
        again=several or way == EXACT,
        draws=several or way in (EXACT, UNBIASED),
        careful=costly or _picks(foldable),
        batch_size=batch_size,
        apart=0 if group is None else standing(group)[0],
    )
    if way == SUBSET:
        source = source.drawn(samples)
    _refuse_lost(foldable, source, way)
    one_pass = _pass(way, source, samples)
    if group is not None:
        one_pass = partial(_together, one_pass, foldable, way, group)
    return _folded(foldable, source, one_pass)


def _picks(encoder: Foldable) -> bool:
    """Whether a state keeps what single elements have, such as a maximum."""
    aggregates = encoder.aggregates if isinstance(encoder, StreamingSetEncoder) else ()
    return any(STATISTICS[aggregate.statistic].picks for aggregate in aggregates)


def _cut(
    elements: Array, mask: Array | None, index: Array | None, batch_size: int | None, costly: bool
) -> Tiles:
    """Whole sets as chunks: dense ones along their elements, ragged ones along their rows."""
    for name, given in (("mask", mask), ("index", index)):
        if not isinstance(given, Array | None):
            raise InputError(f"{name} must be a tensor or an array; got {kind_of(given)}.")
    if mask is not None and index is not None:
        raise InputError("give a mask for dense sets or an index for ragged ones, not both.")
    if mask is not None and mask.dtype not in (torch.bool, np.bool_):
        raise InputError(f"mask must be bool, True where an element is present; got {mask.dtype}.")
    if index is not None or (batch_size == 1 and mask is None):
        return Tiles(elements, index, axis=0, costly=costly)
    return Tiles(elements, mask, axis=1, costly=costly)


def _folded(encoder: Foldable, source: Source, one_pass: Pass) -> Tensor:
    """The encoding, in as many passes as it takes."""
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
            "fold needs at least one chunk; got none. An empty set is encoder.initial_state(1)."
        )
    if isinstance(encoder, StreamingSetEncoder):
        return encoder, encoder.initial_state(sets)
    return encoder.begin(found, sets)


def _pass(way: str, source: Source, samples: int) -> Pass:
    """How one pass over the chunks is made."""
    if way == UNBIASED:
        return partial(replayable_fold, samples=samples)
    if way == EXACT and source.repeatable and not source.holds_one:  # one chunk may keep its graph
        return replayable_fold
    return _plain_fold


def _plain_fold(begin: Begin, source: Source) -> Begun:
    """Absorb one chunk after the other; where there are gradients, autograd keeps all it needs."""
    begun: Begun | None = None
    for number, piece in source.read():
        encoder, state = begun or begin(source.sets_in(piece))
        with source.same_draws(number, piece.elements.device):
            begun = encoder, absorbed(encoder, state, piece)
    return begun or begin(None)


def _together(
    one_pass: Pass, model: Foldable, way: str, group: ProcessGroup, begin: Begin, source: Source
) -> Begun:
    """One pass over the chunks of all processes: the same slots for all, and one state in the end."""
    weight = first_tensor((model,))
    device = torch.device("cpu") if weight is None else weight.device
    alike = {"gradient": way, "training": model.training}

    def begin_alike(sets: int | None) -> Begun:
        agreed, seed = distributed.agree(sets, fresh_seed(), alike, group, device)
        with seeded(seed, device):
            return begin(agreed)

    with shared_failure(group, device):
        encoder, state = one_pass(begin_alike, source)
    return encoder, distributed.all_merge(state, group)


# ---- what is refused ---------------------------------------------------------------------------


def _refuse_odd(gradient: str, samples: int) -> None:
    if gradient not in GRADIENTS:
        raise InputError(f"gradient must be one of {', '.join(GRADIENTS)}; got {gradient!r}.")
    if not isinstance(samples, int) or samples < 1:
        raise InputError(f"samples must be a whole number, 1 or more; got {samples!r}.")


def _refuse_lost(encoder: Foldable, source: Source, way: str) -> None:
    """Raise if chunks will be wanted again that cannot be read again."""
    if source.repeatable:
        return
    instead = "Pass a list, a tensor, a DataLoader or a function that opens the stream anew"
    if encoder.passes != 1:
        raise InputError(
            f"{type(encoder).__name__} reads its chunks {encoder.passes} times, and an iterator can be "
            f"read only once. {instead}; for a stream that cannot be read again, use an encoder "
            "with passes == 1."
        )
    shaping = chain(*(module.parameters(recurse=False) for module in _shaping(encoder)))
    if way == EXACT and any(parameter.requires_grad for parameter in shaping):
        raise InputError(
            "exact gradients read the chunks once more in the backward pass, and an iterator can be "
            f"read only once. {instead}; or use torch.no_grad() if no gradients are wanted, "
            'gradient="unbiased", which keeps a few chunks, or gradient="autograd", which keeps the graph '
            "of all."
        )


def _refuse_batch_norm(encoder: Foldable) -> None:
    """Raise if what an element is depends on the chunk that it comes in; a head may do as it likes."""
    for module in _shaping(encoder):
        if not isinstance(module, _BatchNorm):
            continue
        if module.training or module.running_mean is None:
            mode = "in training mode" if module.training else "without running statistics"
            raise InputError(
                f"{type(encoder).__name__} is folded chunk by chunk, and {type(module).__name__} {mode} makes "
                "something else of an element in every chunk. Call model.eval(), or keep such layers in the "
                "head of the whole model."
            )


def _refuse_cached(gradient: str) -> None:
    """Raise if weights would be kept that were derived without a graph."""
    if torch.is_grad_enabled() and gradient in (EXACT, UNBIASED) and parametrize._cache_enabled:
        raise InputError(
            "inside parametrize.cached() weights keep what was derived without a graph, and would get no "
            'gradients: fold outside of it, or with gradient="autograd".'
        )


def _shaping(encoder: Foldable) -> set[nn.Module]:
    """All modules but those of the head, which sees only what was folded."""
    if isinstance(encoder, StreamingSetEncoder):
        return {part for module in encoder.shaping_modules() for part in module.modules()}
    head = set() if encoder.head is None else set(encoder.head.modules())
    return set(encoder.modules()) - head


def _foldable(encoder: Any) -> Foldable:
    if isinstance(encoder, Foldable):
        if any(map(is_lazy, encoder.parameters())):
            raise InputError(
                "a lazy layer does not know its size yet: call the model on a few elements before it is folded."
            )
        return encoder
    if isinstance(encoder, SetEncoder):
        reason = getattr(encoder, "obstacle", "it has no states")
        raise InputError(
            f"{type(encoder).__name__} cannot be folded ({reason}): call it on whole sets, or use an "
            "encoder whose `passes` is not None."
        )
    raise InputError(
        f"fold takes a set encoder; got {type(encoder).__name__}. Of a model that is wrapped or compiled, fold the "
        "encoder inside; its features may be compiled."
    )
