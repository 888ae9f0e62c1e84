"""READ FIRST: what a set encoder is, and what an encoder that folds must define.

A set encoding here is a fold: begin with an empty state, absorb the set chunk by chunk in any
order, merge states that were computed elsewhere, read out the vector. The result is that of the
whole set. This property is mini-batch consistency.

    SetEncoder             forward only
      StreamingSetEncoder  adds initial_state, update, remove, readout; forward combines them
        Composition        features (per element) -> streaming encoder -> head (composition.py)
        Concat             streaming encoders side by side (encoders/concat.py)
      WholeSetEncoder      needs all elements of a set at once (whole.py)
        MultiPassSetEncoder  or can read them several times: several folds in a row (passes.py)

An encoder that folds defines three primitives, each a pure function of tensors:

    fields(frame)                         the declaration of its state: named statistics
    absorb(elements, mask, prepared)      the statistics of one dense chunk, alone
    finish(statistics, count, prepared)   the encoding

Everything else is derived here: empty states, joining, masks, ragged batches, removal, validation,
matching states with weights, detecting NaN. Shapes, throughout: B sets, n elements, d features,
K slots, h slot size, N rows of a ragged batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.absorb import (
    PRIMITIVES,
    PROBED,
    VALID,
    Arrivals,
    Groups,
    absorb_into,
    absorb_whole,
    check_elements,
)
from setfold.core.begin import (
    begin,
    current_weights_of,
    encode_small,
    may_keep,
    recognize,
    setup_of,
    update_small,
)
from setfold.core.inputs import Chunk, validate_context, validate_whole_sets
from setfold.core.readout import Count, unshared
from setfold.core.state import SetState
from setfold.core.statistic import Fields, Statistics, clear, identity, join, remove
from setfold.core.weights import WATCH, Weights, first_tensor
from setfold.errors import InputError


class SetEncoder(nn.Module, ABC):
    """Maps sets (B, n, d) to encodings (B, ...) that do not depend on the order of the elements.

    Attributes:
        dim_in: width d of the elements; None if a feature network determines it.
        passes: how often the chunks of a set must be read to fold it; None if it cannot be folded.
    """

    dim_in: int | None
    passes: int | None = None

    @abstractmethod
    def forward(self, elements: Tensor, mask: Tensor | None = None) -> Tensor:
        """Encode whole sets: elements (B, n, d), mask (B, n) True where present."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in (WATCH, VALID)}


