"""max_i W_ij v_i over the elements of each set, without storing n x K x d_out numbers."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor
from torch.nn.functional import linear

from setfold.kernels.modes import needs_plain_formula
from setfold.kernels.scores import EPSILON, FoldedScores, Projection, Scores, spoil, weigh
from setfold.kernels.tiles import MAX_ROWS, tile_factor, tiles
from setfold.native import dispatch as native

TILE_BYTES = 1 << 20  # for the contributions of one slot
MANY_WINS = 8  # (slot, channel) pairs per element from which on nearly every element is a winner


def slot_extrema(
    elements: Tensor,
    mask: Tensor | None,
    scores: Scores,
    attention: str,
    projection: Projection,
    largest: bool,
) -> Tensor:
    """The largest (or smallest) contribution W_ij v_i of each set, by slot and channel.

    Only the elements that attain the maximum (the winners) have gradients: they are found without a
    graph, then the formula is evaluated for them. If elements tie, one of them is the winner.

    Args:
        elements: (B, n, d); masked rows must be finite.
        mask: (B, n), True where present, or None.
        scores: maps elements to logits over K slots.
        attention: "sigmoid" or "softmax", both over slots.
        projection: weight (d_out, d) and bias (d_out,) of the value; the bias may be None.
        largest: True for the maximum, False for the minimum.

    Returns:
        (B, K, d_out); -inf (or inf) for a set without elements.
    """
    sign = 1.0 if largest else -1.0
    batch, length, _ = elements.shape
    if length == 0:
        return elements.new_full(
            (batch, scores.num_slots, projection[0].shape[0]), -sign * torch.inf
        )
    if needs_plain_formula():
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
    projection: Projection,
    sign: float,
) -> Tensor:
    """The formula, slot by slot, for compilers and function transforms."""
    weights = weigh(scores.logits(elements), attention)  # (B, n, K)
    values = sign * linear(elements, *projection)  # (B, n, d_out)
    found = []
    for slot in range(scores.num_slots):
        product = weights[..., slot, None] * values
        if mask is not None:  # not the values: a weight may be 0, and 0 * inf is NaN
            product = torch.where(mask.unsqueeze(-1), product, -torch.inf)
        found.append(product.max(1).values)  # not amax: one winner, if elements tie
    return torch.stack(found, 1)


def _maximum(
    elements: Tensor,
    mask: Tensor | None,
    scores: Scores,
    attention: str,
    projection: Projection,
    sign: float,
    tracked: bool,
) -> tuple[Tensor, Tensor | None]:
    """The maximum (B, K, d_out) of sign * contributions and, if tracked, where it is attained."""
    if isinstance(scores, FoldedScores):
        weight, bias = projection
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        values = torch.cat([weight, bias.unsqueeze(1)], 1).t()  # (d + 1, d_out)
        found = native.extrema(elements, mask, scores.matrix, attention, values, sign > 0, tracked)
        if found is not None:
            return found[0].mul_(sign), found[1]
    batch, length, _ = elements.shape
    dim_out = projection[0].shape[0]
    factor = tile_factor(elements.device)
    rows = max(1, factor * TILE_BYTES // (elements.element_size() * dim_out))
    rows = min(factor * MAX_ROWS, rows)
    shape = (batch, scores.num_slots, dim_out)
    best = elements.new_full(shape, -torch.inf)
    winners = torch.zeros(shape, dtype=torch.long, device=elements.device) if tracked else None
    for sets, part in tiles(batch, length, rows):
        tile = elements[sets, part].transpose(1, 2)  # (b, d, r)
        weights = _transposed_weights(tile, scores, attention)  # (b, K, r)
        values = _transposed_values(tile, projection, sign)  # (b, d_out, r)
        absent = None if mask is None else ~mask[sets, part].unsqueeze(1)
        product = torch.empty_like(values)
        for slot in range(scores.num_slots):
            torch.mul(values, weights[:, slot, None], out=product)
            if absent is not None:  # not the values: 0 * inf is NaN
                product.masked_fill_(absent, -torch.inf)
            current = best[sets, slot]
            if winners is None:
                torch.maximum(current, product.amax(-1), out=current)
                continue
            places = _argmax(product)  # (b, d_out)
            top = product.gather(-1, places.unsqueeze(-1)).squeeze(-1)
            winner = winners[sets, slot]
            better = (top > current) | (top.isnan() & ~current.isnan())  # NaN propagates
            torch.where(better, places + part.start, winner, out=winner)
            torch.maximum(current, top, out=current)
    return best, winners


def _argmax(values: Tensor) -> Tensor:
    """The index of the maximum along the last dimension, or of the first NaN."""
    if values.is_cpu and values.dtype in (torch.float32, torch.float64):
        with suppress(RuntimeError):  # tensors of torch.func transforms have no numpy()
            return torch.from_numpy(values.numpy().argmax(-1))  # ten times faster than torch
    return values.argmax(-1)


def _transposed_values(tile: Tensor, projection: Projection, sign: float) -> Tensor:
    """Signed values (b, d_out, r) of elements (b, d, r)."""
    weight, bias = projection
    values = torch.matmul(weight, tile)
    if bias is not None:
        values.add_(bias[:, None])
    return values if sign > 0 else values.neg_()


def _transposed_weights(tile: Tensor, scores: Scores, attention: str) -> Tensor:
    """Weights (b, K, r) of elements (b, d, r), computed in this layout because copying is slow."""
    if not isinstance(scores, FoldedScores):
        weights = weigh(scores.logits(tile.transpose(1, 2)), attention)
        return weights.transpose(1, 2).contiguous()
    matrix, offset = scores.matrix[:-1], scores.matrix[-1]
    logits = torch.matmul(matrix.t(), tile).add_(offset[:, None])
    spoilt = spoil(logits, 1)
    if attention == "softmax":
        return torch.softmax(logits, 1, out=logits).add_(spoilt)
    activation = logits.sigmoid_().add_(EPSILON)
    return activation.div_(spoilt.add_(activation.sum(1, keepdim=True)))


def _contributions_at(
    elements: Tensor,
    winners: Tensor,
    scores: Scores,
    attention: str,
    projection: Projection,
) -> Tensor:
    """W_ij v_ic at i = winners[b, j, c], (B, K, d_out), differentiable."""
    if winners.numel() < MANY_WINS * elements.shape[0] * elements.shape[1]:
        return _contributions_of_few(elements, winners, scores, attention, projection)
    weights = weigh(scores.logits(elements), attention).transpose(1, 2)  # (B, K, n)
    values = linear(elements, *projection).transpose(1, 2)  # (B, d_out, n)
    by_channel = values.gather(2, winners.transpose(1, 2)).transpose(1, 2)
    return weights.gather(2, winners) * by_channel


def _contributions_of_few(
    elements: Tensor,
    winners: Tensor,
    scores: Scores,
    attention: str,
    projection: Projection,
) -> Tensor:
    """The same, with weights and values of the U distinct winners only."""
    batch, length, width = elements.shape
    device = elements.device
    flat = winners + length * torch.arange(batch, device=device)[:, None, None]
    rows, places = flat.unique(return_inverse=True)  # places: (B, K, d_out)
    chosen = elements.reshape(-1, width)[rows]  # (U, d)
    weights = weigh(scores.logits(chosen), attention)  # (U, K)
    values = linear(chosen, *projection)  # (U, d_out)
    slots = torch.arange(winners.shape[1], device=device)[:, None]
    channels = torch.arange(winners.shape[2], device=device)
    return weights[places, slots] * values[places, channels]
