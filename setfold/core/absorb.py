"""How a chunk becomes statistics: all sets at once, sets of one length at a time, or one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from setfold.core.inputs import Chunk
from setfold.core.state import SetState
from setfold.core.statistic import Fields, Statistics, find_non_finite, identity, join
from setfold.errors import NonFiniteError
from setfold.kernels.modes import needs_plain_formula
from setfold.kernels.ragged import gather_groups

if TYPE_CHECKING:
    from setfold.core.encoder import StreamingSetEncoder

SHORTCUTS = {  # methods that must give what others give, and those others
    "absorb_ragged": ("absorb",),
    "absorb_for_gradients": ("absorb",),
    "absorb_small": ("fields", "prepare", "_scores", "featurize", "absorb"),
    "encode_small": ("draw_frame", "fields", "prepare", "_scores", "featurize", "absorb", "finish"),
}
VALID = "_valid_shortcuts"  # the attribute in which an encoder keeps them
PRIMITIVES = {  # methods that an instance may replace, too
    *(other for others in SHORTCUTS.values() for other in others),
    *("draw_frame", "shaping_modules", "weigh"),
}
# indices of some sets, or None for all, and their new statistics
Arrivals = Iterator[tuple[Tensor | None, Statistics]]
Absorb = Callable[[Tensor, Tensor | None, Any], Statistics]  # like StreamingSetEncoder.absorb

FEATURE_ROWS = 1 << 16  # elements that go through a feature network at once without a graph
PROBED = "_shows_non_finite"  # the attribute in which an encoder keeps the result of the probe
PROBED_COLUMNS = 1 << 10  # in elements so wide that their encoder is not probed
PROBED_AT_ONCE = 64


def absorb_into(
    encoder: StreamingSetEncoder,
    state: SetState,
    chunk: Chunk,
    prepared: Any,
    combine: Callable[[Fields, Statistics, Statistics], Statistics],
) -> Statistics:
    """The state's statistics combined with those of a chunk.

    Args:
        encoder: whose state it is.
        state: what was seen before.
        chunk: new elements, validated.
        prepared: from `encoder.prepare`; ignored if every set has slots of its own that the encoder
            must handle one by one.
        combine: `join`, or `remove`.

    Raises:
        NonFiniteError: the result is not finite. The state is unchanged.
    """
    try:
        return _absorb_into(encoder, state, chunk, prepared, combine)
    except NonFiniteError:
        raise_non_finite(chunk)
        raise


def absorb_whole(
    encoder: StreamingSetEncoder,
    fields: Fields,
    chunk: Chunk,
    context: tuple[Tensor, ...],
    prepared: Any,
) -> Statistics:
    """The statistics of whole sets, dense and validated; raises like `absorb_into`."""
    try:
        found = absorb_dense(encoder, fields, chunk.elements, chunk.mask, context, prepared)
        check_result(fields, found)
    except NonFiniteError:
        raise_non_finite(chunk)
        raise
    return found


def _absorb_into(
    encoder: StreamingSetEncoder,
    state: SetState,
    chunk: Chunk,
    prepared: Any,
    combine: Callable[[Fields, Statistics, Statistics], Statistics],
) -> Statistics:
    fields = state.fields
    if chunk.index is None and (encoder.batched_slots or not state.has_own_slots):
        found = absorb_dense(encoder, fields, chunk.elements, chunk.mask, state.context, prepared)
        statistics = combine(fields, state.statistics, found)
        check_result(fields, statistics)
        return statistics
    arrived = arrivals(encoder, state, chunk, prepared)
    if combine is join and _is_empty(state):
        return _join_to_empty(fields, lambda: state.statistics, arrived)
    return _combine_all(fields, state.statistics, arrived, combine)


def absorb_new(
    encoder: StreamingSetEncoder,
    fields: Fields,
    chunk: Chunk,
    sets: int,
    context: tuple[Tensor, ...],
    prepared: Any,
) -> Statistics:
    """The statistics of new sets, ragged and validated; raises like `absorb_into`.

    Args:
        encoder: whose statistics they are.
        fields: of its states.
        chunk: elements, not empty.
        sets: the number of sets.
        context: what features use beside the elements.
        prepared: from `encoder.prepare`.
    """
    try:
        arrived = _ragged(encoder, sets, context, chunk, prepared, False, encoder.absorb)
        return _join_to_empty(
            fields, lambda: identity(fields, sets, chunk.elements.device), arrived
        )
    except NonFiniteError:
        raise_non_finite(chunk)
        raise


def _is_empty(state: SetState) -> bool:
    """Whether no set has elements, where finding out takes no time."""
    return state.count.is_cpu and not needs_plain_formula() and not bool(state.count.any())


def _join_to_empty(
    fields: Fields, empty: Callable[[], Statistics], arrived: Arrivals
) -> Statistics:
    """Empty statistics joined with what arrives.

    If the first to arrive are those of all sets, they are the result so far, without a join.
    """
    first, found = next(arrived)
    whole = all(part.dtype == torch.float64 for parts in found.values() for part in parts)
    if first is None and whole:
        check_result(fields, found)
        return _combine_all(fields, found, arrived, join)
    return _combine_all(fields, empty(), chain([(first, found)], arrived), join)


def _combine_all(
    fields: Fields,
    statistics: Statistics,
    arrived: Iterable[tuple[Tensor | None, Statistics]],
    combine: Callable[[Fields, Statistics, Statistics], Statistics],
) -> Statistics:
    """Statistics, which are not changed, combined with what arrives."""
    if torch.is_grad_enabled():
        arrived = concatenated(arrived)
    copied = False
    for sets, found in arrived:
        if sets is None:
            statistics = combine(fields, statistics, found)
            check_result(fields, statistics)
            continue
        if not copied:
            statistics = {name: tuple(p.clone() for p in ps) for name, ps in statistics.items()}
            copied = True
        held = {k: tuple(p.index_select(0, sets) for p in ps) for k, ps in statistics.items()}
        combined = combine(fields, held, found)
        check_result(fields, combined)
        for name, parts in combined.items():
            for whole, part in zip(statistics[name], parts, strict=True):
                whole.index_copy_(0, sets, part)
    return statistics


def concatenated(arrived: Iterable[tuple[Tensor | None, Statistics]]) -> Arrivals:
    """Arrivals with a graph, which are of different sets, as one.

    The gradient of each step that changes some sets is as large as the statistics of all sets.
    """
    steps = list(arrived)
    if len(steps) < 2:
        yield from steps
        return
    numbers, found = zip(*steps, strict=True)
    joined = {
        name: tuple(map(torch.cat, zip(*(step[name] for step in found), strict=True)))
        for name in found[0]
    }
    yield torch.cat(numbers), joined


def arrivals(
    encoder: StreamingSetEncoder,
    state: SetState,
    chunk: Chunk,
    prepared: Any,
    *,
    split: bool = False,
    absorb: Absorb | None = None,
) -> Arrivals:
    """What a chunk that cannot be absorbed in one piece adds to its sets; see `absorb_dense`."""
    if state.has_own_slots:
        return _set_by_set(encoder, state, chunk, split)
    absorb, sets = absorb or encoder.absorb, state.batch_size
    return _ragged(encoder, sets, state.context, chunk, prepared, split, absorb)


def absorb_dense(
    encoder: StreamingSetEncoder,
    fields: Fields,
    elements: Tensor,
    mask: Tensor | None,
    context: tuple[Tensor, ...],
    prepared: Any,
    *,
    split: bool = False,
    absorb: Absorb | None = None,
) -> Statistics:
    """Compute features and absorb; without a graph, some rows at a time to bound the memory.

    Args:
        encoder: whose features and statistics they are.
        fields: of its states.
        elements: (B, n, ...).
        mask: (B, n), True where present, or None.
        context: what features use beside the elements.
        prepared: from `encoder.prepare`.
        split: whether to split the rows with a graph, too. Random numbers are then drawn for the
            same rows as without one.
        absorb: in place of `encoder.absorb`.
    """
    absorb = absorb or encoder.absorb
    if not encoder.has_features:
        return absorb(elements, mask, prepared)
    step = max(1, FEATURE_ROWS // elements.shape[0])
    whole = torch.compiler.is_compiling() or (torch.is_grad_enabled() and not split)
    if whole or elements.shape[1] <= step:
        return absorb(encoder.featurize(elements, mask, context), mask, prepared)
    pieces = elements.split(step, 1)
    masks = [None] * len(pieces) if mask is None else mask.split(step, 1)
    absorbed = [
        absorb(encoder.featurize(piece, shown, context), shown, prepared)
        for piece, shown in zip(pieces, masks, strict=True)
        if shown is None or bool(shown.any())
    ]
    return reduce(lambda left, right: join(fields, left, right), absorbed)


def _set_by_set(
    encoder: StreamingSetEncoder, state: SetState, chunk: Chunk, split: bool
) -> Arrivals:
    """What a chunk adds to each set, where each set has slots of its own."""
    for number in range(state.batch_size):
        alone, (elements, mask) = state[number], chunk.one_set(number)
        hidden = mask is not None and not needs_plain_formula() and not bool(mask.any())
        if elements.numel() and not hidden:
            prepared = encoder.prepare(alone.frame)
            found = absorb_dense(
                encoder, state.fields, elements, mask, alone.context, prepared, split=split
            )
            yield torch.tensor([number], device=elements.device), found


def _ragged(
    encoder: StreamingSetEncoder,
    batch_size: int,
    context: tuple[Tensor, ...],
    chunk: Chunk,
    prepared: Any,
    split: bool,
    absorb: Absorb,
) -> Arrivals:
    """What a ragged chunk adds to its sets."""
    assert chunk.index is not None
    elements = chunk.elements
    if encoder.has_features and not context:  # each row on its own, so before they are sorted
        whole = torch.is_grad_enabled() and not split
        step = elements.shape[0] if whole else FEATURE_ROWS
        pieces = elements.unsqueeze(0).split(step, 1)
        elements = torch.cat([encoder.featurize(p, None, ()) for p in pieces], 1).squeeze(0)
    plain = elements.device.type == "cpu" and elements.dtype in (torch.float32, torch.float64)
    if plain and not (context or torch.is_grad_enabled() or needs_plain_formula()):
        at_once = absorb_ragged(encoder, elements, chunk.index, batch_size, prepared)
        if at_once is not None:
            yield from at_once
            return
    for sets, some, mask in gather_groups(elements, chunk.index, batch_size):
        if context:
            some = encoder.featurize(some, mask, tuple(part[sets] for part in context))
        yield sets, absorb(some, mask, prepared)


def takes_shortcut(encoder: StreamingSetEncoder, name: str) -> bool:
    """Whether a shortcut still does what the encoder does.

    It does not if a subclass of the class that defines it, or the encoder itself, overrides what
    it replaces.
    """
    valid: frozenset[str] | None = vars(encoder).get(VALID)
    if valid is None:
        valid = frozenset(shortcut for shortcut in SHORTCUTS if _is_valid(encoder, shortcut))
        vars(encoder)[VALID] = valid
    return name in valid


def absorb_for_gradients(
    encoder: StreamingSetEncoder, elements: Tensor, mask: Tensor | None, prepared: Any
) -> Statistics:
    """`encoder.absorb_for_gradients` if it still does what `absorb` does, else `absorb`."""
    if takes_shortcut(encoder, "absorb_for_gradients"):
        return encoder.absorb_for_gradients(elements, mask, prepared)
    return encoder.absorb(elements, mask, prepared)


def absorb_ragged(
    encoder: StreamingSetEncoder, elements: Tensor, index: Tensor, batch_size: int, prepared: Any
) -> Arrivals | None:
    """`encoder.absorb_ragged` if it still does what `absorb` does, else None."""
    if takes_shortcut(encoder, "absorb_ragged"):
        return encoder.absorb_ragged(elements, index, batch_size, prepared)
    return None


def _is_valid(encoder: StreamingSetEncoder, name: str) -> bool:
    kind = type(encoder)
    author = next(base for base in kind.__mro__ if name in vars(base))
    return has_methods_of(author, encoder, SHORTCUTS[name])


def has_methods_of(author: type, encoder: StreamingSetEncoder, names: Iterable[str]) -> bool:
    """Whether neither a subclass of a class nor the encoder itself overrides methods of the class."""
    kind, own = type(encoder), vars(encoder)
    return all(
        getattr(kind, name, None) is getattr(author, name, None) and name not in own
        for name in names
    )


# ---- NaN and infinity --------------------------------------------------------------------------


def check_result(fields: Fields, statistics: Statistics) -> None:
    """Raise NonFiniteError if statistics are not finite; infinities of empty sets are allowed."""
    first = next(iter(statistics.values()))[0]
    if needs_plain_formula() or first.is_meta:
        return
    if not first.is_cpu and not bool(find_non_finite(fields, statistics).any()):
        return  # having waited for the device once, not once for each part
    for name, parts in statistics.items():
        for part, empty in zip(parts, fields[name].statistic.empty, strict=True):
            shown = part.detach() if part.requires_grad else part
            if math.isfinite(shown.sum().item()):
                continue
            usable = (
                shown.isfinite() if math.isfinite(empty) else shown.isfinite() | (shown == empty)
            )
            if not bool(usable.all()):
                raise NonFiniteError(
                    f"the elements are finite, but the field {name!r} of their state is not: the "
                    "elements are too large, or the feature network returns NaN or infinity. The "
                    "state is unchanged."
                )


def check_encoding(encoding: Tensor, name: str = "encoding") -> None:
    """Raise NonFiniteError if layers on the way to an encoding, or to weights, have overflowed.

    The exact encoding might be representable all the same, so an infinity is not an answer.
    """
    if needs_plain_formula() or encoding.is_meta:
        return
    shown = encoding.detach() if encoding.requires_grad else encoding
    if not math.isfinite(shown.sum().item()) and not bool(shown.isfinite().all()):
        raise NonFiniteError(
            f"the elements are finite, but their {name} is not: the elements are too large, and "
            f"layers overflow in {str(shown.dtype).removeprefix('torch.')}. Scale the elements "
            "down, or use a wider dtype."
        )


def check_elements(encoder: StreamingSetEncoder, chunk: Chunk, frame: tuple[Tensor, ...]) -> None:
    """Raise NonFiniteError if an element is not finite and `check_result` might not notice.

    Summing all elements takes a fifth of the time that it takes to absorb a large chunk. It is
    left out if a probe of the encoder shows that its statistics hide nothing.
    """
    if needs_plain_formula() or chunk.elements.is_meta:
        return
    if not shows_non_finite(encoder, frame):
        check_finite(chunk)


def check_finite(chunk: Chunk) -> None:
    """Raise NonFiniteError if an element is not finite, judged by their sum first."""
    if needs_plain_formula() or chunk.elements.is_meta:
        return
    if not math.isfinite(chunk.elements.detach().sum().item()):
        raise_non_finite(chunk)


def raise_non_finite(chunk: Chunk) -> None:
    """Raise NonFiniteError that names the first element that is not finite, if there is one."""
    wrong = ~torch.isfinite(chunk.elements)
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise NonFiniteError(
            f"elements must be finite; elements{list(place)} is {chunk.elements[place].item()} "
            f"({int(wrong.sum())} such numbers in the chunk). Clean the chunk or mask those "
            "elements; the state is unchanged."
        ) from None


def shows_non_finite(encoder: StreamingSetEncoder, frame: tuple[Tensor, ...]) -> bool:
    """Whether NaN or infinity in any column of an element shows in the encoder's statistics.

    The encoder is probed once. A maximum hides -inf, a feature network may hide anything, and
    sums hide nothing.
    """
    known: bool | None = vars(encoder).get(PROBED)
    if known is not None:
        return known
    width, found = encoder.dim_in, False
    if not (encoder.has_features or width is None or width > PROBED_COLUMNS):
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = _probe(encoder, width, tuple(s[:1].detach() for s in frame))
    vars(encoder)[PROBED] = found
    return found


def _probe(encoder: StreamingSetEncoder, width: int, frame: tuple[Tensor, ...]) -> bool:
    like = encoder.first_weight
    ordinary = (
        torch.ones(()) if like is None else torch.ones((), dtype=like.dtype, device=like.device)
    )
    fields, prepared = encoder.fields(frame), encoder.prepare(frame)
    for columns in torch.arange(width, device=ordinary.device).split(PROBED_AT_ONCE):
        for bad in (torch.nan, torch.inf, -torch.inf):
            # as many sets as columns, each with one ordinary element and one bad number
            elements = ordinary.new_ones(len(columns), 2, width)
            elements[torch.arange(len(columns)), 1, columns] = bad
            try:
                statistics = encoder.absorb(elements, None, prepared)
            except NonFiniteError:  # of which set is unknown
                return False
            if not bool(find_non_finite(fields, statistics).all()):
                return False
    return True
