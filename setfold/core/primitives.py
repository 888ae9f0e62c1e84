"""READ FIRST: what a set encoder is, and what an encoder that folds must define.

A set encoding here is a fold: begin with an empty state, absorb the set chunk by chunk in any
order, merge states that were computed elsewhere, read out the vector. The result is that of the
whole set. This property is mini-batch consistency.

    SetEncoder               forward only
      Primitives             what an encoder that folds defines
        StreamingSetEncoder  adds initial_state, update, remove, readout, forward (encoder.py)
          Composition        features (per element) -> streaming encoder -> head (composition.py)
          Concat             streaming encoders side by side (encoders/concat.py)
      WholeSetEncoder        needs all elements of a set at once (whole.py)
        MultiPassSetEncoder  or can read them several times: several folds in a row (passes.py)

An encoder that folds derives from `StreamingSetEncoder` and defines three primitives, each a pure
function of tensors:

    fields(frame)                         the declaration of its state: named statistics
    absorb(elements, mask, prepared)      the statistics of one dense chunk, alone
    finish(statistics, count, prepared)   the encoding

Everything else has a default here, or is derived in encoder.py: empty states, joining, masks,
ragged batches, removal, validation, matching states with weights, detecting NaN. Shapes,
throughout: B sets, n elements, d features, K slots, h slot size, N rows of a ragged batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core.absorb import PRIMITIVES, PROBED, VALID, Arrivals
from setfold.core.readout import Count
from setfold.core.state import SetState
from setfold.core.statistic import Fields, Statistics
from setfold.core.weights import WATCH
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


class Primitives(SetEncoder):
    """What an encoder that folds defines: `fields`, `absorb`, `finish`; the others have defaults."""

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

    def absorb_ragged(
        self, elements: Tensor, index: Tensor, batch_size: int, prepared: Any
    ) -> Arrivals | None:
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
        """The statistics (1, ...) of one small chunk (1, n, d) without a mask, in as few calls as possible.

        None, the default, uses `absorb`. It is called without a graph, with n at least 1.
        """
        return None

    def encode_small(self, elements: Tensor, prepared: Any) -> Tensor | None:
        """The encoding (1, ...) of one small set (1, n, d) without a mask, in as few calls as possible.

        None, the default, uses `absorb` and `finish`. It must be the encoding that they give. NaN or
        infinity in an element must make it NaN or infinite, or None: then they run and report it.

        Args:
            elements: (1, n, d), with n at least 1.
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
        return type(self).weigh is not Primitives.weigh
