"""sum_i W_ij [x_i, 1] over the elements of each set, in constant memory.

Compiled kernels run where they can (`setfold.native`). There are three implementations in torch:

- `plain_sums`, the formula itself. It is compiled, exported, used by function transforms and for
  gradients of small inputs, and run on each tile by the replay.
- `_FoldedSums`, for large inputs and folded scores: tiles that stay in cache, reused buffers, and a
  backward pass that saves only the inputs.
- `summed_over_tiles(plain_sums)`, the same memory bound for every other form of scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from setfold.kernels import gpu
from setfold.kernels.modes import (
    accumulator_dtype,
    differentiate_again,
    is_batched,
    needs_plain_formula,
)
from setfold.kernels.ragged import Group, gather, group_by_length, packs
from setfold.kernels.replay import summed_over_tiles
from setfold.kernels.scores import (
    EPSILON,
    FoldedScores,
    Projection,
    Scores,
    has_own_slots,
    weigh,
    weigh_,
    weigh_few_,
)
from setfold.kernels.tiles import is_one_tile, tile_rows, tiles
from setfold.native import dispatch as native

PLAIN_ROWS = 4096  # up to here plain autograd is faster than recomputing
PACK_SETS = 256  # sets of a ragged batch whose sums are made together
FEW_ROWS = 64  # of a product for which transposing takes longer than it saves


def slot_sums(
    elements: Tensor,
    mask: Tensor | None,
    scores: Scores,
    attention: str,
    projection: Projection | None = None,
    gradients_only: bool = False,
) -> Tensor:
    """Sum the weighted elements (or their values) of each set, slot by slot.

    Args:
        elements: (B, n, d); rows that the mask leaves out must be finite.
        mask: (B, n), True where present, or None.
        scores: what turns elements into logits over K slots.
        attention: "sigmoid" or "softmax", both over slots.
        projection: weight (d_out, d) and bias of the value; None sums the elements themselves.
        gradients_only: whether only gradients are needed, so that the sums may be wrong.

    Returns:
        sum_i W_ij [x_i, 1] (B, K, p + 1): the weighted sum and, last, the sum of the weights.
    """
    batch, length, width = elements.shape
    if elements.numel() == 0:
        summed = width if projection is None else projection[0].shape[0]
        return elements.new_zeros(batch, scores.num_slots, summed + 1)
    if scores.num_slots == 1:  # one slot takes all of every element: W is exactly 1
        return _unweighted_sums(elements, mask, projection)
    tracked = torch.is_grad_enabled()
    small = tracked and batch * length <= PLAIN_ROWS
    if needs_plain_formula() or small or has_own_slots(scores):
        return plain_sums(elements, mask, attention, scores, projection)
    if isinstance(scores, FoldedScores) and projection is None:
        if tracked:
            return _FoldedSums.apply(elements, mask, attention, gradients_only, *scores)
        return _folded_forward(elements, mask, attention, *scores)
    rows = tile_rows(width + scores.room, elements.element_size(), elements.device)
    function = partial(_sums_from_tensors, attention, type(scores), len(scores))
    tensors = (*scores, *(projection or ()))
    return summed_over_tiles(function, rows, elements, mask, tensors, gradients_only)


def ragged_sums(
    elements: Tensor,
    index: Tensor,
    batch_size: int,
    scores: Scores,
    attention: str,
    projection: Projection | None = None,
) -> Iterator[tuple[Tensor | None, Tensor]]:
    """`slot_sums` of sets of different lengths, without a graph, all sets or some at a time.

    Args:
        elements: (N, d), the rows of all sets, float32 or float64 on the CPU.
        index: (N,), the set of each row, from 0 to `batch_size` - 1.
        batch_size: the number of sets.
        scores: what turns elements into logits over K slots, the same for all sets.
        attention: "sigmoid" or "softmax", both over slots.
        projection: weight (d_out, d) and bias of the value; None sums the elements themselves.

    Yields:
        The numbers of some sets (b,), or None for all, and sum_i W_ij [x_i, 1] (b, K, p + 1) of
        each.
    """
    if isinstance(scores, FoldedScores) and projection is None:
        found = native.ragged_sums(elements, index, batch_size, scores.matrix, attention)
        if found is not None:
            yield None, found
            return
    groups = group_by_length(index, batch_size)
    yield from _grouped_sums(elements, groups, scores, attention, projection)


def _grouped_sums(
    elements: Tensor,
    groups: Iterable[Group],
    scores: Scores,
    attention: str,
    projection: Projection | None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """`ragged_sums`, some sets at a time.

    Weights are made of rows whatever their set; only the products know of sets. So many groups
    cost little more than one. A set of very many rows comes in several parts, to be added up.
    """
    if isinstance(scores, FoldedScores):
        scores = FoldedScores(scores.matrix.contiguous())
    elements = elements.resolve_neg()  # for numpy
    width, num_slots = elements.shape[1], scores.num_slots
    summed = width if projection is None else projection[0].shape[0]
    most_rows = tile_rows(width + scores.room, elements.element_size(), elements.device)
    ones, tiles_room = elements.new_ones(num_slots), elements.new_empty(most_rows, width)
    logits_room = elements.new_empty(most_rows, num_slots)
    for pack in packs(groups, most_rows, PACK_SETS):
        sizes = [piece.rows.numel() for piece in pack]
        tile = tiles_room[: sum(sizes)]
        gather(elements, pack, out=tile)
        weights = weigh_(_logits(scores, tile, logits_room), attention, ones)
        values = tile if projection is None else linear(tile, *projection)
        sets = torch.cat([piece.sets for piece in pack])
        total = elements.new_empty(sets.shape[0], num_slots, summed)
        mass = elements.new_empty(sets.shape[0], num_slots, 1)
        by_set = [piece.sets.shape[0] for piece in pack]
        made = weights.split_with_sizes(sizes), values.split_with_sizes(sizes)
        out = total.split_with_sizes(by_set), mass.split_with_sizes(by_set)
        for line in zip(pack, *made, *out, strict=True):
            _sum_piece(*line)
        yield sets, torch.cat([total, mass], -1)


def _logits(scores: Scores, tile: Tensor, room: Tensor) -> Tensor:
    """The logits (r, K) of (r, d), written to `room` where the scores are one product."""
    if isinstance(scores, FoldedScores):
        matrix = scores.matrix
        return torch.addmm(matrix[-1], tile, matrix[:-1], out=room[: len(tile)])
    return scores.logits(tile)


def _sum_piece(piece: Group, weights: Tensor, values: Tensor, total: Tensor, mass: Tensor) -> None:
    """Fill W^T V (b, K, p) and W^T 1 (b, K, 1) of some sets from their (r, K) and (r, p)."""
    batch, length = piece.rows.shape
    if piece.mask is not None:
        weights.mul_(piece.mask.view(-1, 1))
    turned = weights.view(batch, length, -1).transpose(1, 2)
    if batch == 1:
        total[0] = transposed_product(weights, values)
    elif length == 1:  # bmm is slow with matrices of one row
        torch.mul(turned, values.unsqueeze(1), out=total)
    else:
        torch.bmm(turned, values.view(batch, length, -1), out=total)
    torch.sum(turned, 2, keepdim=True, out=mass)


def plain_sums(
    elements: Tensor,
    mask: Tensor | None,
    attention: str,
    scores: Scores,
    projection: Projection | None = None,
) -> Tensor:
    """The formula itself, differentiable, with B x n x K weights in memory."""
    if elements.shape[0] == 1 and not has_own_slots(scores):  # with matrices, half the nodes
        elements, mask = elements[0], None if mask is None else mask[0]
    values = elements if projection is None else linear(elements, *projection)
    values = torch.constant_pad_nd(values, (0, 1), 1.0)  # (B, n, p + 1)
    if isinstance(scores, FoldedScores) and projection is None:
        logits = values @ scores.matrix
    else:
        logits = scores.logits(elements)
    weights = weigh(logits, attention)  # (B, n, K)
    if mask is not None:
        weights = weights * mask.unsqueeze(-1)
    sums = weights.mT @ values
    return sums if sums.dim() == 3 else sums.unsqueeze(0)


def _sums_from_tensors(
    attention: str,
    form: type[Scores],
    parts: int,
    elements: Tensor,
    mask: Tensor | None,
    *tensors: Tensor | None,
) -> Tensor:
    """`plain_sums` with its tensors laid out flat, as the replay hands them over."""
    projection = tensors[parts:] or None
    scores = form(*tensors[:parts])  # type: ignore[arg-type]  # as many and as such as it was made of
    return plain_sums(elements, mask, attention, scores, projection)  # type: ignore[arg-type]  # likewise


def total(values: Tensor, mask: Tensor | None) -> Tensor:
    """The sums (B, ...) of values (B, n, ...) over the elements that are present, in float64."""
    if not needs_plain_formula() and values.dim() == 3:
        if torch.is_grad_enabled() and values.requires_grad:
            return _Total.apply(values, mask)
        found = native.totals(values, mask)
        if found is not None:
            return found
    return _plain_total(values, mask)


def _plain_total(values: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        values = values * mask.view(*mask.shape, *[1] * (values.dim() - 2))
    return values.sum(1, dtype=accumulator_dtype(values.device))


class _Total(torch.autograd.Function):
    """`total`, whose gradient is not computed in float64 for every element."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.shape, ctx.dtype = values.shape, values.dtype
        found = native.totals(values, mask)
        return _plain_total(values, mask) if found is None else found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        spread = grad.to(ctx.dtype).unsqueeze(1).expand(ctx.shape)
        return spread if mask is None else spread * mask.unsqueeze(-1), None


