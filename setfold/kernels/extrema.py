"""max_i W_ij v_i over the elements of each set, without ever holding n x K x d_out numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from setfold.kernels.scores import EPSILON, FoldedScores, Scores, weigh
from setfold.kernels.tiles import MAX_ROWS, tiles

TILE_BYTES = 1 << 20  # of contributions of one slot
PAIR_BYTES = 4 << 20  # room for (slot, channel) pairs while their winners are looked up


def slot_extrema(
    elements: Tensor,
    mask: Tensor | None,
    scores: Scores,
    attention: str,
    projection: tuple[Tensor, Tensor | None],
    largest: bool,
) -> Tensor:
    """The largest (or smallest) contribution W_ij v_i of each set, by slot and channel.

    Gradients flow through the winning elements only: they are found without a graph, and the
    formula is then evaluated on those few rows. A tie goes to one of the winners.

    Args:
        elements: (B, n, d); rows that the mask leaves out must be finite.
        mask: (B, n), True where present, or None.
        scores: what turns elements into logits over K slots.
        attention: "sigmoid" or "softmax", both over slots.
        projection: weight (d_out, d) and bias of the value.
        largest: the maximum, or else the minimum.

    Returns:
        (B, K, d_out); -inf (or inf) for a set without elements.
    """
    sign = 1.0 if largest else -1.0
    batch, length, _ = elements.shape
    if length == 0:
        return elements.new_full(
            (batch, scores.num_slots, projection[0].shape[0]), -sign * torch.inf
        )
    if torch.compiler.is_compiling():
        return sign * _plain_maximum(elements, mask, scores, attention, projection, sign)
    tracked = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (elements, *scores, *projection)
    )
    with torch.no_grad():
        best, winners = _maximum(elements, mask, scores, attention, projection, sign, tracked)
    if winners is None:
        return best.mul_(sign)
    value = _contributions_at(elements, winners, scores, attention, projection)
    if mask is None:
        return value
    return torch.where(mask.any(1)[:, None, None], value, -sign * torch.inf)


def _plain_maximum(
    elements: Tensor,
    mask: Tensor | None,
    scores: Scores,
    attention: str,
    projection: tuple[Tensor, Tensor | None],
    sign: float,
) -> Tensor:
    """The formula, slot by slot: what is compiled and exported."""
    weights = weigh(scores.logits(elements), attention)  # (B, n, K)
    values = sign * linear(elements, *projection)  # (B, n, d_out)
    found = []
    for slot in range(scores.num_slots):
        product = weights[..., slot, None] * values
        if mask is not None:  # the product: a weight may be zero, and zero times infinity is NaN
            product = torch.where(mask.unsqueeze(-1), product, -torch.inf)
        found.append(product.amax(1))
    return torch.stack(found, 1)


def _maximum(
    elements: Tensor,
    mask: Tensor | None,
    scores: Scores,
    attention: str,
    projection: tuple[Tensor, Tensor | None],
    sign: float,
    tracked: bool,
) -> tuple[Tensor, Tensor | None]:
    """The maximum (B, K, d_out) of sign * contributions and, when tracked, its elements."""
    batch, length, _ = elements.shape
    dim_out = projection[0].shape[0]
    rows = min(MAX_ROWS, max(1, TILE_BYTES // (elements.element_size() * dim_out)))
    shape = (batch, scores.num_slots, dim_out)
    best = elements.new_full(shape, -torch.inf)
    origin = torch.zeros(shape, dtype=torch.long, device=elements.device)
    pieces = list(tiles(batch, length, rows))

    def factors(sets: slice, part: slice) -> tuple[Tensor, Tensor]:
        """Weights (b, K, r) and signed values (b, d_out, r) of one tile, elements last."""
        tile = elements[sets, part].transpose(1, 2)  # (b, d, r)
        weight, bias = projection
        values = torch.matmul(weight, tile)
        if bias is not None:
            values.add_(bias[:, None])
        return _transposed_weights(tile, scores, attention), values if sign > 0 else values.neg_()

    def hidden(sets: slice, part: slice) -> Tensor | None:
        return None if mask is None else ~mask[sets, part]  # (b, r)

    for number, (sets, part) in enumerate(pieces):
        weights, values = factors(sets, part)
        absent = hidden(sets, part)
        product = torch.empty_like(values)
        for slot in range(scores.num_slots):
            torch.mul(values, weights[:, slot, None], out=product)
            if absent is not None:  # the product: a weight of zero times infinity would be NaN
                product.masked_fill_(absent.unsqueeze(1), -torch.inf)
            top = product.amax(-1)  # (b, d_out)
            held = best[sets, slot]
            if tracked:
                origin[sets, slot].masked_fill_(top > held, number)
            torch.maximum(held, top, out=held)
    if not tracked:
        return best, None
    winners = torch.zeros_like(origin)
    for number, (sets, part) in enumerate(pieces):
        pairs = (origin[sets] == number).nonzero(as_tuple=True)  # set, slot, channel
        if len(pairs[0]):
            found = _rows_of_maxima(*factors(sets, part), hidden(sets, part), pairs)
            winners[sets][pairs] = found + part.start
    return best, winners


def _transposed_weights(tile: Tensor, scores: Scores, attention: str) -> Tensor:
    """Weights (b, K, r) of elements (b, d, r), in memory in that order: copying takes long."""
    if not isinstance(scores, FoldedScores):
        weights = weigh(scores.logits(tile.transpose(1, 2)), attention)
        return weights.transpose(1, 2).contiguous()
    matrix, offset = scores.matrix[:-1], scores.matrix[-1]
    logits = torch.matmul(matrix.t(), tile).add_(offset[:, None])
    if attention == "softmax":
        return torch.softmax(logits, 1, out=logits)
    activation = logits.sigmoid_().add_(EPSILON)
    return activation.div_(activation.sum(1, keepdim=True))


def _rows_of_maxima(
    weights: Tensor, values: Tensor, absent: Tensor | None, pairs: tuple[Tensor, ...]
) -> Tensor:
    """For each (set, slot, channel), the row of the tile that holds the maximum."""
    room = max(1, PAIR_BYTES // (weights.element_size() * weights.shape[-1]))
    found = []
    for sets, slots, channels in zip(*(p.split(room) for p in pairs), strict=True):
        product = weights[sets, slots] * values[sets, channels]  # (pairs, r)
        if absent is not None:
            product.masked_fill_(absent[sets], -torch.inf)
        found.append(product.argmax(-1))
    return torch.cat(found)


def _contributions_at(
    elements: Tensor,
    winners: Tensor,
    scores: Scores,
    attention: str,
    projection: tuple[Tensor, Tensor | None],
) -> Tensor:
    """W_ij v_ic at i = winners[b, j, c], differentiably."""
    batch, length, width = elements.shape
    device = elements.device
    flat = winners + length * torch.arange(batch, device=device)[:, None, None]
    rows, place = flat.unique(return_inverse=True)  # place: (B, K, d_out)
    chosen = elements.reshape(-1, width)[rows]  # (U, d)
    weights = weigh(scores.logits(chosen), attention)  # (U, K)
    values = linear(chosen, *projection)  # (U, d_out)
    slots = torch.arange(winners.shape[1], device=device)[:, None]
    channels = torch.arange(winners.shape[2], device=device)
    return weights[place, slots] * values[place, channels]
