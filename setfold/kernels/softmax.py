"""sum_i exp(l_ij - m_j) [v_i, 1] with m_j = max_i l_ij over the elements, in constant memory.

These are the numerator and denominator of a mean with weights exp(l_ij): a softmax over elements,
or, with logits that are normalized over the slots first, weights that sum to 1 over the slots. The
peak m keeps every exponential in (0, 1] and the largest one at 1, so logits of any size are safe.
Numerator and denominator are relative to the same peak, so the peak is a constant for the gradient.

- `_weighted_sums`: the formula, for torch.compile, torch.export, replayed tiles, and small inputs
  for which there is no compiled kernel.
- `_stream`: tile by tile; rescales the sums when a tile has a larger logit.
- `_Streamed`: the gradient of `_stream`. The peak is known, so it is a sum over tiles.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from setfold.kernels.modes import (
    accumulator_dtype,
    differentiable_once,
    differentiate_again,
    is_batched,
    needs_plain_formula,
)
from setfold.kernels.replay import replayed_gradients
from setfold.kernels.scores import FoldedScores, Projection, Scores, has_own_slots, spoil
from setfold.kernels.sums import PLAIN_ROWS, transposed_product
from setfold.kernels.tiles import tile_rows, tiles
from setfold.native import dispatch as native

FEW_ROWS = 64
COMPILED_LENGTH = 256  # elements of a set from which on compiled gradients are faster than a graph


def softmax_sums(
    elements: Tensor,
    mask: Tensor | None,
    scores: Scores,
    projection: Projection | None = None,
    over_slots: bool = False,
) -> tuple[Tensor, Tensor]:
    """The peak of the logits, and the elements summed with exponential weights relative to it.

    Args:
        elements: (B, n, d); masked rows must be finite.
        mask: (B, n), True where present, or None.
        scores: maps elements to Q logits.
        projection: weight (d_out, d) and bias of the value; None sums the elements themselves.
        over_slots: whether to normalize the logits of each element first, so that its weights sum
            to 1 over the Q slots.

    Returns:
        m (B, Q), -inf for a set without elements, and sum_i exp(l_i - m) [v_i, 1] (B, Q, p + 1).
    """
    batch, length, width = elements.shape
    if elements.numel() == 0:
        shape = (batch, scores.num_slots)
        summed = width if projection is None else projection[0].shape[0]
        return elements.new_full(shape, -torch.inf), elements.new_zeros(*shape, summed + 1)
    plain = needs_plain_formula()
    if not (plain or torch.is_grad_enabled()):
        compiled = _compiled(elements, mask, scores, projection, over_slots)
        if compiled is not None:
            return compiled
    small = not plain and batch * length <= PLAIN_ROWS  # no guard on sizes in an exported program
    if small and length >= COMPILED_LENGTH:
        small = not _can_compile(elements, mask, scores, projection, over_slots)
    if plain or small or has_own_slots(scores):
        logits = _normalized(scores.logits(elements), over_slots)
        shown = logits if mask is None else logits.masked_fill(~mask.unsqueeze(-1), 0)
        spoilt, logits = spoil(shown, 1).squeeze(1), _mask_logits(logits, mask)
        peak = logits.detach().amax(1) if plain else _largest(logits.detach())  # (B, Q)
        peak = peak + spoilt
        return peak, _weighted_sums(_values(elements, projection), logits, peak)
    if torch.is_grad_enabled():
        tensors = (*scores, *(projection or ()))
        return _Streamed.apply(elements, mask, type(scores), over_slots, *tensors)
    return _stream(elements, mask, scores, projection, over_slots)


def one_tile_log_weights(elements: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """`softmax_sums` over slots of one set that fits in cache, in as few calls as possible.

    Args:
        elements: (n, d), with n at least 1.
        matrix: (d + 1, K), of the scores.

    Returns:
        m (K,) and the sums (K, d + 1).
    """
    padded = torch.constant_pad_nd(elements, (0, 1), 1.0)
    logits = torch.log_softmax(torch.mm(padded, matrix), -1)
    if len(elements) == 1:  # its weights relative to themselves are 1
        peak = logits.squeeze(0)
        return peak.add_(peak * 0.0), padded.expand(matrix.shape[1], -1)
    peak = logits.amax(0).add_(logits.amin(0).mul_(0.0))  # as `spoil`, in half the time
    return peak, transposed_product(logits.sub_(peak).exp_(), padded)


def _can_compile(
    elements: Tensor,
    mask: Tensor | None,
    scores: Scores,
    projection: Projection | None,
    over_slots: bool,
) -> bool:
    """Whether there is a compiled kernel for this form of scores and these tensors."""
    if over_slots or projection is not None or not isinstance(scores, FoldedScores):
        return False
    return native.can_multiply(elements, mask, scores.matrix)


def _compiled(
    elements: Tensor,
    mask: Tensor | None,
    scores: Scores,
    projection: Projection | None,
    over_slots: bool,
) -> tuple[Tensor, Tensor] | None:
    """Peak and sums by the compiled kernel; None if it does not know this form of scores."""
    if over_slots or projection is not None or not isinstance(scores, FoldedScores):
        return None
    return native.softmax(elements, mask, scores.matrix)


def exponentials(logits: Tensor, peak: Tensor) -> Tensor:
    """exp(l - m) of logits (B, n, Q) and peaks (B, Q); 0 for a set without elements."""
    return torch.exp(logits - finite(peak).unsqueeze(1))


def _normalized(logits: Tensor, over_slots: bool) -> Tensor:
    return logits.log_softmax(-1) if over_slots else logits


def _values(elements: Tensor, projection: Projection | None) -> Tensor:
    return elements if projection is None else linear(elements, *projection)


def _weighted_sums(values: Tensor, logits: Tensor, peak: Tensor) -> Tensor:
    """The sums (b, Q, p + 1) of values (b, r, p), given logits (b, r, Q) and peaks (b, Q)."""
    return exponentials(logits, peak).transpose(1, 2) @ pad(values, (0, 1), value=1.0)


def _mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    return logits if mask is None else logits.masked_fill(~mask.unsqueeze(-1), -torch.inf)


def finite(peak: Tensor) -> Tensor:
    """The peak; a finite number for a set without elements, because -inf - (-inf) is NaN."""
    if (
        torch.compiler.is_compiling()
    ):  # ONNX keeps a float64 constant as float32, where this is -inf
        return peak.masked_fill(peak == -torch.inf, 0)
    return peak.clamp_min(torch.finfo(peak.dtype).min)


def _stream(
    elements: Tensor,
    mask: Tensor | None,
    scores: Scores,
    projection: Projection | None,
    over_slots: bool,
) -> tuple[Tensor, Tensor]:
    """Peak and sums, tile by tile without a graph."""
    compiled = _compiled(elements, mask, scores, projection, over_slots)
    if compiled is not None:
        return compiled
    batch, length, width = elements.shape
    precise = accumulator_dtype(elements.device)
    rows = min(
        tile_rows(width + scores.room, elements.element_size(), elements.device), batch * length
    )
    shape = (batch, scores.num_slots)
    summed = width if projection is None else projection[0].shape[0]
    peak = torch.full(shape, -torch.inf, dtype=precise, device=elements.device)
    sums = torch.zeros(*shape, summed + 1, dtype=precise, device=elements.device)
    room = elements.new_empty(rows, scores.num_slots)
    shares = elements.new_full((rows,), 1 / rows)
    for sets, part in tiles(batch, length, rows):
        tile = elements[sets, part]  # (b, r, d)
        shown = None if mask is None else mask[sets, part]
        logits = _logits(tile, scores, room, over_slots)
        if shown is not None:
            hidden = ~shown.unsqueeze(-1)
            logits.masked_fill_(hidden, 0)  # hidden elements may have any logits
        spoilt = torch.matmul(shares[: logits.shape[1]], logits).mul_(0.0)  # as `spoil`: (b, Q)
        if shown is not None:
            logits.masked_fill_(hidden, -torch.inf)
        before = peak[sets]
        now = torch.maximum(before, _largest(logits).add_(spoilt))
        scale = torch.exp(before - finite(now)).unsqueeze_(-1)  # (b, Q, 1); 0 for the first tile
        weights = logits.sub_(finite(now.to(logits.dtype)).unsqueeze(1)).exp_()
        total, values = sums[sets].mul_(scale), _values(tile, projection)
        if tile.shape[0] == 1:
            total[0, :, :-1] += transposed_product(weights[0], values[0])
            total[0, :, -1] += weights[0].sum(0)
        else:
            total[..., :-1] += torch.bmm(weights.transpose(1, 2), values)
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


def _logits(tile: Tensor, scores: Scores, room: Tensor, over_slots: bool) -> Tensor:
    """Logits (b, r, Q) that the caller may overwrite. Folded scores write them to `room`."""
    if isinstance(scores, FoldedScores):
        flat = tile.reshape(-1, tile.shape[-1])
        matrix, offset = scores.matrix[:-1], scores.matrix[-1]
        logits = torch.addmm(offset, flat, matrix, out=room[: len(flat)])
        logits = logits.view(*tile.shape[:2], -1)
    else:
        logits = scores.logits(tile)
    return torch.log_softmax(logits, -1, out=logits) if over_slots else logits


class _Streamed(torch.autograd.Function):
    """`_stream` with a backward pass that saves only the inputs and the peak."""

    @staticmethod
    def forward(
        ctx: Any,
        elements: Tensor,
        mask: Tensor | None,
        form: type[Scores],
        over_slots: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        peak, sums = _stream(elements, mask, *_parts(form, tensors), over_slots)
        ctx.save_for_backward(elements, mask, peak, *tensors)
        ctx.form, ctx.over_slots = form, over_slots
        ctx.mark_non_differentiable(peak)
        return peak, sums

    @staticmethod
    def backward(ctx: Any, _: Tensor, sums_grad: Tensor) -> tuple[Tensor | None, ...]:
        elements, mask, peak, *tensors = ctx.saved_tensors
        again = torch.is_grad_enabled() and elements.shape[:2].numel() <= PLAIN_ROWS
        if not (again or is_batched(sums_grad)):
            return _Streamed.replay(ctx, sums_grad)
        top = finite(peak.to(elements.dtype))

        def formula(some: Tensor, *parts: Tensor) -> Tensor:
            return _sums_from_tensors(ctx.form, ctx.over_slots, some, mask, top, *parts)

        needs = ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]
        found = differentiate_again(formula, (elements, *tensors), needs, sums_grad)
        return found[0], None, None, None, *found[1:]

    @staticmethod
    @differentiable_once
    def replay(ctx: Any, sums_grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients without a graph of their own."""
        elements, mask, peak, *tensors = ctx.saved_tensors
        need_elements, _, _, _, *need_tensors = ctx.needs_input_grad
        if ctx.form is FoldedScores and len(tensors) == 1:
            grads = _folded_gradients(
                elements, mask, peak, tensors[0], sums_grad, need_elements, ctx.over_slots
            )
            return grads[0], None, None, None, grads[1]
        tile_sums = partial(_sums_from_tensors, ctx.form, ctx.over_slots)
        room = _parts(ctx.form, tensors)[0].room
        rows = tile_rows(elements.shape[2] + room, elements.element_size(), elements.device)
        peaks = (finite(peak.to(elements.dtype)),)
        needs = [need_elements, *need_tensors]
        element_grad, tensor_grads = replayed_gradients(
            tile_sums, rows, elements, mask, tensors, needs, sums_grad, per_set=peaks
        )
        return element_grad, None, None, None, *tensor_grads


