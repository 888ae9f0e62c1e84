"""Slot Attention (Locatello et al., NeurIPS 2020)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from setfold.core.absorb import Arrivals, absorb_for_gradients, absorb_ragged
from setfold.core.arguments import check_sizes
from setfold.core.composition import Composition, apply_features
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.passes import MultiPassSetEncoder
from setfold.core.readout import Count
from setfold.core.state import SetState
from setfold.core.statistic import Statistics
from setfold.core.weights import caller_for
from setfold.encoders.layers import GRUCell, LayerNorm
from setfold.encoders.slot_set import Prepared, SlotSetEncoder


class SlotAttention(MultiPassSetEncoder):
    """Slots that compete for the elements, refined in several iterations over the whole set.

    With slots S, q = to_query(norm(S)), k_i = to_key(norm(x_i)), v_i = to_value(norm(x_i)):

        W_ij = softmax_j(k_i . q_j / sqrt(d)) + 1e-8     update_j = sum_i W_ij v_i / sum_i W_ij
        S    = GRU(update, S)                            S = S + mlp(norm(S))

    An iteration is a Slot Set Encoder with softmax over slots and weighted means. So each iteration
    is a fold, and T iterations fold exactly in T passes. One pass is not enough: the slots of the
    second iteration depend on all elements. The encoding is (B, num_slots, dim).

    Args:
        dim_in: width d of the elements.
        num_slots: number K of slots. It can be changed at any time, because all slots are drawn
            from the same learned mean and deviation.
        dim: size of a slot.
        num_iterations: number T of iterations, which is also `passes`.
        dim_hidden: width of the hidden layer of the mlp.

    >>> import torch
    >>> encoder = SlotAttention(dim_in=3, num_slots=4, dim=16).eval()
    >>> encoder(torch.randn(2, 100, 3)).shape
    torch.Size([2, 4, 16])
    >>> encoder.num_slots = 7
    >>> encoder(torch.randn(2, 100, 3)).shape
    torch.Size([2, 7, 16])
    """

    obstacle = "iterations: the slots of each iteration depend on all elements"
    epsilon = 1e-8

    def __init__(
        self,
        dim_in: int,
        num_slots: int,
        dim: int,
        num_iterations: int = 3,
        dim_hidden: int = 128,
    ) -> None:
        super().__init__()
        check_sizes(dim_in=dim_in, num_slots=num_slots, dim=dim)
        check_sizes(num_iterations=num_iterations, dim_hidden=dim_hidden)
        self.dim_in = dim_in
        self.dim = dim
        self.num_iterations = self.passes = num_iterations
        self.dim_hidden = dim_hidden
        self.norm_input = LayerNorm(dim_in)
        self.attention = SlotSetEncoder(
            dim_in, num_slots, dim, dim, aggregate=["mean", "mass"], attention="softmax"
        )
        self.gru = GRUCell(dim, dim)
        self.norm_hidden = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim_hidden), nn.ReLU(), nn.Linear(dim_hidden, dim))

    @property
    def num_slots(self) -> int:
        """The number K of slots."""
        return self.attention.num_slots

    @num_slots.setter
    def num_slots(self, number: int) -> None:
        self.attention.resize(number)

    def draw_slots(self) -> Tensor:
        """Draw the slots (1, K, h) of the first iteration; in evaluation mode always the same."""
        return self.attention.draw_frame(None, None)[0]

    def encode(self, elements: Tensor, mask: Tensor | None) -> Tensor:
        elements = apply_features(self.norm_input, elements, mask)
        slots = self.draw_slots().expand(elements.shape[0], -1, -1)
        for _ in range(self.num_iterations):
            slots = self.refine(slots, self.attention.encode(elements, slots, mask))
        return slots

    def begin(
        self, found: tuple[Tensor, ...], batch_size: int
    ) -> tuple[StreamingSetEncoder, SetState]:
        stage = _Iteration(self)
        slots = found[-1] if found else self.draw_slots()
        return stage, stage.initial_state(batch_size, slots=slots)

    def refine(self, slots: Tensor, readings: Tensor) -> Tensor:
        """The slots (B, K, h) after one iteration.

        Epsilon is added to every weight. The weights of an element sum to 1 over the slots, so the
        term that epsilon multiplies is the sum of the mean contributions over the slots.

        Args:
            slots: (B, K, h), before the iteration.
            readings: (B, K, h + 1), the mean contribution and the mass of each slot, in float32 or
                wider.
        """
        mean, mass = readings[..., :-1], readings[..., -1:]
        update = (mean + self.epsilon * mean.sum(1, keepdim=True)) / (mass + self.epsilon)
        call = caller_for(slots.dtype)
        refined = call(self.gru, update.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return (refined + call(self.mlp, call(self.norm_hidden, refined))).to(slots.dtype)


class _Slots(NamedTuple):
    """What the Slot Set Encoder prepared, and the slots (1, K, h) or (B, K, h)."""

    encoder: Prepared
    slots: Tensor


class _Iteration(Composition):
    """One iteration as a fold. Its readout (B, K, h) is the slots of the next iteration."""

    def __init__(self, owner: SlotAttention) -> None:
        super().__init__(owner.attention, features=owner.norm_input)
        self.owner = owner
        self.dim_in = owner.dim_in

    def prepare(self, frame: tuple[Tensor, ...]) -> _Slots:
        return _Slots(self.encoder.prepare(frame), frame[0])

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: _Slots) -> Statistics:
        return self.encoder.absorb(elements, mask, prepared.encoder)

    def absorb_for_gradients(
        self, elements: Tensor, mask: Tensor | None, prepared: _Slots
    ) -> Statistics:
        return absorb_for_gradients(self.encoder, elements, mask, prepared.encoder)

    def absorb_ragged(
        self, elements: Tensor, index: Tensor, batch_size: int, prepared: _Slots
    ) -> Arrivals | None:
        return absorb_ragged(self.encoder, elements, index, batch_size, prepared.encoder)

    def finish(self, statistics: Statistics, count: Count, prepared: _Slots) -> Tensor:
        readings = self.owner.attention.read(statistics, count, prepared.encoder)
        return self.owner.refine(prepared.slots.expand(readings.shape[0], -1, -1), readings)

    def shaping_modules(self) -> tuple[nn.Module, ...]:
        return (self.owner.norm_input, self.owner.attention)
