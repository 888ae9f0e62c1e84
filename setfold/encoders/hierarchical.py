"""A hierarchy of Slot Set Encoders. Only the first level streams."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from setfold.core.absorb import (
    Arrivals,
    absorb_for_gradients,
    absorb_ragged,
    check_encoding,
)
from setfold.core.arguments import check_flags, check_modules
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.readout import Count
from setfold.core.state import SetState
from setfold.core.statistic import Fields, Statistics
from setfold.core.weights import caller_for
from setfold.encoders.layers import NormalizedReLU
from setfold.encoders.slot_set import Prepared, SlotSetEncoder
from setfold.errors import CancelledAttentionWarning, InputError
from setfold.kernels.modes import widened

FIRST_FACTOR = 0.1  # not 0, so that the gradients of the upper levels are not 0, either


class Levels(NamedTuple):
    """What the first level prepared, and the slots of the other levels."""

    first: Prepared
    slots: tuple[Tensor, ...]


class HierarchicalSlotSetEncoder(StreamingSetEncoder):
    """SSE_T(... SSE_2(SSE_1(X))): each level encodes the slots of the level before it.

    Only the first level streams, merges and removes elements. The other levels run at readout.
    Running all levels on every chunk and merging the results would give an encoding that depends on
    the partition. The encoding is (B, K, dim_readout) of the last level.

    Args:
        levels: Slot Set Encoders. The dim_in of each must equal the dim_readout of the one before.
        activation: a module between the levels; None for ReLU and layer normalization. Without the
            normalization, the differences between sets shrink from level to level, and so do the
            gradients. The paper uses none, which is nn.Identity(). Levels that sum or average and
            end in one slot then collapse into a linear map of the sum of the elements.
        residual: whether each level adds to the slots of the level before it, instead of replacing
            them: Z_t = Z_t-1 + g_t SSE_t(activation(Z_t-1)), with learned factors g_t that begin at
            0.1. All levels then need the same num_slots and dim_readout. Without it, as in the
            paper, the slots of a set become alike from level to level.

    >>> first = SlotSetEncoder(dim_in=3, num_slots=8, dim_slot=16, dim_out=16)
    >>> second = SlotSetEncoder(dim_in=16, num_slots=2, dim_slot=16, dim_out=32)
    >>> encoder = HierarchicalSlotSetEncoder([first, second])
    >>> encoder(torch.randn(5, 100, 3)).shape
    torch.Size([5, 2, 32])
    """

    slot_axis: int | None = 1

    def __init__(
        self,
        levels: Sequence[SlotSetEncoder],
        activation: nn.Module | None = None,
        residual: bool = False,
    ) -> None:
        super().__init__()
        listed = isinstance(levels, Sequence | nn.ModuleList)
        if not listed or not all(isinstance(level, SlotSetEncoder) for level in levels):
            raise InputError(f"levels must be a list of Slot Set Encoders; got {levels!r}.")
        if not levels:
            raise InputError("levels must contain at least one level; got an empty list.")
        for number, (lower, upper) in enumerate(pairwise(levels), start=2):
            if upper.dim_in != lower.dim_readout:
                raise InputError(
                    f"level {number} must have dim_in={lower.dim_readout}, the dim_readout of "
                    f"level {number - 1}; got {upper.dim_in}."
                )
        check_modules(activation=activation)
        check_flags(residual=residual)
        shapes = [(level.num_slots, level.dim_readout) for level in levels]
        if residual and len({*shapes}) > 1:
            raise InputError(
                "with residual=True all levels need the same num_slots and dim_readout; got "
                f"{', '.join(map(str, shapes))}."
            )
        self.levels = nn.ModuleList(levels)
        self.residual = residual
        self.activation = NormalizedReLU() if activation is None else activation
        self.dim_in = levels[0].dim_in
        self.dim_readout = levels[-1].dim_readout
        if residual:
            factor = torch.full((self.dim_readout,), FIRST_FACTOR)
            self.factors = nn.ParameterList(factor.clone() for _ in levels[1:])
            self.slot_axis = None  # slot j of each level belongs to slot j of the others
        self.slot_dims = tuple(level.dim_slot for level in levels)
        self.slots_cancel = levels[-1].slots_cancel
        self.batched_slots = levels[0].batched_slots
        if self._collapses():
            warnings.warn(
                "this hierarchy collapses: without an activation, levels that sum or average and "
                "end in one slot are a linear map of the sum of the elements, so attention has no "
                "effect. Use an activation, or several slots in the last level.",
                CancelledAttentionWarning,
                stacklevel=2,
            )

    @property
    def _encoders(self) -> list[SlotSetEncoder]:
        return cast("list[SlotSetEncoder]", list(self.levels))

    def _collapses(self) -> bool:
        linear = all(level.slots_cancel for level in self._encoders)
        no_activation = isinstance(self.activation, nn.Identity) and len(self._encoders) > 1
        return no_activation and linear and self._encoders[-1].num_slots == 1

    def draw_frame(
        self, num_slots: int | None, generator: torch.Generator | None
    ) -> tuple[Tensor, ...]:
        """The slots of every level; `num_slots` is for the first, and for all if they add up."""
        first, *others = self._encoders
        frame = first.draw_frame(num_slots, generator)
        for level in others:
            count = num_slots if self.residual else None
            frame += level.draw_frame(count, generator if level.draws_slots else None)
        return frame

    @property
    def draws_slots(self) -> bool:
        return any(level.draws_slots for level in self._encoders)

    def fields(self, frame: tuple[Tensor, ...]) -> Fields:
        return self._encoders[0].fields(frame[:1])

    def prepare(self, frame: tuple[Tensor, ...]) -> Levels:
        counts = [slots.shape[1] for slots in frame]
        if self.residual and len({*counts}) > 1:
            raise InputError(
                f"with residual=True all levels need the same number of slots; got {counts}."
            )
        return Levels(self._encoders[0].prepare(frame[:1]), frame[1:])

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Levels) -> Statistics:
        return self._encoders[0].absorb(elements, mask, prepared.first)

    def absorb_for_gradients(
        self, elements: Tensor, mask: Tensor | None, prepared: Levels
    ) -> Statistics:
        return absorb_for_gradients(self._encoders[0], elements, mask, prepared.first)

    def absorb_ragged(
        self, elements: Tensor, index: Tensor, batch_size: int, prepared: Levels
    ) -> Arrivals | None:
        return absorb_ragged(self._encoders[0], elements, index, batch_size, prepared.first)

    def finish(self, statistics: Statistics, count: Count, prepared: Levels) -> Tensor:
        first, *others = self._encoders
        encoding = first.read(statistics, count, prepared.first)
        call = caller_for(first.first_weight.dtype)
        for number, (level, slots) in enumerate(zip(others, prepared.slots, strict=True)):
            check_encoding(encoding)
            found = level.encode(call(self.activation, encoding), slots)
            encoding = encoding + widened(self.factors[number]) * found if self.residual else found
        if others:
            check_encoding(encoding)
        if isinstance(count, Tensor):  # an empty set is encoded as zeros
            encoding = torch.where((count > 0)[:, None, None], encoding, 0)
        return encoding.to(first.first_weight.dtype)

    def weigh(self, elements: Tensor, state: SetState, prepared: Levels) -> Tensor:
        return self._encoders[0].weigh(elements, state, prepared.first)

    def shaping_modules(self) -> tuple[nn.Module, ...]:
        return (self._encoders[0],)
