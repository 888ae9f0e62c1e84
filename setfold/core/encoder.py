"""Encoders that fold: the verbs, derived from the primitives that an encoder defines.

`primitives.py` explains what an encoder is; read it first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.absorb import (
    absorb_into,
    absorb_new,
    absorb_whole,
    check_elements,
    check_encoding,
    check_finite,
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
from setfold.core.primitives import Primitives
from setfold.core.readout import unshared
from setfold.core.state import SetState
from setfold.core.statistic import Fields, Statistics, clear, identity, join, remove
from setfold.core.weights import first_tensor
from setfold.errors import InputError


class StreamingSetEncoder(Primitives):
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

    # ---- features, weights and size ----------------------------------------------------------

    @property
    def has_features(self) -> bool:
        """Whether `featurize` does anything."""
        base = type(self).featurize is Primitives.featurize
        return not base or "featurize" in vars(self)

    def shaping_modules(self) -> tuple[nn.Module, ...]:
        """The modules whose weights shape the state; not those that only read it out."""
        return (self,)

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

    def fold_rows(self, elements: Tensor, index: Tensor, batch_size: int) -> SetState:
        """The state of new sets: `initial_state` and `update` in one call, without empty states.

        Args:
            elements: (N, d), the rows of all sets.
            index: (N,), the set of each row, in any order.
            batch_size: the number of sets.

        Raises:
            InputError: shapes, dtypes, devices or the index do not fit.
            NonFiniteError: an element is NaN or infinite.
        """
        begun = self.initial_state(0)
        chunk = Chunk(elements, None, index)
        chunk = chunk.validate(batch_size, self.dim_in, begun.device, begun.weights.dtype).owned()
        if chunk.is_empty():
            return self.initial_state(batch_size)
        check_elements(self, chunk, begun.frame)
        prepared = self.prepared_for(begun)
        found = absorb_new(self, begun.fields, chunk, batch_size, (), prepared)
        assert chunk.index is not None
        return begun.with_statistics(found, torch.bincount(chunk.index, minlength=batch_size))

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

        Raises:
            InputError: shapes, dtypes or devices do not fit.
            NonFiniteError: elements are not finite, or logits overflow.

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
        check_finite(chunk)
        features = self.featurize(chunk.elements, None, state.context)
        weights = self.weigh(features, state, self.prepared_for(state))
        check_encoding(weights, "weight")
        return weights

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
            found = absorb_new(self, fields, chunk, sets, seen, prepared)
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
