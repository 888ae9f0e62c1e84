"""READ FIRST: what a set encoder is, and what it takes to be one that folds.

A set encoding here is a fold: begin with an empty state, absorb the set chunk by chunk in any
order, merge states that were made elsewhere, read the vector out. The answer is the one that the
whole set would have given; that property is Mini-Batch Consistency.

    SetEncoder             forward only: all elements of a set must be there at once
    StreamingSetEncoder    adds initial_state, update, remove, readout; forward composes them
    Composition            features (per element) -> streaming encoder -> head (composition.py)

An encoder that folds is made of three primitives, each a pure function of tensors:

    identity(batch_size, frame)          the statistics of empty sets
    absorb(elements, mask, prepared)     the statistics of one dense chunk, alone
    finish(statistics, count, frame)     the encoding

Everything else is derived here, once: joining, masks, ragged batches, removal, validation,
recognising states, noticing NaN. Shapes, throughout: B sets, n elements, d features, K slots, h
slot size, N rows of a ragged batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setfold.aggregate import STATISTICS, Aggregate
from setfold.chunk import Chunk
from setfold.errors import InputError, NonFiniteError, StateMismatchError
from setfold.fingerprint import Fingerprint, fingerprint_of
from setfold.kernels.ragged import group_by_length
from setfold.state import SetState, Statistics

FEATURE_ROWS = 1 << 16  # elements that go through a feature network at once when no graph is kept


class SetEncoder(nn.Module, ABC):
    """Maps sets (B, n, d) to encodings (B, ...), the same for every order of the elements."""

    @abstractmethod
    def forward(self, elements: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode whole sets: elements (B, n, d), mask (B, n) True where present."""