def _sums_from_tensors(
    form: type[Scores],
    over_slots: bool,
    elements: Tensor,
    mask: Tensor | None,
    peak: Tensor,
    *tensors: Tensor,
) -> Tensor:
    """`_weighted_sums`, differentiably, with its tensors laid out flat."""
    scores, projection = _parts(form, tensors)
    logits = _mask_logits(_normalized(scores.logits(elements), over_slots), mask)
    return _weighted_sums(_values(elements, projection), logits, peak)


def _parts(form: type[Scores], tensors: Any) -> tuple[Scores, Projection | None]:
    """Scores and projection from their tensors, laid out flat."""
    number = len(form._fields)
    return form(*tensors[:number]), tuple(tensors[number:]) or None


def _folded_gradients(
    elements: Tensor,
    mask: Tensor | None,
    peak: Tensor,
    augmented: Tensor,
    sums_grad: Tensor,
    need_elements: bool,
    over_slots: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """dL/dx and dL/dA from dL/dsums = G: with w = exp(l - m), dL/dl = w (G [x, 1]).

    If the logits were normalized over slots, dL/d(logits before) = dL/dl - W sum_k dL/dl_k, with
    the weights W = exp(l) = w exp(m).
    """
    if not over_slots:
        compiled = native.gradients(
            *(elements, mask, augmented, "exponential", sums_grad, finite(peak), need_elements)
        )
        if compiled is not None:
            return compiled[0], compiled[1].to(augmented.dtype)
    batch, length, width = elements.shape
    num_logits = augmented.shape[1]
    scores, matrix = FoldedScores(augmented), augmented[:-1]
    sums_grad = sums_grad.to(elements.dtype)  # (B, Q, d + 1)
    upstream = sums_grad.transpose(1, 2).contiguous()  # (B, d + 1, Q)
    highest = finite(peak.to(elements.dtype))  # (B, Q)
    grads = torch.zeros_like(augmented, dtype=accumulator_dtype(elements.device))
    elements_grad = torch.empty_like(elements) if need_elements else None
    rows = min(
        tile_rows(width + 2 * num_logits, elements.element_size(), elements.device), batch * length
    )
    room, ones = elements.new_empty(3, rows, num_logits), elements.new_ones(num_logits)
    for sets, part in tiles(batch, length, rows):
        tile = elements[sets, part]
        flat = tile.reshape(-1, width)  # (r, d)
        shaped = (*tile.shape[:2], num_logits)
        weights, grad, share = room[:, : len(flat)]  # each (r, Q)
        top = highest[sets].unsqueeze(1)  # (b, 1, Q)
        _logits(tile, scores, weights, over_slots).sub_(top)
        if mask is not None:  # before exp: masked logits may be far above the peak
            weights.masked_fill_(~mask[sets, part].reshape(-1, 1), -torch.inf)
        weights.clamp_(max=0).exp_()  # only rounding can put a logit above the peak
        offsets = upstream[sets, -1:]
        torch.baddbmm(offsets, tile, upstream[sets, :-1], out=grad.view(shaped))
        grad.mul_(weights)
        if over_slots:
            torch.mul(weights.view(shaped), top.exp(), out=share.view(shaped))
            grad.addcmul_(share, torch.mv(grad, ones).unsqueeze_(-1), value=-1)
        grads[:-1] += transposed_product(flat, grad)
        grads[-1] += grad.sum(0)
        if elements_grad is not None:
            direct = weights.view(shaped) @ sums_grad[sets, :, :-1]
            found = direct.view(-1, width).addmm_(grad, matrix.t())
            elements_grad[sets, part] = found.view(tile.shape)
    return elements_grad, grads.to(augmented.dtype)
