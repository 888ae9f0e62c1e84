"""READ FIRST: what a set encoder is, and what it takes to be one that folds.

A set encoding here is a fold: begin with an empty state, absorb the set chunk by chunk in any
order, merge states that were made elsewhere, read the vector out. The answer is the one that the
whole set would have given; that property is Mini-Batch Consistency.

    SetEncoder             forward only
      StreamingSetEncoder  adds initial_state, update, remove, readout; forward composes them
        Composition        features (per element) -> streaming encoder -> head (composition.py)
      WholeSetEncoder      all elements of a set must be there at once (whole.py)
        MultiPassSetEncoder  unless they can be read again: several folds in a row (passes.py)

An encoder that folds is made of three primitives, each a pure function of tensors:

    identity(batch_size, frame)          the statistics of empty sets
    absorb(elements, mask, prepared)     the statistics of one dense chunk, alone
    finish(statistics, count, frame)     the encoding

Everything else is derived here, once: joining, masks, ragged batches, removal, validation,
recognising states, noticing NaN. Shapes, throughout: B sets, n elements, d features, K slots, h
slot size, N rows of a ragged batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from setfold.core.absorb import Arrivals, Groups, absorb_dense, combine_with, copied, emptied
from setfold.core.chunk import Chunk
from setfold.core.frame import checked_context, checked_slots
from setfold.core.readout import Aggregate, Count
from setfold.core.state import SetState
from setfold.core.statistic import Statistics, join, remove
from setfold.core.weights import Fingerprint, fingerprint_of, first_tensor
from setfold.errors import InputError, StateMismatchError

SMALL_CHUNK = 1 << 13  # numbers in a chunk that is put aside rather than absorbed at once
PENDING_BYTES = 1 << 19  # what a state may have put aside before it absorbs it all together
PENDING_CHUNKS = 256
ORDINARY = 1e6  # larger numbers might overflow on the way, so they are never put aside


class SetEncoder(nn.Module, ABC):
    """Maps sets (B, n, d) to encodings (B, ...), the same for every order of the elements.

    Attributes:
        dim_in: width d of the elements; None where a feature network decides.
        passes: how often the chunks of a set must be read to fold it; None if it cannot be folded.
    """

    dim_in: int | None
    passes: int | None = None

    @abstractmethod
    def forward(self, elements: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode whole sets: elements (B, n, d), mask (B, n) True where present."""


