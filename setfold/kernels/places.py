"""Attention by distance: an element has a weight for each slot within reach of its position.

    w_ij = exp(-|p_i - mu_j|^2 / 2 s_j^2) where |p_i - mu_j| <= reach s_j, else exactly 0

either as it is ("kernel") or divided by its sum over the slots ("softmax"). On a grid the slots
within reach lie in a window around the element, so the cost of an element does not depend on the
number of slots. Everything here is a sum or a maximum over pairs of an element and a slot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from setfold.kernels.modes import accumulator_dtype, needs_plain_formula
from setfold.kernels.replay import summed_over_tiles
from setfold.kernels.tiles import tiles
from setfold.native import placed as native

VALUES = ("features", "offsets", "squares")
TILE_PAIRS = 1 << 17  # pairs of an element and a slot that fit in the cache with their channels
MIN_ROWS = 16  # elements in a tile, however many slots they are paired with


class Layout(NamedTuple):
    """Where the slots are, in units in which the points of a grid have distance 1."""

    points: Tensor  # (K, p)
    widths: Tensor  # (1,) or (K,)
    radius: Tensor  # (): an element touches no slot whose grid point is farther, on any axis
    origin: Tensor  # (p,), where the units begin, in the coordinates of the elements
    spacing: Tensor  # (p,), how long they are
    lower: Tensor  # (p,), the bounds, in the units
    upper: Tensor  # (p,)


class Attention(NamedTuple):
    """How elements attend to places.

    Attributes:
        normalized: whether the weights of an element sum to 1 over the slots.
        reach: distance, in widths, beyond which a weight is exactly 0.
        values: what is weighted: some of `VALUES`, in order.
        shape: the shape of the grid on which the points lie; None if they lie anywhere.
        regular: whether the points are exactly those of the grid.
    """

    normalized: bool
    reach: float
    values: tuple[str, ...]
    shape: tuple[int, ...] | None
    regular: bool


class Pairs(NamedTuple):
    """Elements and slots that may be within reach of each other."""

    slots: Tensor | None  # (..., M), the slots; None for all of them, in order
    weights: Tensor  # (..., M), exactly 0 beyond reach
    offsets: list[Tensor]  # by axis, (..., M): (position - place) / width


def pair_all(positions: Tensor, layout: Layout, attention: Attention) -> Pairs:
    """Pair each element (..., p) with all slots."""
    offsets = [
        (x - mu) / layout.widths
        for x, mu in zip(positions.unsqueeze(-2).unbind(-1), layout.points.unbind(-1), strict=True)
    ]
    return Pairs(None, _weights(offsets, attention), offsets)


def pair_near(positions: Tensor, layout: Layout, attention: Attention) -> Pairs:
    """Pair each element (N, p) with the slots of a grid that lie in a window around it."""
    assert attention.shape is not None
    axes, radius = len(attention.shape), layout.radius.item()
    slots: Any = 0
    nodes = []
    for axis, size in enumerate(attention.shape):
        window = _window(radius, size)
        first = torch.ceil(positions[:, axis].detach() - radius)
        first = first.nan_to_num_(0).clamp_(0, size - window)  # NaN shows in the weights
        places = first.unsqueeze(1) + torch.arange(window, device=first.device, dtype=first.dtype)
        spread = (-1, *(window if other == axis else 1 for other in range(axes)))
        nodes.append(places.view(spread))
        slots = slots * size + places.long().view(spread)
    slots = slots.flatten(1)  # (N, M)
    if attention.regular and layout.widths.numel() == 1:
        spreads = ([-1] + [1] * axes for _ in range(axes))
        differences = [
            (x.reshape(s) - node) / layout.widths
            for x, s, node in zip(positions.unbind(1), spreads, nodes, strict=True)
        ]
        offsets = [d.flatten(1) for d in torch.broadcast_tensors(*differences)]
    else:
        widths = layout.widths if layout.widths.numel() == 1 else layout.widths[slots]
        points = layout.points[slots]  # (N, M, p)
        offsets = [
            (x.unsqueeze(1) - mu) / widths
            for x, mu in zip(positions.unbind(1), points.unbind(2), strict=True)
        ]
    return Pairs(slots, _weights(offsets, attention), offsets)


def _window(radius: float, size: int) -> int:
    """The largest number of the integers 0..size-1 in an interval of length 2 radius."""
    return math.floor(2 * radius) + 1 if 2 * radius < size else size  # also if it is infinite


def _weights(offsets: Sequence[Tensor], attention: Attention) -> Tensor:
    squares = sum(offset.square() for offset in offsets[1:]) + offsets[0].square()
    logits = torch.where(squares <= attention.reach**2, -0.5 * squares, -torch.inf)
    if not attention.normalized:
        return logits.exp()
    peak = logits.detach().amax(-1, keepdim=True)
    weights = (logits - peak.masked_fill(peak == -torch.inf, 0)).exp()
    # The nearest slot has weight 1 before the division. There may be none within reach.
    return weights / weights.sum(-1, keepdim=True).clamp_min(1)


def _values(pairs: Pairs, features: Tensor, attention: Attention) -> Iterator[Tensor]:
    """What is weighted, channel by channel: (..., 1), or (..., M) if it depends on the slot."""
    for name in attention.values:
        if name == "features":
            yield from (channel.unsqueeze(-1) for channel in features.unbind(-1))
        elif name == "offsets":
            yield from pairs.offsets
        else:
            yield from (offset.square() - 1 for offset in pairs.offsets)


# ---- sums ---------------------------------------------------------------------------------------


def placed_sums(
    positions: Tensor,
    features: Tensor,
    mask: Tensor | None,
    layout: Layout,
    attention: Attention,
    squared: bool,
) -> Tensor:
    """Sum the weighted values of each set, slot by slot.

    Args:
        positions: (B, n, p), in the units of the layout, finite.
        features: (B, n, f).
        mask: (B, n), True where present, or None.
        layout: where the slots are.
        attention: how elements attend to them.
        squared: whether to sum the squares of the values as well.

    Returns:
        (B, K, C): the sums of w v, those of w v^2 if `squared`, and, last, those of w.
    """
    if not _is_tracked(positions, features, layout):
        near = _neighbourhood(positions, layout, attention)
        if near is not None:
            found = native.placed_sums(positions, features, mask, near, attention.values, squared)
            if found is not None:
                return found
    batch, length, axes = positions.shape
    elements = torch.cat([positions, features], -1)
    if batch * length == 0 or needs_plain_formula():
        return _plain_sums(attention, axes, squared, elements, mask, layout)
    function = partial(_tile_sums, attention, axes, squared)
    with nullcontext() if _is_tracked(positions, features, layout) else torch.no_grad():
        return summed_over_tiles(function, _rows(layout, attention), elements, mask, layout)


def _is_tracked(positions: Tensor, features: Tensor, layout: Layout) -> bool:
    tensors = (positions, features, *layout)
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _neighbourhood(
    positions: Tensor, layout: Layout, attention: Attention
) -> native.Neighbourhood | None:
    """What the compiled kernels need to know; None if they cannot run."""
    if needs_plain_formula() or positions.numel() == 0 or not positions.is_cpu:
        return None
    if attention.shape is None or not attention.regular or layout.widths.numel() != 1:
        return None
    radius, windows = layout.radius.item(), attention.shape
    if _is_local(layout, attention):
        windows = tuple(_window(radius, size) for size in attention.shape)
    form = (radius, layout.widths.item(), attention.reach, attention.normalized)
    return native.Neighbourhood(attention.shape, windows, *form)


def _rows(layout: Layout, attention: Attention) -> int:
    """The number of elements in a tile."""
    return max(MIN_ROWS, TILE_PAIRS // _num_pairs(layout, attention))


def _num_pairs(layout: Layout, attention: Attention) -> int:
    """The number M of slots that an element is paired with."""
    if attention.shape is None:
        return len(layout.points)
    return math.prod(_window(layout.radius.item(), size) for size in attention.shape)


def least_weight(layout: Layout, attention: Attention) -> float:
    """A weight that no element within reach of a slot falls below."""
    at_reach = math.exp(-0.5 * attention.reach**2)
    return at_reach / len(layout.points) if attention.normalized else at_reach


def _is_local(layout: Layout, attention: Attention) -> bool:
    """Whether a window saves enough work to pay for scattered sums."""
    return 2 * _num_pairs(layout, attention) < len(layout.points)


def _plain_sums(
    attention: Attention,
    axes: int,
    squared: bool,
    elements: Tensor,
    mask: Tensor | None,
    layout: Layout,
) -> Tensor:
    """The formula itself: every element with every slot."""
    pairs = pair_all(elements[..., :axes], layout, attention)  # (B, n, K)
    weights = pairs.weights if mask is None else pairs.weights * mask.unsqueeze(-1)
    values = list(_values(pairs, elements[..., axes:], attention))
    channels = [*values, *(v.square() for v in values)] if squared else values
    sums = [(weights * channel).sum(1) for channel in channels]
    return torch.stack([*sums, weights.sum(1)], -1)


def _tile_sums(
    attention: Attention,
    axes: int,
    squared: bool,
    elements: Tensor,
    mask: Tensor | None,
    *tensors: Tensor,
) -> Tensor:
    """The sums of one tile (b, r, p + f)."""
    layout = Layout(*tensors)
    if not _is_local(layout, attention):
        return _plain_sums(attention, axes, squared, elements, mask, layout)
    batch, length, _ = elements.shape
    rows = elements.reshape(batch * length, -1)
    pairs = pair_near(rows[:, :axes], layout, attention)
    assert pairs.slots is not None
    weights = pairs.weights if mask is None else pairs.weights * mask.reshape(-1, 1)
    values = list(_values(pairs, rows[:, axes:], attention))
    channels = [*values, *(v.square() for v in values)] if squared else values
    num_slots = len(layout.points)
    places = _places(pairs.slots, batch, num_slots).flatten()
    precise = accumulator_dtype(elements.device)
    sums = [
        weights.new_zeros(batch * num_slots, dtype=precise).index_add(
            0, places, part.to(precise).flatten()
        )
        for part in (*(weights * channel for channel in channels), weights)
    ]
    return torch.stack(sums, -1).view(batch, num_slots, -1)


def _places(slots: Tensor, batch: int, num_slots: int) -> Tensor:
    """The slots (N, M) of the sets of a batch, numbered through."""
    if batch == 1:
        return slots
    sets = torch.arange(batch, device=slots.device).repeat_interleave(len(slots) // batch)
    return slots + num_slots * sets.unsqueeze(1)


# ---- extrema ------------------------------------------------------------------------------------


def placed_extrema(
    positions: Tensor,
    features: Tensor,
    mask: Tensor | None,
    layout: Layout,
    attention: Attention,
    largest: bool,
) -> Tensor:
    """The largest (or smallest) weighted value w v of each set among the elements within reach.

    Only the elements that attain it have gradients: they are found without a graph, then the
    formula is evaluated for them. If elements tie, the first one is chosen.

    The arguments are those of `placed_sums`. Returns (B, K, C); -inf (or inf) for a slot without an
    element within reach.
    """
    sign = 1.0 if largest else -1.0
    tracked = _is_tracked(positions, features, layout)
    near = None if tracked else _neighbourhood(positions, layout, attention)
    if near is not None:
        found = native.placed_extrema(positions, features, mask, near, attention.values, largest)
        if found is not None:
            return found
    batch, length, axes = positions.shape
    elements = torch.cat([positions, features], -1)
    if batch * length == 0 or needs_plain_formula():
        return sign * _plain_maxima(attention, axes, sign, elements, mask, layout)
    with torch.no_grad():
        best = _maxima(attention, axes, sign, elements, mask, layout)
        if not tracked:
            return best.mul_(sign)
        winners = _winners(attention, axes, sign, elements, mask, layout, best)
    return _contributions_at(attention, axes, elements, layout, winners, best, sign)


def _plain_maxima(
    attention: Attention,
    axes: int,
    sign: float,
    elements: Tensor,
    mask: Tensor | None,
    layout: Layout,
) -> Tensor:
    pairs = pair_all(elements[..., :axes], layout, attention)  # (B, n, K)
    if elements.shape[1] == 0:
        width = len(list(_values(pairs, elements[..., axes:], attention)))
        return elements.new_full((len(elements), len(layout.points), width), -torch.inf)
    near = pairs.weights > 0
    near = near if mask is None else near & mask.unsqueeze(-1)
    return torch.stack(
        [
            torch.where(near, sign * pairs.weights * value, -torch.inf).amax(1)
            for value in _values(pairs, elements[..., axes:], attention)
        ],
        -1,
    )


class _Tile(NamedTuple):
    """The signed contributions of some elements, with the slots of all sets numbered through."""

    rows: Tensor  # (N, 1), the numbers of the elements in their sets
    places: Tensor  # (N, M)
    contributions: list[Tensor]  # by channel, (N, M); -inf beyond reach


def _contribution_tiles(
    attention: Attention,
    axes: int,
    sign: float,
    elements: Tensor,
    mask: Tensor | None,
    layout: Layout,
) -> Iterator[_Tile]:
    batch, length, _ = elements.shape
    num_slots = len(layout.points)
    pair = pair_near if _is_local(layout, attention) else pair_all
    for sets, part in tiles(batch, length, _rows(layout, attention)):
        tile = elements[sets, part]
        rows = tile.reshape(-1, tile.shape[-1])
        pairs = pair(rows[:, :axes], layout, attention)
        near = pairs.weights > 0
        if mask is not None:
            near &= mask[sets, part].reshape(-1, 1)
        slots = pairs.slots
        if slots is None:
            slots = torch.arange(num_slots, device=rows.device).expand(len(rows), -1)
        numbers = torch.arange(part.start, part.stop, device=rows.device).repeat(len(tile))
        contributions = [
            torch.where(near, sign * pairs.weights * value, -torch.inf)
            for value in _values(pairs, rows[:, axes:], attention)
        ]
        places = _places(slots, len(tile), num_slots) + num_slots * sets.start
        yield _Tile(numbers.unsqueeze(1), places, contributions)


def _maxima(
    attention: Attention,
    axes: int,
    sign: float,
    elements: Tensor,
    mask: Tensor | None,
    layout: Layout,
) -> Tensor:
    """The maximum (B, K, C) of the signed contributions."""
    best: list[Tensor] = []
    total = len(elements) * len(layout.points)
    for tile in _contribution_tiles(attention, axes, sign, elements, mask, layout):
        best = best or [elements.new_full((total,), -torch.inf) for _ in tile.contributions]
        for highest, found in zip(best, tile.contributions, strict=True):
            highest.scatter_reduce_(0, tile.places.flatten(), found.flatten(), "amax")
    return torch.stack(best, -1).view(len(elements), len(layout.points), -1)


def _winners(
    attention: Attention,
    axes: int,
    sign: float,
    elements: Tensor,
    mask: Tensor | None,
    layout: Layout,
    best: Tensor,
) -> Tensor:
    """The first element (B, K, C) that attains the maximum; n where there is none."""
    length = elements.shape[1]
    highest = best.flatten(0, 1)
    first = torch.full_like(highest, length, dtype=torch.long)
    for tile in _contribution_tiles(attention, axes, sign, elements, mask, layout):
        places = tile.places
        for channel, found in enumerate(tile.contributions):
            wins = (found == highest[:, channel][places]) & (found > -torch.inf)
            numbers = torch.where(wins, tile.rows, length)
            column = first[:, channel].clone()
            column.scatter_reduce_(0, places.flatten(), numbers.flatten(), "amin")
            first[:, channel] = column
    return first.view(best.shape)


def _contributions_at(
    attention: Attention,
    axes: int,
    elements: Tensor,
    layout: Layout,
    winners: Tensor,
    best: Tensor,
    sign: float,
) -> Tensor:
    """W v of the winners, differentiable, (B, K, C); infinite where there is none."""
    _, length, width = elements.shape
    found = winners < length
    sets, slots, channels = found.nonzero(as_tuple=True)
    rows = winners[sets, slots, channels] + length * sets
    distinct, places = rows.unique(return_inverse=True)
    chosen = elements.reshape(-1, width)[distinct]  # (U, p + f)
    pair = pair_near if _is_local(layout, attention) else pair_all
    pairs = pair(chosen[:, :axes], layout, attention)
    column = slots
    if pairs.slots is not None:
        column = (pairs.slots[places] == slots.unsqueeze(1)).int().argmax(1)
    values = torch.stack(
        [pairs.weights * value for value in _values(pairs, chosen[:, axes:], attention)], -1
    )
    picked = values[places, column, channels]
    return (sign * best).index_put((sets, slots, channels), picked)