def _unweighted_sums(
    elements: Tensor, mask: Tensor | None, projection: Projection | None
) -> Tensor:
    precise = accumulator_dtype(elements.device)
    batch, length, _ = elements.shape
    if mask is None:
        mass = torch.full((batch, 1, 1), float(length), dtype=precise, device=elements.device)
    else:
        elements = elements * mask.unsqueeze(-1)
        mass = mask.sum(1, dtype=precise)[:, None, None]
    total = elements.sum(1, keepdim=True, dtype=precise)  # (B, 1, d)
    if projection is not None:
        weight, bias = projection
        total = total @ weight.t().to(precise)
        total = total if bias is None else total + mass * bias
    return torch.cat([total, mass], -1)


def transposed_product(left: Tensor, right: Tensor) -> Tensor:
    """left^T right for tall (r, p) and (r, q), with the narrower one transposed.

    The matrix library is several times slower with a narrow right-hand side if there are many rows.
    """
    rows, width = left.shape
    if right.shape[1] < width and rows > FEW_ROWS:
        return torch.mm(right.t(), left).t()
    return torch.mm(left.t(), right)


def _folded_forward(
    elements: Tensor, mask: Tensor | None, attention: str, matrix: Tensor
) -> Tensor:
    found = native.sums(elements, mask, matrix, attention)
    if found is None:
        found = gpu.sums(elements, mask, matrix, attention)
    if found is not None:
        return found
    batch, length, width = elements.shape
    num_slots = matrix.shape[1]
    precise = accumulator_dtype(elements.device)
    few = is_one_tile(batch * length)
    rows = (
        batch * length
        if few
        else tile_rows(width + num_slots, elements.element_size(), elements.device)
    )
    if batch == 1 and length <= rows:
        shown = None if mask is None else mask[0]
        return one_tile_sums(elements[0], shown, attention, matrix).unsqueeze_(0)
    rows = min(rows, batch * length)
    matrix, offset = matrix[:-1].contiguous(), matrix[-1].contiguous()
    sums = elements.new_zeros(batch, num_slots, width + 1, dtype=precise)
    total, mass = sums[..., :-1], sums[..., -1]
    ones, room = elements.new_ones(num_slots), elements.new_empty(rows, num_slots)
    for sets, part in tiles(batch, length, rows):
        tile = elements[sets, part]  # (b, r, d)
        flat = tile.reshape(-1, width)
        weights = torch.addmm(offset, flat, matrix, out=room[: len(flat)])
        weigh_(weights, attention, ones)
        if mask is not None:
            weights.mul_(mask[sets, part].reshape(-1, 1))
        if tile.shape[0] == 1:
            total[sets] += transposed_product(weights, flat)
            mass[sets] += weights.sum(0)
        else:
            weights = weights.view(*tile.shape[:2], num_slots)
            total[sets] = torch.bmm(weights.transpose(1, 2), tile)
            mass[sets] = weights.sum(1)
    return sums


