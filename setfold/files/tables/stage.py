"""One pass of a model of several passes, as an encoder of tables of states.

A later pass begins with what the earlier ones found about each set. Tables hold only what a pass
collects: `Stage` looks the rest up by set id, whenever it absorbs elements and reads out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn

from setfold.core.encoder import StreamingSetEncoder
from setfold.core.passes import MultiPassSetEncoder
from setfold.core.readout import Count
from setfold.core.state import SetState
from setfold.core.statistic import Fields, Statistics

Lookup = Callable[[pa.Array], tuple[Tensor, ...]]  # from set ids (B,) to readouts (B, ...)


class Stage(StreamingSetEncoder):
    """A pass of a model.

    Without set ids it is an encoder whose sets all begin like an empty set. That is enough to tell
    what its states look like, and which elements it can absorb.

    Args:
        model: The model, in evaluation mode.
        number: Which pass, from 0.
        lookup: Returns the readouts of the earlier passes.
    """

    def __init__(self, model: MultiPassSetEncoder, number: int, lookup: Lookup) -> None:
        super().__init__()
        self.model, self.number, self._lookup = model, number, lookup
        self.dim_in = model.dim_in
        found: tuple[Tensor, ...] = ()
        with torch.no_grad():
            for _ in range(number):
                encoder, state = model.begin(found, 1)
                found = (*found, encoder.readout(state))
            self._found = found
            self._encoder, self._state = model.begin(found, 1)
        self.eval()

    @property
    def is_last(self) -> bool:
        """Whether the pass gives the encoding."""
        return self.number == self.model.passes - 1

    # ---- sets with ids -------------------------------------------------------------------------

    def fold_sets(self, names: pa.Array, elements: Tensor, index: Tensor) -> SetState:
        """Return the state of some sets after their elements.

        Args:
            names: (B,), their ids.
            elements: (N, d).
            index: (N,), the set of each element.
        """
        encoder, begun = self.model.begin(self._readouts(names), len(names))
        if len(names) == 1:
            state = encoder.update(begun, elements.unsqueeze(0))
        else:
            state = encoder.update(begun, elements, index=index)
        empty = self.initial_state(len(names))
        return empty.with_statistics(state.statistics, state.count)

    def read_sets(self, names: pa.Array, state: SetState) -> Tensor:
        """Return the readouts (B, ...) of some sets, or their encodings after the last pass."""
        found = self._readouts(names)
        encoder, begun = self.model.begin(found, len(names))
        readout = encoder.readout(begun.with_statistics(state.statistics, state.count))
        return self.model.conclude((*found, readout), state.count) if self.is_last else readout

    def _readouts(self, names: pa.Array) -> tuple[Tensor, ...]:
        return tuple(part.to(self.device) for part in self._lookup(names))

    # ---- primitives ----------------------------------------------------------------------------

    def fields(self, frame: tuple[Tensor, ...]) -> Fields:
        return self._state.fields

    def prepare(self, frame: tuple[Tensor, ...]) -> Any:
        return self._encoder.prepare(self._state.frame)

    def featurize(
        self, elements: Tensor, mask: Tensor | None, context: tuple[Tensor, ...]
    ) -> Tensor:
        sets = elements.shape[0]
        alike = tuple(part.expand(sets, *part.shape[1:]) for part in self._state.context)
        return self._encoder.featurize(elements, mask, alike)

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: Any) -> Statistics:
        return self._encoder.absorb(elements, mask, prepared)

    def finish(self, statistics: Statistics, count: Count, prepared: Any) -> Tensor:
        readout = self._encoder.finish(statistics, count, prepared)
        if not self.is_last:
            return readout
        sets = readout.shape[0]
        found = tuple(part.expand(sets, *part.shape[1:]) for part in self._found)
        counts = count if isinstance(count, Tensor) else readout.new_full((sets,), count)
        return self.model.conclude((*found, readout), counts)

    def shaping_modules(self) -> tuple[nn.Module, ...]:
        return (self.model,)
