"""Several streaming encoders over one stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from setfold.core.absorb import Arrivals, absorb_for_gradients, absorb_ragged
from setfold.core.begin import recognize
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.readout import Count
from setfold.core.state import SetState
from setfold.core.statistic import Fields, Statistics
from setfold.errors import InputError


class Concat(StreamingSetEncoder):
    """Encodes each set with several encoders in one pass and concatenates their readouts.

    The state consists of the states of the parts, so `Concat` is a fold: its states merge, it reads
    files, it runs in several processes, and it can remove elements if all parts can. The encoding
    is (B, dim_readout).

    Args:
        encoders: streaming encoders for the same elements; a list, or a dict by name. Names must
            not contain "/" or ".".

    >>> import setfold
    >>> encoder = Concat(
    ...     {
    ...         "max": setfold.Pool(3, "max"),
    ...         "slots": setfold.SlotSetEncoder(3, 4, 8, 8, aggregate="weighted_mean"),
    ...         "softmax": setfold.AttentionPool(3, num_queries=2, dim_out=8),
    ...     }
    ... )
    >>> encoder(torch.randn(5, 100, 3)).shape  # 3 + 4 * 8 + 2 * 8
    torch.Size([5, 51])
    >>> state = encoder.update(encoder.initial_state(5), torch.randn(5, 100, 3))
    >>> {name: tuple(readout.shape) for name, readout in encoder.readouts(state).items()}
    {'max': (5, 3), 'slots': (5, 4, 8), 'softmax': (5, 2, 8)}
    """

    def __init__(
        self, encoders: Mapping[str, StreamingSetEncoder] | Sequence[StreamingSetEncoder]
    ) -> None:
        super().__init__()
        named = _by_name(encoders)
        for name, encoder in named.items():
            if not isinstance(encoder, StreamingSetEncoder):
                raise InputError(
                    "encoders must be streaming set encoders, such as setfold.Pool; got "
                    f"{type(encoder).__name__} for {name!r}."
                )
        widths = {e.dim_in for e in named.values() if e.dim_in is not None}
        if len(widths) > 1:
            found = {name: encoder.dim_in for name, encoder in named.items()}
            raise InputError(f"all encoders must have the same dim_in; got {found}.")
        self.encoders = nn.ModuleDict(named)
        self.dim_in = widths.pop() if widths else None
        self.slot_dims = tuple(dim for part in named.values() for dim in part.slot_dims)
        self.batched_slots = all(p.batched_slots or not p.slot_dims for p in named.values())

    @property
    def parts(self) -> dict[str, StreamingSetEncoder]:
        """The encoders by name. Those of a list are named "0", "1", ..."""
        return cast("dict[str, StreamingSetEncoder]", dict(self.encoders.items()))

    @property
    def dim_readout(self) -> int:
        """The width of the readout (B, dim_readout)."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            frame = self.draw_frame(None, None)
            count = torch.zeros(1, dtype=torch.long, device=self.device)
            empty = {n: f.identity(1, self.device) for n, f in self.fields(frame).items()}
            return self.finish(empty, count, self.prepare(frame)).shape[1]

    def readouts(self, state: Any) -> dict[str, Tensor]:
        """The readout (B, ...) of each part, by name.

        Args:
            state: a state of this encoder.

        Raises:
            StateMismatchError: the state belongs to another model.
        """
        state = recognize(self, state)
        return self._finish_parts(state.statistics, state.count, self.prepared_for(state))

    # ---- primitives. The fields of a part are named "<part>/<field>" ------------------------

    def fields(self, frame: tuple[Tensor, ...]) -> Fields:
        return {
            f"{name}/{field}": declared
            for name, part, own in self._with_frames(frame)
            for field, declared in part.fields(own).items()
        }

    def prepare(self, frame: tuple[Tensor, ...]) -> dict[str, Any]:
        return {name: part.prepare(own) for name, part, own in self._with_frames(frame)}

    def absorb(self, elements: Tensor, mask: Tensor | None, prepared: dict[str, Any]) -> Statistics:
        return self._prefix_fields(
            (name, part.absorb(part.featurize(elements, mask, ()), mask, prepared[name]))
            for name, part in self.parts.items()
        )

    def absorb_ragged(
        self, elements: Tensor, index: Tensor, batch_size: int, prepared: dict[str, Any]
    ) -> Arrivals | None:
        """All sets at once, if all parts can; otherwise by length.

        By length, too, if a part has features: a replay, which has a graph, computes them by
        length, and would draw other random numbers.
        """
        if self.has_features:
            return None
        found = []
        for name, part in self.parts.items():
            arrived = absorb_ragged(part, elements, index, batch_size, prepared[name])
            sets, own = (elements, None) if arrived is None else next(arrived)
            if own is None or sets is not None:
                return None
            found.append((name, own))
        return iter([(None, self._prefix_fields(iter(found)))])

    def absorb_for_gradients(
        self, elements: Tensor, mask: Tensor | None, prepared: dict[str, Any]
    ) -> Statistics:
        return self._prefix_fields(
            (
                name,
                absorb_for_gradients(
                    part, part.featurize(elements, mask, ()), mask, prepared[name]
                ),
            )
            for name, part in self.parts.items()
        )

    def finish(self, statistics: Statistics, count: Count, prepared: dict[str, Any]) -> Tensor:
        readouts = self._finish_parts(statistics, count, prepared)
        return torch.cat([readout.flatten(1) for readout in readouts.values()], 1)

    def _finish_parts(
        self, statistics: Statistics, count: Count, prepared: dict[str, Any]
    ) -> dict[str, Tensor]:
        own: dict[str, Statistics] = {name: {} for name in self.parts}
        for path, tensors in statistics.items():
            name, _, field = path.partition("/")
            own[name][field] = tensors
        return {
            name: part.finish(own[name], count, prepared[name]) for name, part in self.parts.items()
        }

    @staticmethod
    def _prefix_fields(found: Iterator[tuple[str, Statistics]]) -> Statistics:
        return {f"{name}/{field}": p for name, own in found for field, p in own.items()}

    # ---- weights -----------------------------------------------------------------------------

    @property
    def has_weights(self) -> bool:
        return any(part.has_weights for part in self.parts.values())

    def weigh(self, elements: Tensor, state: SetState, prepared: dict[str, Any]) -> Tensor:
        """The weights of all parts that have weights, one after the other."""
        found = []
        for name, part, frame in self._with_frames(state.frame):
            if not part.has_weights:
                continue
            own = {
                path.partition("/")[2]: (field, state.statistics[path])
                for path, field in state.fields.items()
                if path.startswith(f"{name}/")
            }
            own_state = SetState(
                {field: declared for field, (declared, _) in own.items()},
                {field: tensors for field, (_, tensors) in own.items()},
                state.count,
                frame=frame,
                weights=state.weights,
            )
            features = part.featurize(elements, None, ())
            found.append(part.weigh(features, own_state, prepared[name]))
        return torch.cat(found, -1) if found else super().weigh(elements, state, prepared)

    # ---- features ----------------------------------------------------------------------------

    @property
    def has_features(self) -> bool:
        return any(part.has_features for part in self.parts.values())

    def featurize(
        self, elements: Tensor, mask: Tensor | None, context: tuple[Tensor, ...]
    ) -> Tensor:
        """Return the elements unchanged: each part computes its own features in `absorb`."""
        if context:
            raise InputError(
                "Concat does not take a context. Use Composition(Concat(...), features), whose "
                "features take it."
            )
        return elements

    def shaping_modules(self) -> tuple[nn.Module, ...]:
        return tuple(m for part in self.parts.values() for m in part.shaping_modules())

    # ---- slots -------------------------------------------------------------------------------

    @property
    def draws_slots(self) -> bool:
        return any(part.draws_slots for part in self.parts.values())

    def draw_frame(
        self, num_slots: int | None, generator: torch.Generator | None
    ) -> tuple[Tensor, ...]:
        """The slots of all parts, in order.

        `num_slots` and `generator` apply to the parts that draw random slots.
        """
        if not self.draws_slots and not (num_slots is None and generator is None):
            raise InputError(
                "no part of this Concat draws slots: leave num_slots and generator out."
            )
        frame: tuple[Tensor, ...] = ()
        for part in self.parts.values():
            options = (num_slots, generator) if part.draws_slots else (None, None)
            frame += part.draw_frame(*options)
        return frame

    def _with_frames(
        self, frame: tuple[Tensor, ...]
    ) -> Iterator[tuple[str, StreamingSetEncoder, tuple[Tensor, ...]]]:
        """Each part with its name and its slots."""
        start = 0
        for name, part in self.parts.items():
            stop = start + len(part.slot_dims)
            yield name, part, frame[start:stop]
            start = stop


def _by_name(
    encoders: Mapping[str, StreamingSetEncoder] | Sequence[StreamingSetEncoder],
) -> dict[str, StreamingSetEncoder]:
    if isinstance(encoders, Mapping | nn.ModuleDict):
        named = {str(name): encoder for name, encoder in encoders.items()}
    elif isinstance(encoders, Sequence | nn.ModuleList) and not isinstance(encoders, str):
        named = {str(number): encoder for number, encoder in enumerate(encoders)}
    else:
        raise InputError(
            f"encoders must be a list or a dict of encoders; got {type(encoders).__name__}."
        )
    if not named:
        raise InputError("Concat needs at least one encoder; got none.")
    for name in named:
        if "/" in name or "." in name or not name:
            raise InputError(f"names of encoders must not contain '/' or '.'; got {name!r}.")
        if hasattr(nn.ModuleDict, name) or name == "training":
            raise InputError(f"{name!r} is an attribute of torch modules: choose another name.")
    return named