def one_set_sums(elements: Tensor, attention: str, matrix: Tensor) -> Tensor:
    """`slot_sums` (1, K, d + 1) of one small set without a graph, in as few calls as possible.

    Args:
        elements: (1, n, d).
        attention: "sigmoid" or "softmax", both over slots.
        matrix: (d + 1, K), of the scores, contiguous.
    """
    found = native.one_set_sums(elements, matrix, attention)
    if found is not None:
        return found
    return one_tile_sums(elements[0], None, attention, matrix).unsqueeze_(0)


def one_set_values(
    elements: Tensor, attention: str, matrix: Tensor, values: Tensor, divisor: int
) -> Tensor | None:
    """`one_set_sums` times `values` (d + 1, d_out), over a divisor: (1, K, d_out).

    None if it is not finite.
    """
    found = native.encode(elements, matrix, attention, values, divisor)
    if found is not None:
        return found
    sums = one_tile_sums(elements[0], None, attention, matrix, divisor)
    encoding = torch.mm(sums, values).unsqueeze_(0)
    return encoding if math.isfinite(encoding.sum().item()) else None


def one_tile_sums(
    elements: Tensor, mask: Tensor | None, attention: str, matrix: Tensor, divisor: int = 1
) -> Tensor:
    """`slot_sums` (K, d + 1) of one set (n, d) that fits in cache, in as few calls as possible.

    Args:
        elements: (n, d).
        mask: (n,), True where present, or None.
        attention: "sigmoid" or "softmax", both over slots.
        matrix: (d + 1, K), of the scores.
        divisor: of the sums.
    """
    padded = torch.constant_pad_nd(elements, (0, 1), 1.0)
    weights = weigh_few_(torch.mm(padded, matrix), attention, divisor)
    if mask is not None:
        weights.mul_(mask.unsqueeze(-1))
    return transposed_product(weights, padded)


