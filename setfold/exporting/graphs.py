"""READ FIRST: a model as pure functions of tensors, which a graph can hold.

Nothing here is validated, and no shape depends on a value. Slots, and what `prepare` derives from
slots and weights, are constants. A state is its tensors, in the order of `SetState.tensors`.

    forward       elements (B, n, d), mask (B, n)            encoding (B, ...)
    update        elements (B, n, d), mask (B, n), state     state
    update_rows   elements (N, d), index (N,), state         state
    merge         state, other state                         state
    readout       state                                      encoding (B, ...)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from setfold.core.absorb import absorb_dense
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.primitives import Primitives, SetEncoder
from setfold.core.state import SetState
from setfold.core.statistic import Fields, Statistics, identity, join
from setfold.core.weights import first_tensor
from setfold.core.whole import WholeSetEncoder
from setfold.exporting.pieces import Pieces, check_gathers, cut, cut_rows, gather

Shape = tuple[str | int, ...]  # sizes; "B", "n" and "N" for those that may be any


class Port(NamedTuple):
    """An input or an output of a graph."""

    name: str
    dtype: torch.dtype
    shape: Shape

    def zeros(self, sizes: Mapping[str, int]) -> Tensor:
        """A tensor of these sizes."""
        shape = [sizes[size] if isinstance(size, str) else size for size in self.shape]
        return torch.zeros(shape, dtype=self.dtype)


class Part(NamedTuple):
    """A tensor of a state, and its value for a set without elements."""

    port: Port
    empty: float


class Graph(NamedTuple):
    """A function of tensors, with the names of what it takes and returns."""

    name: str
    module: nn.Module
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


class Graphs(NamedTuple):
    """All graphs of a model.

    Attributes:
        graphs: what can be exported.
        missing: by name, why the others cannot.
        state: the tensors of a state; none if the model does not fold in one pass.
        slots: the slots (K, h) of each level.
        digest: of the weights that shape the states, as states and files have it.
    """

    graphs: tuple[Graph, ...]
    missing: dict[str, str]
    state: tuple[Part, ...] = ()
    slots: tuple[Tensor, ...] = ()
    digest: str | None = None


def graphs_of(model: SetEncoder, element: tuple[int, ...]) -> Graphs:
    """The graphs of a model, which is changed: to evaluation mode, with its slots as constants.

    Args:
        model: any encoder.
        element: the shape of an element.
    """
    model.eval().requires_grad_(False)
    _fix_slots(model)
    dtype = _dtype_of(model)
    elements = Port("elements", dtype, ("B", "n", *element))
    dense = elements, Port("mask", torch.bool, ("B", "n"))
    if not isinstance(model, StreamingSetEncoder):
        whole = _Whole(model)
        graph = Graph("forward", whole, dense, (_encoding_of(whole, dense),))
        missing = dict.fromkeys(("update", "update_rows", "merge", "readout"), _obstacle(model))
        return Graphs((graph,), missing)
    return _streaming(model, dense)


def _streaming(model: StreamingSetEncoder, dense: tuple[Port, Port]) -> Graphs:
    state = model.initial_state(1)
    for field in state.fields.values():
        check_gathers(field.statistic)
    parts = tuple(_parts(state))
    ports = tuple(part.port for part in parts)
    new = tuple(port._replace(name=f"new.{port.name}") for port in ports)
    other = tuple(port._replace(name=f"other.{port.name}") for port in ports)
    elements, _ = dense
    rows = elements._replace(shape=("N", *elements.shape[2:])), Port("index", torch.int64, ("N",))
    forward = _Forward(model, state)
    encoding = _encoding_of(forward, dense)
    graphs = (
        Graph("forward", forward, dense, (encoding,)),
        Graph("update", _Update(model, state), (*dense, *ports), new),
        Graph("update_rows", _UpdateRows(model, state), (*rows, *ports), new),
        Graph("merge", _Merge(model, state), (*ports, *other), new),
        Graph("readout", _Readout(model, state), ports, (encoding,)),
    )
    slots = tuple(level[0] for level in state.frame)
    return Graphs(graphs, {}, parts, slots, state.weights.digest)


def _parts(state: SetState) -> Iterator[Part]:
    empty = {
        f"{name}.{i}": value
        for name, field in state.fields.items()
        for i, value in enumerate(field.statistic.empty)
    }
    for name, tensor in state.tensors().items():
        if name in empty or name == "count":
            yield Part(Port(name, tensor.dtype, ("B", *tensor.shape[1:])), empty.get(name, 0))


def _fix_slots(model: nn.Module) -> None:
    """Make random slots constants: the bits that they are drawn from cannot be exported."""
    for module in model.modules():
        if isinstance(module, Primitives) and module.draws_slots:
            frame = tuple(level.clone() for level in module.draw_frame(None, None))
            setattr(module, "draw_frame", partial(_fixed, frame))  # noqa: B010  (encoders allow it)


def _fixed(
    frame: tuple[Tensor, ...], num_slots: int | None, generator: torch.Generator | None
) -> tuple[Tensor, ...]:
    """The slots that were drawn once, in place of `draw_frame`."""
    return frame


def _dtype_of(model: SetEncoder) -> torch.dtype:
    weight = (
        model.first_weight if isinstance(model, StreamingSetEncoder) else first_tensor((model,))
    )
    return torch.float32 if weight is None else weight.dtype


def _encoding_of(module: nn.Module, inputs: tuple[Port, ...]) -> Port:
    """The encoding that a forward graph returns, whose shape an example shows."""
    elements, mask = (port.zeros({"B": 1, "n": 2}) for port in inputs)
    found = module(elements, ~mask)
    return Port("encoding", found.dtype, ("B", *found.shape[1:]))


def _obstacle(model: SetEncoder) -> str:
    """Why a model has no states."""
    if model.passes is not None:
        return f"the model folds in {model.passes} passes; a state of one pass is not its encoding"
    if isinstance(model, WholeSetEncoder) and model.obstacle:
        return f"the model needs whole sets: {model.obstacle}"
    return "the model does not fold"


# ---- the functions -------------------------------------------------------------------------------


class _Whole(nn.Module):
    def __init__(self, model: SetEncoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, elements: Tensor, mask: Tensor) -> Tensor:
        # one more, absent, element in each set, so that n is never 0
        elements = pad(elements, (*(0, 0) * (elements.dim() - 2), 0, 1))
        return self.model(elements, pad(mask, (0, 1)))


class _Fold(nn.Module):
    """What the functions of an encoder share: its constants, and states as tensors in a row."""

    fields: Fields

    def __init__(self, encoder: StreamingSetEncoder, state: SetState) -> None:
        super().__init__()
        self.encoder = encoder
        self.fields = state.fields
        self.prepared = encoder.prepare(state.frame)

    def statistics(self, tensors: tuple[Tensor, ...]) -> Statistics:
        """The fields of a state (*parts, count)."""
        following = iter(tensors)
        return {
            name: tuple(next(following) for _ in field.statistic.empty)
            for name, field in self.fields.items()
        }

    def absorb(self, pieces: Pieces) -> Statistics:
        """What a state keeps of the sets (B, ...) whose pieces these are."""
        elements, mask, sets, counts = pieces
        found = absorb_dense(self.encoder, self.fields, elements, mask, (), self.prepared)
        batch = counts.shape[0]
        empty = identity(self.fields, batch + 1, elements.device)
        return {
            name: tuple(
                part[:batch]
                for part in gather(
                    field.statistic, empty[name], tuple(p.double() for p in found[name]), sets
                )
            )
            for name, field in self.fields.items()
        }

    def joined(self, tensors: tuple[Tensor, ...], found: Statistics, count: Tensor) -> list[Tensor]:
        """A state (*parts, count) joined with statistics."""
        joined = join(self.fields, self.statistics(tensors), found)
        return [*(part for parts in joined.values() for part in parts), tensors[-1] + count]


class _Forward(_Fold):
    def forward(self, elements: Tensor, mask: Tensor) -> Tensor:
        pieces = cut(elements, mask)
        return self.encoder.finish(self.absorb(pieces), pieces.counts, self.prepared)


class _Update(_Fold):
    def forward(self, elements: Tensor, mask: Tensor, *state: Tensor) -> list[Tensor]:
        pieces = cut(elements, mask)
        return self.joined(state, self.absorb(pieces), pieces.counts)


class _UpdateRows(_Fold):
    def forward(self, elements: Tensor, index: Tensor, *state: Tensor) -> list[Tensor]:
        pieces = cut_rows(elements, index, state[-1].shape[0])
        return self.joined(state, self.absorb(pieces), pieces.counts)


class _Merge(_Fold):
    def forward(self, *states: Tensor) -> list[Tensor]:
        half = len(states) // 2
        other = states[half:]
        return self.joined(states[:half], self.statistics(other), other[-1])


class _Readout(_Fold):
    def forward(self, *state: Tensor) -> Tensor:
        return self.encoder.finish(self.statistics(state), state[-1], self.prepared)