class StreamingSetEncoder(SetEncoder):
    """A set encoder that folds: its result does not depend on how a set is split into chunks.

    Attributes:
        slot_dims: the slot size h of each level; empty without slots.
        slot_axis: the axis of the encoding along which slots lie; None if they are mixed.
        slots_cancel: whether attention vanishes when the slots are added up.
        batched_slots: whether `prepare` and `absorb` accept slots (B, K, h) that differ by set. If
            not, such sets are absorbed one by one.
    """

    passes = 1
    slot_dims: tuple[int, ...] = ()
    slot_axis: int | None = None
    slots_cancel: bool = False
    batched_slots: bool = False

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in PRIMITIVES:
            self._forget()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in PRIMITIVES:
            self._forget()

    def _forget(self) -> None:
        """Forget what was derived from primitives that this instance has replaced."""
        for kept in (WATCH, VALID, PROBED):
            vars(self).pop(kept, None)

    # ---- primitives --------------------------------------------------------------------------

    @abstractmethod
    def fields(self, frame: tuple[Tensor, ...]) -> Fields:
        """Declare what a state keeps: by name, a statistic and its shape for one set.

        Args:
            frame: the slots of each level, (1, K, h) or (B, K, h); empty without slots.
        """

    @abstractmethod
    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        """The statistics of a dense chunk (B, n, d) alone; masked rows are finite.

        It must not depend on any state. Tensors (B, ...), one tuple for each field.
        """

    @abstractmethod
    def finish(self, statistics: Statistics, count: Count, prepared: Any) -> Tensor:
        """The encoding (B, ...) from statistics and counts; zeros for an empty set.

        Args:
            statistics: by field, what a state keeps.
            count: elements of each set (B,), or one positive number for all sets.
            prepared: from `prepare`.
        """

    # ---- optional primitives -----------------------------------------------------------------

    def prepare(self, frame: tuple[Tensor, ...]) -> Any:
        """What `absorb` and `finish` need of frame and weights: tensors in tuples.

        It is computed once for many chunks. Gradients of a fold are collected here before they
        flow on to the weights.
        """
        return None

    def absorb_groups(self, elements: Tensor, groups: Groups, prepared: Any) -> Arrivals | None:
        """The statistics of ragged rows (N, d), on the CPU without a graph, some sets at a time.

        None, the default, absorbs the sets of each length as a dense chunk.
        """
        return None

    def absorb_for_gradients(
        self, elements: Tensor, mask: Tensor | None, prepared: Any
    ) -> Statistics:
        """Like `absorb`, for a backward pass that needs the gradients and ignores the values.

        Override it to skip work. It is called only if no statistic needs its value for `pull`.
        """
        return self.absorb(elements, mask, prepared)

    def absorb_small(self, elements: Tensor, prepared: Any) -> Statistics | None:
        """The statistics (1, ...) of one small chunk (n, d) without a mask, in as few calls as possible.

        None, the default, uses `absorb`. It is called without a graph, with n at least 1.
        """
        return None

    def encode_small(self, elements: Tensor, prepared: Any) -> Tensor | None:
        """The encoding (1, ...) of one small set (n, d) without a mask, in as few calls as possible.

        None, the default, uses `absorb` and `finish`. The encoding must be theirs, and NaN or
        infinity in an element must show in it.

        Args:
            elements: (n, d), with n at least 1.
            prepared: from `prepare`; None with a graph, where deriving it is part of the cost.
        """
        return None

    def draw_frame(
        self, num_slots: int | None, generator: torch.Generator | None
    ) -> tuple[Tensor, ...]:
        """Draw the slots of each level, (1, K, h); empty without slots. Parameters may be returned."""
        if num_slots is not None or generator is not None:
            raise InputError(
                f"{type(self).__name__} has no slots: leave num_slots and generator out."
            )
        return ()

    @property
    def draws_slots(self) -> bool:
        """Whether `draw_frame` draws random slots, so that it takes a generator."""
        return False

    def featurize(
        self, elements: Tensor, mask: Tensor | None, context: tuple[Tensor, ...]
    ) -> Tensor:
        """Transform each element on its own before `absorb`; by default it is left as it is."""
        return elements

    def weigh(self, elements: Tensor, state: SetState, prepared: Any) -> Tensor:
        """The weights (B, n, K) of featurized elements, for encoders that have weights."""
        raise InputError(f"{type(self).__name__} has no weights: it treats all elements alike.")

    @property
    def has_weights(self) -> bool:
        """Whether elements have weights, which `weights` returns."""
        return type(self).weigh is not StreamingSetEncoder.weigh

    def shaping_modules(self) -> tuple[nn.Module, ...]:
        """The modules whose weights shape the state; not those that only read it out."""
        return (self,)

    # ---- properties --------------------------------------------------------------------------

    @property
    def has_features(self) -> bool:
        """Whether `featurize` does anything."""
        base = type(self).featurize is StreamingSetEncoder.featurize
        return not base or "featurize" in vars(self)

    @property
    def first_weight(self) -> Tensor | None:
        """The first floating-point weight, whose dtype and device the elements must share."""
        return first_tensor(self.shaping_modules())

    @property
    def device(self) -> torch.device:
        """The device of the weights, where elements and states must be."""
        weight = self.first_weight
        return torch.device("cpu") if weight is None else weight.device

    @property
    def state_nbytes(self) -> int:
        """The size in bytes of one set's state, without the slots that all sets share."""
        fields = setup_of(self).fields
        numbers = sum(torch.Size(s).numel() for f in fields.values() for s in f.shapes)
        return 8 * (numbers + 1)  # float64, and the count

    # ---- the verbs ---------------------------------------------------------------------------

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

        In training mode each call draws new random slots. In evaluation mode slots follow from a
        seed that is saved with the model, so that states from different processes merge.

        Args:
            batch_size: the number B of sets.
            num_slots: a number K of slots other than the encoder's (random slots only).
            generator: draws the slots reproducibly, in training and in evaluation mode.
            slots: the slots themselves, (K, h) or (B, K, h); one such tensor per level.
            context: (B, ...), the readout of an earlier pass, for features that use it; or the
                readouts of several passes.
        """
        frame, fields, prepared = begin(self, batch_size, num_slots, generator, slots)
        device = self.device
        return SetState(
            fields,
            identity(fields, batch_size, device),
            torch.zeros(batch_size, dtype=torch.long, device=device),
            frame=tuple(level.clone() for level in frame),  # no optimizer may change a state
            context=validate_context(context, batch_size, self.has_features),
            weights=current_weights_of(self),
            prepared=prepared,
        )

    def update(
        self,
        state: SetState,
        elements: Tensor,
        *,
        mask: Tensor | None = None,
        index: Tensor | None = None,
    ) -> SetState:
        """The state after one more chunk; `state` itself is not changed.

        Args:
            state: from this encoder's `initial_state`, or merged or loaded from such states.
            elements: (B, n, d), or ragged (N, d) with an index.
            mask: (B, n), True where an element is present.
            index: (N,), the set of each row, in any order.

        Raises:
            InputError: shapes, dtypes, devices or the index do not fit.
            NonFiniteError: an element that is present is NaN or infinite.
            StateMismatchError: the state belongs to another model.
        """
        if mask is None and index is None and not torch.compiler.is_compiling():
            updated = update_small(self, state, elements)
            if updated is not None:
                return updated
        return self._combine(state, Chunk(elements, mask, index), join, torch.add)

    def remove(
        self,
        state: SetState,
        elements: Tensor,
        *,
        mask: Tensor | None = None,
        index: Tensor | None = None,
    ) -> SetState:
        """The state without elements that it has seen, for sliding windows and deletions.

        Sums and means can remove elements; a maximum or minimum cannot. A set from which everything
        was removed is exactly empty. The arguments are those of `update`.

        Raises:
            NotRemovableError: the state keeps a statistic that cannot remove elements.
        """
        left = self._combine(state, Chunk(elements, mask, index), remove, torch.sub)
        if bool((left.count < 0).any()):
            number = int((left.count < 0).nonzero()[0])
            raise InputError(
                "cannot remove more elements than a set holds: "
                f"set {number} would be left with {int(left.count[number])}."
            )
        return left.with_statistics(
            clear(left.fields, left.statistics, left.count == 0), left.count
        )

    def readout(self, state: SetState) -> Tensor:
        """The encoding (B, ...) of what the state has seen. It can be called any number of times.

        A number that does not fit into the dtype is infinite, with its sign, such as a sum of 6e38
        in float32. The state itself is right.

        Raises:
            NonFiniteError: layers that the encoder applies to the state overflow.
            StateMismatchError: the state belongs to another model.
        """
        state = recognize(self, state)
        encoding = self.finish(state.statistics, state.count, self.prepared_for(state))
        return unshared(encoding, state.statistics)

    def weights(self, state: SetState, elements: Tensor) -> Tensor:
        """The weight of each element in each vector of the readout: (B, n, K).

        For slots, the weights of an element sum to 1 over the slots. For learned queries, the
        weights of a query sum to 1 over all elements that the state has seen.

        Args:
            state: of this encoder; if weights are over elements, of all elements.
            elements: (B, n, d), any of them. For a heat map, read the chunks a second time.

        >>> import setfold
        >>> encoder, elements = setfold.AttentionPool(3, 4, dim_out=16), torch.randn(2, 100, 3)
        >>> state = encoder.update(encoder.initial_state(2), elements)
        >>> torch.allclose(encoder.weights(state, elements).sum(1), torch.ones(2, 4))
        True
        """
        state = recognize(self, state)
        chunk = Chunk(elements).validate(
            state.batch_size, self.dim_in, state.device, state.weights.dtype
        )
        features = self.featurize(chunk.elements, None, state.context)
        return self.weigh(features, state, self.prepared_for(state))

    def forward(
        self,
        elements: Tensor,
        mask: Tensor | None = None,
        *,
        index: Tensor | None = None,
        batch_size: int | None = None,
        context: Tensor | Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Encode whole sets: initial_state, update and readout in one call.

        A number that does not fit into the dtype is infinite, with its sign, as in `readout`.

        Args:
            elements: (B, n, d), or ragged (N, d) with an index.
            mask: (B, n), True where an element is present.
            index: (N,), the set of each row.
            batch_size: the number of sets; by default that of a dense batch, or the largest index
                plus 1.
            context: (B, ...), the readout of an earlier pass, or of several.

        Raises:
            InputError: shapes, dtypes, devices or the index do not fit.
            NonFiniteError: an element is NaN or infinite, or layers of the encoder overflow.
        """
        compiling = torch.compiler.is_compiling()
        setup = None if compiling or torch.is_grad_enabled() else setup_of(self)
        plain = mask is None and index is None and batch_size is None and context is None
        if plain and not compiling:
            encoding = encode_small(self, elements, setup)
            if encoding is not None:
                return encoding
        frame, fields, prepared, weight = setup or setup_of(self)
        chunk, sets = validate_whole_sets(elements, mask, index, batch_size, self.dim_in, weight)
        seen = validate_context(context, sets, self.has_features)
        if chunk.is_empty():
            device = chunk.elements.device
            count = torch.zeros(sets, dtype=torch.long, device=device)
            return self.finish(identity(fields, sets, device), count, prepared)
        check_elements(self, chunk, frame)
        if chunk.index is None:
            found = absorb_whole(self, fields, chunk, seen, prepared)
        else:
            device = chunk.elements.device
            empty = SetState(
                fields,
                identity(fields, sets, device),
                torch.zeros(sets, dtype=torch.long, device=device),
                frame=frame,
                context=seen,
                weights=Weights.unknown(),
            )
            found = absorb_into(self, empty, chunk, prepared, join)
        return self.finish(found, chunk.count(sets), prepared)

    # ---- derived -----------------------------------------------------------------------------

    def prepared_for(self, state: SetState) -> Any:
        """The result of `prepare`; if it may be kept, it is kept with the state."""
        if not may_keep(self):
            return self.prepare(state.frame)
        if state.prepared is None:
            state.prepared = self.prepare(state.frame)
        return state.prepared

    def _combine(
        self,
        state: SetState,
        chunk: Chunk,
        combine: Callable[[Fields, Statistics, Statistics], Statistics],
        combine_counts: Callable[[Tensor, Any], Tensor],
    ) -> SetState:
        """The state joined with one chunk, or with it removed."""
        state = recognize(self, state)
        sets = state.batch_size
        chunk = chunk.validate(sets, self.dim_in, state.device, state.weights.dtype).owned()
        if chunk.is_empty():
            return state
        check_elements(self, chunk, state.frame)
        prepared = None
        if self.batched_slots or not state.has_own_slots:
            prepared = self.prepared_for(state)
        statistics = absorb_into(self, state, chunk, prepared, combine)
        return state.with_statistics(statistics, combine_counts(state.count, chunk.count(sets)))
