"""A hierarchy of Slot Set Encoders, of which only the first sees the stream."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from setfold.core.absorb import Arrivals, Groups
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.readout import Count
from setfold.core.state import SetState
from setfold.core.statistic import Statistics
from setfold.encoders.slot_set import Prepared, SlotSetEncoder
from setfold.errors import CancelledAttentionWarning, InputError


class HierarchicalSlotSetEncoder(StreamingSetEncoder):
    """SSE_T(... SSE_2(SSE_1(X))): the slots of each level are the set that the next one encodes.

    States belong to the first level, and so does everything that streams, merges and removes; the
    other levels run when the state is read. Running the whole stack on every chunk and merging
    afterwards would give another answer for every partition.

    Args:
        levels: Slot Set Encoders, each with dim_in equal to the dim_readout before it.
        activation: a module between the levels; None for a ReLU. nn.Identity() leaves nothing
            between them, exactly as the paper prints it; levels that sum or average and end in a
            single slot then collapse into one linear map of the elements' sum.

    >>> first = SlotSetEncoder(dim_in=3, num_slots=8, dim_slot=16, dim_out=16)
    >>> second = SlotSetEncoder(dim_in=16, num_slots=2, dim_slot=16, dim_out=32)
    >>> encoder = HierarchicalSlotSetEncoder([first, second])
    >>> encoder(torch.randn(5, 100, 3)).shape
    torch.Size([5, 2, 32])
    """

    slot_axis = 1
    defers = True

    def __init__(
        self, levels: Sequence[SlotSetEncoder], activation: nn.Module | None = None
    ) -> None:
        super().__init__()
        listed = isinstance(levels, Sequence | nn.ModuleList)
        if not listed or not all(isinstance(level, SlotSetEncoder) for level in levels):
            raise InputError("levels must be a list of Slot Set Encoders.")
        if not levels:
            raise InputError("a hierarchy needs at least one level; got none.")
        for number, (lower, upper) in enumerate(pairwise(levels), start=2):
            if upper.dim_in != lower.dim_readout:
                raise InputError(
                    f"level {number} must have dim_in={lower.dim_readout}, the width of what level "
                    f"{number - 1} reads; got {upper.dim_in}."
                )
        self.levels = nn.ModuleList(levels)
        self.activation = nn.ReLU() if activation is None else activation
        self.dim_in = levels[0].dim_in
        self.dim_readout = levels[-1].dim_readout
        self.aggregates = levels[0].aggregates
        self.slot_dims = tuple(level.dim_slot for level in levels)
        self.slots_cancel = levels[-1].slots_cancel
        self.sums_show_all = levels[0].sums_show_all
        self.own_slots_at_once = levels[0].own_slots_at_once
        if self._collapses():
            warnings.warn(
                "this hierarchy collapses: with nothing between them, levels that sum or average and end "
                "in one slot are one linear map of the elements' sum, and no attention has any "
                "effect. Leave the activation in, or keep several slots at the end.",
                CancelledAttentionWarning,
                stacklevel=2,
            )

    @property
    def _encoders(self) -> list[SlotSetEncoder]:
        return cast("list[SlotSetEncoder]", list(self.levels))

    def _collapses(self) -> bool:
        linear = all(level.slots_cancel for level in self._encoders)
        bare = isinstance(self.activation, nn.Identity) and len(self._encoders) > 1
        return bare and linear and self._encoders[-1].num_slots == 1

    def draw_frame(
        self, num_slots: int | None, generator: torch.Generator | None
    ) -> tuple[Tensor, ...]:
        """The slots of every level; `num_slots` speaks of the first."""
        first, *others = self._encoders
        frame = first.draw_frame(num_slots, generator)
        for level in others:  # learned slots are not drawn, so they take no generator
            frame += level.draw_frame(None, generator if level.slots == "random" else None)
        return frame

    def prepare(self, frame: tuple[Tensor, ...]) -> Prepared:
        return self._encoders[0].prepare(frame[:1])

    def identity(self, batch_size: int, frame: tuple[Tensor, ...]) -> Statistics:
        return self._encoders[0].identity(batch_size, frame[:1])

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        return self._encoders[0].absorb(elements, mask, prepared)

    def absorb_groups(self, elements: Tensor, groups: Groups, prepared: Any) -> Arrivals | None:
        return self._encoders[0].absorb_groups(elements, groups, prepared)

    def finish(self, statistics: Statistics, count: Count, frame: tuple[Tensor, ...]) -> Tensor:
        encoding = self._encoders[0].finish(statistics, count, frame[:1])
        for level, slots in zip(self._encoders[1:], frame[1:], strict=True):
            encoding = level.encode(self.activation(encoding), slots)
        if isinstance(count, Tensor):  # an empty set reads as zeros here too
            encoding = torch.where((count > 0)[:, None, None], encoding, 0)
        return encoding

    def weigh(self, elements: Tensor, state: SetState) -> Tensor:
        return self._encoders[0].weigh(elements, state)

    def shaping_modules(self) -> tuple[nn.Module, ...]:
        return (self._encoders[0],)