class StreamingSetEncoder(SetEncoder):
    """A set encoder that folds: its result does not depend on how a set is cut up.

    Attributes:
        aggregates: what is read from the state.
        slot_dims: the slot size h of each level; empty without slots.
        slot_axis: the axis of the encoding along which slots lie, None if they are mixed.
        slots_cancel: whether attention vanishes when the slots are added up.
        sums_show_all: whether NaN or infinity in any element shows in the statistics.
        own_slots_at_once: whether `prepare` and `absorb` take a frame (B, K, h) of each set's own.
        defers: whether small chunks may wait: `absorb` must then depend on what `prepare` gives, of
            which the state keeps a copy, and on no weight that could change meanwhile.
    """

    passes = 1
    aggregates: tuple[Aggregate, ...]
    slot_dims: tuple[int, ...] = ()
    slot_axis: int | None = None
    slots_cancel: bool = False
    sums_show_all: bool = False
    defers: bool = False
    own_slots_at_once: bool = False

    # ---- the three primitives, and what comes with slots -------------------------------------

    @abstractmethod
    def identity(self, batch_size: int, frame: tuple[Tensor, ...]) -> Statistics:
        """The statistics of `batch_size` sets without elements."""

    @abstractmethod
    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        """The statistics of a dense chunk (B, n, d) alone; masked rows are finite."""

    @abstractmethod
    def finish(self, statistics: Statistics, count: Count, frame: tuple[Tensor, ...]) -> Tensor:
        """The encoding, from statistics, frame and counts (B,), or one positive count for all sets;
        zeros for an empty set.
        """

    def absorb_groups(self, elements: Tensor, groups: Groups, prepared: Any) -> Arrivals | None:
        """What rows (N, d) add to which sets, part by part, on the CPU without a graph; None where
        nothing is faster than to `absorb` the sets of each length as a dense chunk.
        """
        return None

    def draw_frame(
        self, num_slots: int | None, generator: torch.Generator | None
    ) -> tuple[Tensor, ...]:
        """Draw what a state fixes at its beginning; each (1, K, h). Nothing, without slots."""
        if num_slots is not None or generator is not None:
            raise InputError(
                f"{type(self).__name__} has no slots: leave num_slots and generator out."
            )
        return ()

    def prepare(self, frame: tuple[Tensor, ...]) -> Any:
        """What `absorb` needs of frame and weights, derived once for many chunks; tensors in tuples."""
        return None

    def featurize(
        self, elements: Tensor, mask: Tensor | None, context: tuple[Tensor, ...]
    ) -> Tensor:
        """What is done to each element on its own, before `absorb`. Nothing, by default."""
        return elements

    def weigh(self, elements: Tensor, state: SetState) -> Tensor:
        """The weights (B, n, K) of featurized elements; for encoders that have any."""
        raise InputError(f"{type(self).__name__} does not weigh its elements.")

    @property
    def has_features(self) -> bool:
        """Whether `featurize` does anything."""
        return type(self).featurize is not StreamingSetEncoder.featurize

    @property
    def device(self) -> torch.device:
        """The device of the weights, where elements and states must be."""
        like = first_tensor(self.shaping_modules())
        return torch.device("cpu") if like is None else like.device

    @property
    def state_nbytes(self) -> int:
        """Bytes that the state of one set takes; slots, which all sets share, do not count."""
        empty = self.identity(1, self.draw_frame(None, None))
        return 8 + sum(part.nbytes for parts in empty.values() for part in parts)

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
        context: Tensor | Sequence[Tensor] | None = None,
    ) -> SetState:
        """The state of empty sets; draws the slots.

        In training random slots are drawn anew by each call; in evaluation they come from a seed
        that is kept with the model, so that states made anywhere merge.

        Args:
            batch_size: the number B of sets.
            num_slots: another K than the encoder was made with (random slots only).
            generator: draws the slots reproducibly, in training and in evaluation.
            slots: the slots themselves, (K, h) or (B, K, h); one such tensor per level.
            context: (B, ...), the readout of an earlier pass, for features that take one; or
                the readouts of several.
        """
        if not isinstance(batch_size, int | torch.SymInt) or batch_size < 0:
            raise InputError(f"batch_size must be a whole number, 0 or more; got {batch_size!r}.")
        if not isinstance(generator, torch.Generator | None):
            raise InputError(
                "generator must be a torch.Generator, such as torch.Generator().manual_seed(0); "
                f"got {generator!r}."
            )
        if slots is None:
            frame = self.draw_frame(num_slots, generator)
        else:
            if num_slots is not None or generator is not None:
                raise InputError("give slots, or num_slots and generator to draw them, not both.")
            like = first_tensor(self.shaping_modules())
            frame = checked_slots(slots, self.slot_dims, batch_size, like)
        seen = checked_context(context, batch_size, self.has_features)
        return self._begun(batch_size, frame, seen, self._fingerprint())

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
        dense = mask is None and index is None
        if self.defers and dense and not (self.has_features or torch.is_grad_enabled()):
            later = self._deferred(state, elements)
            if later is not None:
                return later
        return self._combined(state, elements, mask, index, join, torch.add)

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
        left = self._combined(state, elements, mask, index, remove, torch.sub)
        if bool((left.count < 0).any()):
            number = int((left.count < 0).nonzero()[0])
            raise InputError(
                "cannot remove more elements than a set holds: "
                f"set {number} would be left with {int(left.count[number])}."
            )
        return left.with_statistics(emptied(left.statistics, left.count == 0), left.count)

    def readout(self, state: SetState) -> Tensor:
        """The encoding (B, ...) of what the state has seen; as often as you like."""
        state = self._recognised(state)
        return self.finish(state.statistics, state.count, state.frame)

    def weights(self, state: SetState, elements: Tensor) -> Tensor:
        """How much each element counts in each vector that is read: (B, n, K).

        An element spreads itself over slots: its weights sum to 1 over the slots. A learned query
        spreads itself over elements: its weights sum to 1 over all that the state has seen.

        Args:
            state: of this encoder; where the weights are over elements, of all of them.
            elements: (B, n, d), any of them; for a heat map, read the chunks a second time.

        >>> import setfold
        >>> encoder, elements = setfold.AttentionPool(3, 4, dim_out=16), torch.randn(2, 100, 3)
        >>> state = encoder.update(encoder.initial_state(2), elements)
        >>> torch.allclose(encoder.weights(state, elements).sum(1), torch.ones(2, 4))
        True
        """
        state = self._recognised(state)
        chunk = self._chunk(state, elements, None, None)
        return self.weigh(self.featurize(chunk.elements, None, state.context), state)

    def forward(
        self,
        elements: Tensor,
        mask: Tensor | None = None,
        *,
        index: Tensor | None = None,
        batch_size: int | None = None,
        context: Tensor | Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Encode whole sets: initial_state, update and readout in one.

        Args:
            elements: (B, n, d), or ragged (N, d) with an index.
            mask: (B, n), True where an element is present.
            index: (N,), the set of each row; needs batch_size.
            batch_size: the number of sets of a ragged batch.
            context: (B, ...), the readout of an earlier pass, or of several.
        """
        like = first_tensor(self.shaping_modules())
        chunk = Chunk.of_whole_sets(elements, mask, index, batch_size, self.dim_in, like)
        frame = self.draw_frame(None, None)
        seen = checked_context(context, chunk.sets, self.has_features)
        # A state that nobody will see needs no fingerprint, and its joining can be left out.
        state = self._begun(chunk.sets, frame, seen, Fingerprint.unknown())
        if chunk.is_empty():
            return self.finish(state.statistics, state.count, frame)
        self._refuse_hidden(chunk)
        if chunk.index is not None:
            found = combine_with(self, state, chunk, join)
        else:
            found = absorb_dense(self, chunk.elements, chunk.mask, seen, self.prepare(frame))
            chunk.refuse_broken(found)
        return self.finish(found, chunk.count(), frame)

    # ---- derived -----------------------------------------------------------------------------

    def _begun(
        self,
        batch_size: int,
        frame: tuple[Tensor, ...],
        context: tuple[Tensor, ...],
        fingerprint: Fingerprint,
    ) -> SetState:
        statistics = self.identity(batch_size, frame)
        some = next(iter(statistics.values()))[0]
        return SetState(
            statistics,
            torch.zeros(batch_size, dtype=torch.long, device=some.device),
            frame=frame,
            context=context,
            aggregate=tuple(a.name for a in self.aggregates),
            fingerprint=fingerprint,
        )

    def _chunk(
        self, state: SetState, elements: Tensor, mask: Tensor | None, index: Tensor | None
    ) -> Chunk:
        chunk = Chunk.checked(elements, mask, index, sets=state.batch_size, width=self.dim_in)
        chunk.refuse_foreign(state.device, state.fingerprint.dtype)
        return chunk

    def _refuse_hidden(self, chunk: Chunk) -> None:
        """Raise on NaN or infinity that the statistics would not show."""
        if not self.sums_show_all:
            chunk.refuse_non_finite()

    def _deferred(self, state: SetState, elements: Tensor) -> SetState | None:
        """The state with a small chunk put aside; None for one that must be absorbed at once.

        A stream that arrives element by element spends its time in calling, not in computing.
        """
        if torch.compiler.is_compiling() or not isinstance(elements, Tensor):
            return None
        state = self._recognised(state)
        chunks, waiting, _ = state.pending or ((), 0, None)
        plain = elements.is_cpu and elements.dtype in (torch.float32, torch.float64)
        if elements.numel() > SMALL_CHUNK or not plain or state.has_own_slots:
            return None
        self._chunk(state, elements, None, None)
        full = len(chunks) >= PENDING_CHUNKS or waiting + elements.nbytes > PENDING_BYTES
        if elements.numel() == 0 or full:
            return None
        # NaN compares as false, so whatever is odd takes the ordinary way, which says what it is
        if not np.abs(elements.detach().numpy()).max() < ORDINARY:
            return None
        absorb = partial(self.absorb, mask=None, prepared=self.prepared_for(state))
        return state.put_aside(elements, state.count + elements.shape[1], absorb)

    def _combined(
        self,
        state: SetState,
        elements: Tensor,
        mask: Tensor | None,
        index: Tensor | None,
        combine: Callable[[Statistics, Statistics], Statistics],
        combine_counts: Callable[[Tensor, Any], Tensor],
    ) -> SetState:
        """The state joined with one chunk, or relieved of it."""
        state = self._recognised(state)
        chunk = self._chunk(state, elements, mask, index)
        if chunk.is_empty():
            return state
        self._refuse_hidden(chunk)
        statistics = combine_with(self, state, chunk, combine)
        return state.with_statistics(statistics, combine_counts(state.count, chunk.count()))

    def prepared_for(self, state: SetState) -> Any:
        """What `absorb` needs; without a graph derived once and kept with the state."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.prepare(state.frame)
        if state.prepared is None:
            state.prepared = copied(self.prepare(state.frame))
        return state.prepared

    def _fingerprint(self) -> Fingerprint:
        if torch.compiler.is_compiling():
            return Fingerprint.unknown()
        return fingerprint_of(self, self.shaping_modules())

    def _recognised(self, state: SetState) -> SetState:
        """The state, if this encoder's weights as they are now have shaped it."""
        if torch.compiler.is_compiling():
            return state
        if not isinstance(state, SetState):
            raise StateMismatchError(f"expected a state; got {type(state).__name__}.")
        state = state.trackable()
        if state.fingerprint.belongs_to(self):
            return state
        mine = self._fingerprint()
        wanted = tuple(a.name for a in self.aggregates)
        alike = state.aggregate == wanted and len(state.frame) == len(self.slot_dims)
        if not (alike and state.fingerprint.surely_matches(mine)):
            raise StateMismatchError(
                f"this state was not made by this {type(self).__name__} as it is now: its aggregate "
                f"({'+'.join(state.aggregate)}) or its weights differ. States do not survive a "
                "change of weights; fold the set anew with encoder.initial_state(). (BatchNorm and "
                "spectral_norm in training mode change with every chunk: call model.eval().)"
            )
        return state.with_statistics(state.statistics, state.count, mine)