class _FoldedSums(torch.autograd.Function):
    """W^T [X, 1] with W from logits [X, 1] A; recomputes W in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        elements: Tensor,
        mask: Tensor | None,
        attention: str,
        gradients_only: bool,
        matrix: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(elements, mask, matrix)
        ctx.attention = attention
        if gradients_only:
            precise = accumulator_dtype(elements.device)
            shape = (elements.shape[0], matrix.shape[1], elements.shape[2] + 1)
            return elements.new_zeros(shape, dtype=precise)
        return _folded_forward(elements, mask, attention, matrix)

    @staticmethod
    def backward(ctx: Any, sums_grad: Tensor) -> tuple[Tensor | None, ...]:
        elements, mask, augmented = ctx.saved_tensors
        if torch.is_grad_enabled() or is_batched(sums_grad):

            def formula(some: Tensor, matrix: Tensor) -> Tensor:
                return plain_sums(some, mask, ctx.attention, FoldedScores(matrix))

            needs = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
            inputs = (elements, augmented)
            of_elements, of_matrix = differentiate_again(formula, inputs, needs, sums_grad)
            return of_elements, None, None, None, of_matrix
        arguments = (elements, mask, augmented, ctx.attention, sums_grad)
        need = ctx.needs_input_grad[0]
        compiled = native.gradients(*arguments, need_elements=need)
        if compiled is None:
            compiled = gpu.gradients(*arguments, need_elements=need)
        if compiled is not None:
            return compiled[0], None, None, None, compiled[1].to(augmented.dtype)
        batch, length, width = elements.shape
        num_slots = augmented.shape[1]
        matrix, offset = augmented[:-1].contiguous(), augmented[-1].contiguous()
        sums_grad = sums_grad.to(elements.dtype)  # (B, K, d + 1)
        total_grad, mass_grad = sums_grad[..., :-1].contiguous(), sums_grad[..., -1]
        upstream = total_grad.transpose(1, 2).contiguous()  # (B, d, K)
        grads = torch.zeros_like(augmented, dtype=accumulator_dtype(elements.device))
        elements_grad = torch.empty_like(elements) if ctx.needs_input_grad[0] else None
        rows = min(
            tile_rows(width + 2 * num_slots, elements.element_size(), elements.device),
            batch * length,
        )
        ones, room = elements.new_ones(num_slots), elements.new_empty(4, rows, num_slots)
        for sets, part in tiles(batch, length, rows):
            tile = elements[sets, part]
            flat = tile.reshape(-1, width)  # (r, d)
            logits, weights, grad, spare = room[:, : len(flat)]  # each (r, K)
            torch.addmm(offset, flat, matrix, out=logits)
            slope = _weights_and_slope(logits, ctx.attention, weights, ones)
            if tile.shape[0] == 1:  # dL/dW
                torch.addmm(mass_grad[sets.start], flat, upstream[sets.start], out=grad)
            else:
                shaped = grad.view(*tile.shape[:2], num_slots)
                torch.baddbmm(mass_grad[sets].unsqueeze(1), tile, upstream[sets], out=shaped)
            shown = weights
            if mask is not None:
                present = mask[sets, part].reshape(-1, 1)
                grad.mul_(present)
                shown = weights * present
            # dL/dlogits: what all slots have in common drops out, as the weights sum to 1
            common = torch.mv(torch.mul(weights, grad, out=spare), ones).unsqueeze_(-1)
            grad.sub_(common).mul_(slope)
            grads[:-1] += transposed_product(flat, grad)
            grads[-1] += grad.sum(0)
            if elements_grad is not None:
                direct = shown.view(*tile.shape[:2], num_slots) @ total_grad[sets]
                found = direct.view(-1, width).addmm_(grad, matrix.t())
                elements_grad[sets, part] = found.view(tile.shape)
        return elements_grad, None, None, None, grads.to(augmented.dtype)


def _weights_and_slope(logits: Tensor, attention: str, weights: Tensor, ones: Tensor) -> Tensor:
    """Fill `weights`, and return what turns dL/dW - sum_l W_l dL/dW_l into dL/dlogits.

    sigmoid: with S = sigmoid(logits) and r = sum(S + eps), the factor is S (1 - S) / r;
    softmax: it is W itself. The logits are overwritten.
    """
    if attention == "softmax":
        return torch.softmax(logits, -1, out=weights)
    sigmoid = logits.sigmoid_()
    torch.add(sigmoid, EPSILON, out=weights)
    scale = torch.mv(weights, ones).reciprocal_().unsqueeze_(-1)
    weights.mul_(scale)
    return sigmoid.addcmul_(sigmoid, sigmoid, value=-1).mul_(scale)
