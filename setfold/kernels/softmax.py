"""sum_i exp(l_ij - m_j) [x_i, 1] with m_j = max_i l_ij over the elements, in constant memory.

These are the numerator and denominator of a softmax over elements. The peak m keeps every
exponential in (0, 1], so logits of any size are safe. Numerator and denominator are relative to the
same peak, so the peak is a constant for the gradient.

- `_weighted_sums`: the formula, for torch.compile, torch.export, small inputs and replayed tiles.
- `_stream`: tile by tile; rescales the sums when a tile has a larger logit.
- `_Streamed`: the gradient of `_stream`. The peak is known, so it is a sum over tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from setfold.kernels.modes import accumulator_dtype
from setfold.kernels.replay import differentiable_once, replayed_gradients
from setfold.kernels.scores import FoldedScores, Scores
from setfold.kernels.sums import PLAIN_ROWS, transposed_product
from setfold.kernels.tiles import tile_rows, tiles

FEW_ROWS = 64


def softmax_sums(elements: Tensor, mask: Tensor | None, scores: Scores) -> tuple[Tensor, Tensor]:
    """The peak of the logits, and the elements summed with exponential weights relative to it.

    Args:
        elements: (B, n, d); masked rows must be finite.
        mask: (B, n), True where present, or None.
        scores: maps elements to Q logits.

    Returns:
        m (B, Q), -inf for a set without elements, and sum_i exp(l_i - m) [x_i, 1] (B, Q, d + 1).
    """
    batch, length, width = elements.shape
    if elements.numel() == 0:
        shape = (batch, scores.num_slots)
        return elements.new_full(shape, -torch.inf), elements.new_zeros(*shape, width + 1)
    compiling = torch.compiler.is_compiling()
    if compiling or batch * length <= PLAIN_ROWS:
        logits = _mask_logits(scores.logits(elements), mask)
        peak = logits.detach().amax(1) if compiling else _largest(logits.detach())  # (B, Q)
        return peak, _weighted_sums(elements, logits, peak)
    if torch.is_grad_enabled():
        return _Streamed.apply(elements, mask, type(scores), *scores)
    return _stream(elements, mask, scores)


def exponentials(logits: Tensor, peak: Tensor) -> Tensor:
    """exp(l - m) of logits (B, n, Q) and peaks (B, Q); 0 for a set without elements."""
    return torch.exp(logits - finite(peak).unsqueeze(1))


def _weighted_sums(elements: Tensor, logits: Tensor, peak: Tensor) -> Tensor:
    """The sums (b, Q, d + 1) of elements (b, r, d), given logits (b, r, Q) and peaks (b, Q)."""
    values = pad(elements, (0, 1), value=1.0)
    return exponentials(logits, peak).transpose(1, 2) @ values


def _mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    return logits if mask is None else logits.masked_fill(~mask.unsqueeze(-1), -torch.inf)


def finite(peak: Tensor) -> Tensor:
    """The peak, or 0 for a set without elements, because -inf - (-inf) is NaN."""
    return peak.masked_fill(peak == -torch.inf, 0)


def _stream(elements: Tensor, mask: Tensor | None, scores: Scores) -> tuple[Tensor, Tensor]:
    """Peak and sums, tile by tile without a graph."""
    batch, length, width = elements.shape
    precise = accumulator_dtype(elements.device)
    rows = min(tile_rows(width + scores.room, elements.element_size()), batch * length)
    shape = (batch, scores.num_slots)
    peak = torch.full(shape, -torch.inf, dtype=precise, device=elements.device)
    sums = torch.zeros(*shape, width + 1, dtype=precise, device=elements.device)
    room = elements.new_empty(rows, scores.num_slots)
    for sets, part in tiles(batch, length, rows):
        tile = elements[sets, part]  # (b, r, d)
        shown = None if mask is None else mask[sets, part]
        logits = _logits(tile, scores, room)
        if shown is not None:
            logits.masked_fill_(~shown.unsqueeze(-1), -torch.inf)
        before = peak[sets]
        now = torch.maximum(before, _largest(logits))
        scale = torch.exp(before - finite(now)).unsqueeze_(-1)  # (b, Q, 1); 0 for the first tile
        weights = logits.sub_(finite(now).to(logits.dtype).unsqueeze(1)).exp_()
        total = sums[sets].mul_(scale)
        if tile.shape[0] == 1:
            total[0, :, :-1] += transposed_product(weights[0], tile[0])
            total[0, :, -1] += weights[0].sum(0)
        else:
            total[..., :-1] += torch.bmm(weights.transpose(1, 2), tile)
            total[..., -1] += weights.sum(1)
        peak[sets] = now
    return peak, sums


def _largest(logits: Tensor) -> Tensor:
    """The maximum of (b, r, Q) over r, by halves; ten times faster than amax for a small Q."""
    while logits.shape[1] > FEW_ROWS:
        half = logits.shape[1] // 2
        pairs = torch.maximum(logits[:, :half], logits[:, half : 2 * half])
        if logits.shape[1] % 2:
            pairs[:, :1] = torch.maximum(pairs[:, :1], logits[:, -1:])
        logits = pairs
    return logits.amax(1)


def _logits(tile: Tensor, scores: Scores, room: Tensor) -> Tensor:
    """Logits (b, r, Q) that the caller may overwrite. Folded scores write them to `room`."""
    if not isinstance(scores, FoldedScores):
        return scores.logits(tile)
    flat = tile.reshape(-1, tile.shape[-1])
    matrix, offset = scores.matrix[:-1], scores.matrix[-1]
    logits = torch.addmm(offset, flat, matrix, out=room[: len(flat)])
    return logits.view(*tile.shape[:2], -1)


class _Streamed(torch.autograd.Function):
    """`_stream` with a backward pass that saves only the inputs and the peak."""

    @staticmethod
    def forward(
        ctx: Any, elements: Tensor, mask: Tensor | None, form: type[Scores], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        peak, sums = _stream(elements, mask, form(*tensors))
        ctx.save_for_backward(elements, mask, peak, *tensors)
        ctx.form = form
        ctx.mark_non_differentiable(peak)
        return peak, sums

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, _: Tensor, sums_grad: Tensor) -> tuple[Tensor | None, ...]:
        elements, mask, peak, *tensors = ctx.saved_tensors
        need_elements, _, _, *need_tensors = ctx.needs_input_grad
        if ctx.form is FoldedScores:
            grads = _folded_gradients(elements, mask, peak, tensors[0], sums_grad, need_elements)
            return grads[0], None, None, grads[1]

        def tile_sums(tile: Tensor, shown: Tensor | None, top: Tensor, *parts: Tensor) -> Tensor:
            logits = _mask_logits(ctx.form(*parts).logits(tile), shown)
            return _weighted_sums(tile, logits, top)

        room = ctx.form(*tensors).room
        rows = tile_rows(elements.shape[2] + room, elements.element_size())
        peaks = (finite(peak).to(elements.dtype),)
        needs = [need_elements, *need_tensors]
        element_grad, tensor_grads = replayed_gradients(
            tile_sums, rows, elements, mask, tensors, needs, sums_grad, per_set=peaks
        )
        return element_grad, None, None, *tensor_grads


def _folded_gradients(
    elements: Tensor,
    mask: Tensor | None,
    peak: Tensor,
    augmented: Tensor,
    sums_grad: Tensor,
    need_elements: bool,
) -> tuple[Tensor | None, Tensor]:
    """dL/dx and dL/dA from dL/dsums = G: with w = exp(l - m), dL/dl = w (G [x, 1])."""
    batch, length, width = elements.shape
    num_logits = augmented.shape[1]
    scores, matrix = FoldedScores(augmented), augmented[:-1]
    sums_grad = sums_grad.to(elements.dtype)  # (B, Q, d + 1)
    upstream = sums_grad.transpose(1, 2).contiguous()  # (B, d + 1, Q)
    highest = finite(peak).to(elements.dtype)  # (B, Q)
    grads = torch.zeros_like(augmented, dtype=accumulator_dtype(elements.device))
    elements_grad = torch.empty_like(elements) if need_elements else None
    rows = min(tile_rows(width + 2 * num_logits, elements.element_size()), batch * length)
    room = elements.new_empty(2, rows, num_logits)
    for sets, part in tiles(batch, length, rows):
        tile = elements[sets, part]
        flat = tile.reshape(-1, width)  # (r, d)
        shaped = (*tile.shape[:2], num_logits)
        weights, grad = room[:, : len(flat)]  # each (r, Q)
        _logits(tile, scores, weights).sub_(highest[sets].unsqueeze(1))
        if mask is not None:  # before exp: masked logits may be far above the peak
            weights.masked_fill_(~mask[sets, part].reshape(-1, 1), -torch.inf)
        weights.clamp_(max=0).exp_()  # only rounding can put a logit above the peak
        offsets = upstream[sets, -1:]
        torch.baddbmm(offsets, tile, upstream[sets, :-1], out=grad.view(shaped))
        grad.mul_(weights)
        grads[:-1] += transposed_product(flat, grad)
        grads[-1] += grad.sum(0)
        if elements_grad is not None:
            direct = weights.view(shaped) @ sums_grad[sets, :, :-1]
            found = direct.view(-1, width).addmm_(grad, matrix.t())
            elements_grad[sets, part] = found.view(tile.shape)
    return elements_grad, grads.to(augmented.dtype)