class StreamingSetEncoder(SetEncoder):
    """A set encoder that folds: its result does not depend on how a set is cut up.

    Attributes:
        dim_in: width d of the elements; None where a feature network decides.
        aggregates: what is read from the state.
        slot_dims: the slot size h of each level; empty without slots.
        slot_axis: the axis of the encoding along which slots lie, None if they are mixed.
        slots_cancel: whether attention vanishes when the slots are added up.
    """

    dim_in: int | None
    aggregates: tuple[Aggregate, ...]
    slot_dims: tuple[int, ...] = ()
    slot_axis: int | None = None
    slots_cancel: bool = False

    # ---- the three primitives, and what comes with slots -------------------------------------

    @abstractmethod
    def identity(self, batch_size: int, frame: tuple[Tensor, ...]) -> Statistics:
        """The statistics of `batch_size` sets without elements."""

    @abstractmethod
    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        """The statistics of a dense chunk (B, n, d) alone; masked rows are finite."""

    @abstractmethod
    def finish(self, statistics: Statistics, count: Tensor, frame: tuple[Tensor, ...]) -> Tensor:
        """The encoding, from statistics, counts (B,) and frame; zeros for empty sets."""

    def draw_frame(
        self, num_slots: int | None, generator: torch.Generator | None
    ) -> tuple[Tensor, ...]:
        """Draw what a state fixes at its beginning; each (1, K, h). Nothing, without slots."""
        if num_slots is not None or generator is not None:
            raise InputError(f"{type(self).__name__} has no slots: leave num_slots and generator out.")
        return ()

    def prepare(self, frame: tuple[Tensor, ...]) -> Any:
        """What `absorb` needs of the frame and the weights, derived once for many chunks."""
        return None

    def featurize(self, elements: Tensor, context: Tensor | None) -> Tensor:
        """What is done to each element on its own, before `absorb`. Nothing, by default."""
        return elements

    def probe(self, elements: Tensor, statistics: Statistics) -> Tensor:
        """A number that is not finite if some element, or what was made of it, is not; cheap."""
        total = elements.sum()
        for name, parts in statistics.items():
            for part in parts:  # infinity is what an empty maximum holds, so look for NaN only
                suspect = part if name == "sum" else torch.where(part.isnan(), part, 0)
                total = total + suspect.sum()
        return total

    def shaping_modules(self) -> tuple[nn.Module, ...]:
        """The modules whose weights shape the state; what only reads it out is not among them."""
        return (self,)

    # ---- the four verbs ----------------------------------------------------------------------

    def initial_state(
        self,
        batch_size: int = 1,
        *,
        num_slots: int | None = None,
        generator: torch.Generator | None = None,
        slots: Tensor | Sequence[Tensor] | None = None,
        context: Tensor | None = None,
    ) -> SetState:
        """The state of empty sets; draws the slots.

        In training random slots are drawn anew by each call; in evaluation they come from a seed
        that is kept with the model, so that states made anywhere merge.

        Args:
            batch_size: the number B of sets.
            num_slots: another K than the encoder was made with (random slots only).
            generator: draws the slots reproducibly, in training and in evaluation.
            slots: the slots themselves, (K, h) or (B, K, h); one such tensor per level.
            context: (B, ...), the readout of an earlier pass, for features that take one.
        """
        if batch_size < 0:
            raise InputError(f"batch_size must be 0 or more; got {batch_size}.")
        if slots is None:
            frame = self.draw_frame(num_slots, generator)
        else:
            if num_slots is not None or generator is not None:
                raise InputError("give slots, or num_slots and generator to draw them, not both.")
            given = (slots,) if isinstance(slots, Tensor) else tuple(slots)
            frame = self._checked_frame(given, batch_size)
        if context is not None and context.shape[:1] != (batch_size,):
            raise InputError(
                f"context must be ({batch_size}, ...), one per set; got {tuple(context.shape)}."
            )
        statistics = self.identity(batch_size, frame)
        some = next(iter(statistics.values()))[0]
        return SetState(
            statistics,
            torch.zeros(batch_size, dtype=torch.long, device=some.device),
            frame=frame,
            context=context,
            aggregate=tuple(a.name for a in self.aggregates),
            fingerprint=self._fingerprint(),
        )

    def update(
        self,
        state: SetState,
        elements: Tensor,
        *,
        mask: Tensor | None = None,
        index: Tensor | None = None,
    ) -> SetState:
        """The state after one more chunk; `state` itself stays as it was.

        Args:
            state: from this encoder's `initial_state`, or merged or loaded from such.
            elements: (B, n, d), or ragged (N, d) with an index.
            mask: (B, n), True where an element is present.
            index: (N,), the set of each row, in any order.

        Raises:
            InputError: shapes, dtypes, devices or the index do not fit.
            NonFiniteError: NaN or infinity among the elements that are present.
            StateMismatchError: the state is of another model.
        """
        state = self._recognised(state)
        added, count = self._summarize(state, elements, mask, index)
        joined = {
            name: STATISTICS[name].join(parts, added[name]) for name, parts in state.statistics.items()
        }
        return state.with_statistics(joined, state.count + count)

    def remove(
        self,
        state: SetState,
        elements: Tensor,
        *,
        mask: Tensor | None = None,
        index: Tensor | None = None,
    ) -> SetState:
        """The state without elements that it has seen: sliding windows, deletions.

        Sums and means can forget; a maximum or minimum cannot. A set from which everything has
        been removed is exactly empty. Arguments as for `update`.
        """
        state = self._recognised(state)
        removed, removed_count = self._summarize(state, elements, mask, index)
        count = state.count - removed_count
        if bool((count < 0).any()):
            raise InputError(
                "cannot remove more elements than a set holds: set "
                f"{int((count < 0).nonzero()[0])} would be left with {int(count.min())}."
            )
        left = {}
        for name, parts in state.statistics.items():
            parts = STATISTICS[name].remove(parts, removed[name])
            emptied = [(count == 0).reshape(-1, *(1,) * (p.dim() - 1)) for p in parts]
            left[name] = tuple(p.masked_fill(e, 0) for p, e in zip(parts, emptied, strict=True))
        return state.with_statistics(left, count)

    def readout(self, state: SetState) -> Tensor:
        """The encoding (B, ...) of what the state has seen; as often as you like."""
        state = self._recognised(state)
        return self.finish(state.statistics, state.count, state.frame)

    def forward(
        self,
        elements: Tensor,
        mask: Tensor | None = None,
        *,
        index: Tensor | None = None,
        batch_size: int | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """Encode whole sets: initial_state, update and readout in one.

        Args:
            elements: (B, n, d), or ragged (N, d) with an index.
            mask: (B, n), True where an element is present.
            index: (N,), the set of each row; needs batch_size.
            batch_size: the number of sets of a ragged batch.
            context: (B, ...), the readout of an earlier pass.
        """
        if index is None and batch_size is None:
            batch_size = elements.shape[0]
        if batch_size is None:
            raise InputError("a ragged batch needs batch_size, the number of sets, beside its index.")
        state = self.initial_state(batch_size, context=context)
        return self.readout(self.update(state, elements, mask=mask, index=index))

    # ---- derived -----------------------------------------------------------------------------

    def _summarize(
        self, state: SetState, elements: Tensor, mask: Tensor | None, index: Tensor | None
    ) -> tuple[Statistics, Tensor | int]:
        """The statistics of one chunk alone, and its number of elements by set."""
        chunk = Chunk.checked(elements, mask, index, sets=len(state), width=self.dim_in)
        self._refuse_foreign_tensors(state, chunk.elements)
        if any(slots.shape[0] > 1 for slots in state.frame):
            return self._summarize_set_by_set(state, chunk)
        if chunk.elements.numel() == 0:
            return self.identity(len(state), state.frame), 0
        prepared = self._prepared(state)
        if chunk.index is not None:
            added = self._absorb_ragged(state, chunk, prepared)
        else:
            added = self._absorb_dense(chunk.elements, chunk.mask, state.context, prepared)
        if not torch.compiler.is_compiling():
            self._refuse_non_finite(chunk.elements, added)
        return added, chunk.count()

    def _absorb_dense(
        self, elements: Tensor, mask: Tensor | None, context: Tensor | None, prepared: Any
    ) -> Statistics:
        """Featurize and absorb; without a graph, a few rows at a time, so that memory stays flat."""
        step = max(1, FEATURE_ROWS // max(1, elements.shape[0]))
        featureless = type(self).featurize is StreamingSetEncoder.featurize
        if featureless or torch.is_grad_enabled() or elements.shape[1] <= step:
            return self.absorb(self.featurize(elements, context), mask, prepared)
        total: Statistics = {}
        masks = [None] * -(-elements.shape[1] // step) if mask is None else mask.split(step, 1)
        for piece, piece_mask in zip(elements.split(step, 1), masks, strict=True):
            added = self.absorb(self.featurize(piece, context), piece_mask, prepared)
            total = {n: STATISTICS[n].join(total[n], p) for n, p in added.items()} if total else added
        return total

    def _absorb_ragged(self, state: SetState, chunk: Chunk, prepared: Any) -> Statistics:
        """Absorb sets of one length at a time, as dense batches, and lay the results out by set."""
        assert chunk.index is not None
        rows, context = chunk.elements, state.context
        if context is None:
            rows = self.featurize(rows.unsqueeze(0), None).squeeze(0)
        sets, found = [], []
        for group in group_by_length(chunk.index, len(state)):
            elements = rows[group.rows]  # (b, length, d)
            if context is not None:
                elements = self.featurize(elements, context[group.sets])
            sets.append(group.sets)
            found.append(self.absorb(elements, group.mask, prepared))
        empty = self.identity(len(state), state.frame)
        if not found:
            return empty
        where = torch.cat(sets)
        return {
            name: tuple(
                whole.index_copy(0, where, torch.cat([f[name][i] for f in found]).to(whole.dtype))
                for i, whole in enumerate(parts)
            )
            for name, parts in empty.items()
        }

    def _summarize_set_by_set(
        self, state: SetState, chunk: Chunk
    ) -> tuple[Statistics, Tensor | int]:
        """Where each set has slots of its own, as a stack of training states may."""
        found, counts = [], []
        for number in range(len(state)):
            elements, mask = chunk.one_set(number)
            added, count = self._summarize(state[number], elements, mask, None)
            found.append(added)
            counts.append(torch.as_tensor(count, device=state.device).reshape(1))
        statistics = {
            name: tuple(torch.cat([f[name][i] for f in found]) for i in range(len(parts)))
            for name, parts in state.statistics.items()
        }
        return statistics, torch.cat(counts)

    def _prepared(self, state: SetState) -> Any:
        """What `absorb` needs; without a graph derived once and kept with the state."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.prepare(state.frame)
        if state.prepared is None:
            state.prepared = self.prepare(state.frame)
        return state.prepared

    def _checked_frame(self, given: tuple[Tensor, ...], batch_size: int) -> tuple[Tensor, ...]:
        if len(given) != len(self.slot_dims):
            raise InputError(f"expected slots for {len(self.slot_dims)} levels; got {len(given)}.")
        checked = []
        for slots, dim in zip(given, self.slot_dims, strict=True):
            slots = slots.unsqueeze(0) if slots.dim() == 2 else slots
            fits = slots.dim() == 3 and slots.shape[0] in (1, batch_size)
            if not fits or slots.shape[2] != dim:
                raise InputError(
                    f"slots must be (K, {dim}) or ({batch_size}, K, {dim}); got {tuple(slots.shape)}."
                )
            checked.append(slots)
        return tuple(checked)

    def _fingerprint(self) -> Fingerprint:
        if torch.compiler.is_compiling():  # a traced state never leaves its graph
            return Fingerprint.from_digest("")
        return fingerprint_of(self, self.shaping_modules())

    def _recognised(self, state: SetState) -> SetState:
        """The state, if this encoder's weights as they are now have shaped it."""
        if torch.compiler.is_compiling() or state.fingerprint.belongs_to(self):
            return state
        mine = self._fingerprint()
        wanted = tuple(a.name for a in self.aggregates)
        if state.aggregate != wanted or not state.fingerprint.matches(mine):
            raise StateMismatchError(
                f"this state was not made by this {type(self).__name__} as it is now: its aggregate "
                f"({'+'.join(state.aggregate)}) or its weights differ. States do not survive a "
                "change of weights; fold the set anew with encoder.initial_state()."
            )
        return state.with_statistics(state.statistics, state.count, mine)

    def _refuse_foreign_tensors(self, state: SetState, elements: Tensor) -> None:
        if elements.device != state.device:
            raise InputError(
                f"elements are on {elements.device}, the state on {state.device}: move one with .to(...)."
            )
        wanted = self.element_dtype()
        if wanted is not None and elements.dtype != wanted:
            raise InputError(
                f"elements are {elements.dtype}, the encoder's weights {wanted}: cast the elements "
                f"with .to({wanted}), or the encoder."
            )
        if not elements.is_floating_point():
            raise InputError(f"elements must be floating point; got {elements.dtype}.")

    def element_dtype(self) -> torch.dtype | None:
        """The dtype that elements must have; None for any floating point."""
        return None

    def _refuse_non_finite(self, elements: Tensor, statistics: Statistics) -> None:
        """Raise on NaN or infinity, judged by a small number; only then look at the elements."""
        if elements.device.type == "meta":
            return
        with torch.no_grad():
            if math.isfinite(self.probe(elements, statistics).item()):
                return
        wrong = ~torch.isfinite(elements)
        if bool(wrong.any()):
            place = tuple(wrong.nonzero()[0].tolist())
            raise NonFiniteError(
                f"elements must be finite; elements{list(place)} is {float(elements[place])} "
                f"({int(wrong.sum())} such numbers in the chunk). Clean the chunk or mask those "
                "elements out; the state is as it was."
            )
        for name, parts in statistics.items():
            broken = any(bool((~p.isfinite() if name == "sum" else p.isnan()).any()) for p in parts)
            if broken:
                raise NonFiniteError(
                    f"the elements are finite, but their {name} is not: they are too large, or the feature "
                    "network makes NaN or infinity of them. The state is as it was."
                )
