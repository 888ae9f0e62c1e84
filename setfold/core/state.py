"""SetState: what a fold has seen so far, as a value."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from setfold.core import persist as files
from setfold.core.statistic import STATISTICS, Parts, Statistics, join, refuse_non_finite
from setfold.core.weights import Fingerprint
from setfold.errors import FileError, InputError, StateMismatchError

_ABSORBING = threading.RLock()


class Pending(NamedTuple):
    """Small chunks that were only put aside: absorbing many costs hardly more than absorbing one."""

    chunks: tuple[Tensor, ...]  # each (B, n_i, d), the state's own copies
    bytes: int
    absorb: Callable[[Tensor], Statistics]  # depends on no weight that could change meanwhile


class SetState:
    """What a streaming encoder has seen of B sets: immutable, mergeable, differentiable.

    An encoder's `initial_state` begins one, its `update` returns new ones, and `merge` joins two
    that began alike. The slots were drawn once, at the beginning, and live here.

    Attributes:
        statistics: by statistic, the tensors that it keeps, each (B, ...), in float64. What small
            updates have put aside is absorbed when this is first asked for.
        count: (B,), the number of elements seen, int64.
        frame: what was fixed at the beginning: the slots of each level, each (1, K, h) where all
            sets share them or else (B, K, h).
        context: the readouts of earlier passes, each (B, ...); empty in a first pass.
        aggregate: the names of the aggregates that will be read.
        fingerprint: the weights that shape the state.

    >>> import setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=3, num_slots=4, dim_slot=8, dim_out=8).eval()
    >>> empty = encoder.initial_state()
    >>> left, right = (encoder.update(empty, torch.randn(1, n, 3)) for n in (5, 7))
    >>> left.merge(right).count
    tensor([12])
    """

    __slots__ = (
        "_statistics",
        "aggregate",
        "context",
        "count",
        "fingerprint",
        "frame",
        "pending",
        "prepared",
    )

    def __init__(
        self,
        statistics: Statistics,
        count: Tensor,
        *,
        frame: tuple[Tensor, ...] = (),
        context: tuple[Tensor, ...] = (),
        aggregate: tuple[str, ...],
        fingerprint: Fingerprint,
        prepared: Any = None,
        pending: Pending | None = None,
    ) -> None:
        self._statistics = statistics
        self.count = count
        self.frame = frame
        self.context = context
        self.aggregate = aggregate
        self.fingerprint = fingerprint
        # What the encoder derived from the frame without a graph, kept so that a small update
        # need not derive it again. Never saved, compared or moved.
        self.prepared = prepared
        self.pending = pending

    @property
    def statistics(self) -> Statistics:
        if self.pending is not None:
            with _ABSORBING, torch.no_grad():  # as it was when the chunks came
                if self.pending is not None:  # another thread may have been faster
                    found = self.pending.absorb(torch.cat(self.pending.chunks, 1))
                    refuse_non_finite(found)
                    self._statistics = join(self._statistics, found)
                    self.pending = None
        return self._statistics

    @property
    def slots(self) -> Tensor | None:
        """(B, K, h), the slots that the elements met; None for an encoder without slots."""
        if not self.frame:
            return None
        return self.frame[0].expand(self.batch_size, -1, -1)

    @property
    def has_own_slots(self) -> bool:
        """Whether each set has slots of its own, as a stack of training states may."""
        return any(slots.shape[0] != 1 for slots in self.frame)

    @property
    def batch_size(self) -> int:
        """The number B of sets; unlike len(state), it may be symbolic in an exported program."""
        return self.count.shape[0]

    @property
    def device(self) -> torch.device:
        return self.count.device

    def __len__(self) -> int:
        return self.batch_size

    def __repr__(self) -> str:
        kept = ", ".join(
            f"{name}={'+'.join(str(tuple(p.shape[1:])) for p in parts)}"
            for name, parts in self.statistics.items()
        )
        elements = int(self.count.sum()) if self.count.device.type != "meta" else "?"
        return f"SetState({len(self)} sets, {elements} elements, aggregate={'+'.join(self.aggregate)}, {kept})"

    def with_statistics(
        self, statistics: Statistics, count: Tensor, fingerprint: Fingerprint | None = None
    ) -> SetState:
        """A state that began like this one and has seen something else."""
        return SetState(
            statistics,
            count,
            frame=self.frame,
            context=self.context,
            aggregate=self.aggregate,
            fingerprint=fingerprint or self.fingerprint,
            prepared=self.prepared,
        )

    def put_aside(
        self, elements: Tensor, count: Tensor, absorb: Callable[[Tensor], Statistics]
    ) -> SetState:
        """A state that has seen `elements` too, and will absorb them later."""
        with _ABSORBING:  # what waits and what it waits to join belong together
            chunks, held, _ = self.pending or Pending((), 0, absorb)
            state = self.with_statistics(self._statistics, count)
        state.pending = Pending((*chunks, elements.clone()), held + elements.nbytes, absorb)
        return state

    def merge(self, other: SetState) -> SetState:
        """The state of the union of what both have seen, set by set.

        Associative and commutative; the identity is the state both began with.

        Raises:
            StateMismatchError: the states have other slots, weights, aggregates or shapes.
        """
        self.refuse_unlike(other)
        self._refuse_other_beginning(other)
        left, right = self.trackable(), other.trackable()
        joined = join(left.statistics, right.statistics)
        return left.with_statistics(joined, left.count + right.count)

    def refuse_unlike(self, other: SetState, doing: str = "merge") -> None:
        """Raise unless another state has the form and the weights of this one."""
        if not isinstance(other, SetState):
            raise StateMismatchError(f"expected a state to {doing}; got {type(other).__name__}.")
        if self.aggregate != other.aggregate:
            _refuse(doing, "aggregate", "+".join(self.aggregate), "+".join(other.aggregate))
        if self.device != other.device:
            _refuse(doing, "device", self.device, other.device, "move one with state.to(device)")
        if self._shapes() != other._shapes():
            _refuse(doing, "shapes", self._shapes(), other._shapes())
        mine, others = self._context_shapes(), other._context_shapes()
        if mine != others:
            _refuse(doing, "contexts", mine, others, "both must follow the same earlier pass")
        if not self.fingerprint.matches(other.fingerprint):
            digests = self.fingerprint.digest[:8], other.fingerprint.digest[:8]
            _refuse(doing, "weights", *digests, remedy="fold both with the same model")

    def _refuse_other_beginning(self, other: SetState) -> None:
        """Raise unless another state began with the slots and the context of this one."""
        if len(self) != len(other):
            _refuse("merge", "numbers of sets", len(self), len(other))
        if not all(_same(a, b) for a, b in zip(self.frame, other.frame, strict=True)):
            raise StateMismatchError(
                "cannot merge states with different slots: every state of one set must begin with the "
                "same slots. Begin both from one initial_state, use encoder.eval(), whose slots are "
                "the same everywhere, or give both the same generator seed."
            )
        if not all(_same(a, b) for a, b in zip(self.context, other.context, strict=True)):
            raise StateMismatchError(
                "cannot merge states with different contexts: both must follow the same earlier pass."
            )

    def _shapes(self) -> dict[str, list[tuple[int, ...]]]:
        """By name, the shapes of what is held for one set."""
        shapes = {name: [tuple(p.shape[1:]) for p in ps] for name, ps in self.statistics.items()}
        shapes["slots"] = [tuple(slots.shape[1:]) for slots in self.frame]
        return shapes

    def _context_shapes(self) -> list[tuple[int, ...]]:
        return [tuple(part.shape[1:]) for part in self.context]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, as they are laid out in a file or a table."""
        named = {
            f"{name}.{i}": p for name, parts in self.statistics.items() for i, p in enumerate(parts)
        }
        named["count"] = self.count
        named |= {f"slots.{i}": slots for i, slots in enumerate(self.frame)}
        named |= {f"context.{i}": part for i, part in enumerate(self.context)}
        return named

    @classmethod
    def from_tensors(
        cls, named: dict[str, Tensor], aggregate: Sequence[str], fingerprint: Fingerprint
    ) -> SetState:
        """The state whose `tensors` these are."""

        def numbered(prefix: str) -> Parts:
            names = (f"{prefix}.{i}" for i in range(len(named)))
            return tuple(named[name] for name in names if name in named)

        statistics = {name: parts for name in STATISTICS if (parts := numbered(name))}
        return cls(
            statistics,
            named["count"],
            frame=numbered("slots"),
            context=numbered("context"),
            aggregate=tuple(aggregate),
            fingerprint=fingerprint,
        )

    def _map(self, function: Any) -> SetState:
        named = {name: function(tensor) for name, tensor in self.tensors().items()}
        return SetState.from_tensors(named, self.aggregate, self.fingerprint)

    def to(self, device: torch.device | str) -> SetState:
        """The same state on another device; totals keep their precision."""
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError):
            raise InputError(
                f"state.to takes a device, such as 'cpu' or 'cuda'; got {device!r}."
            ) from None

        def move(tensor: Tensor) -> Tensor:
            if target.type == "mps" and tensor.dtype == torch.float64:
                tensor = tensor.float()  # the device has no float64
            return tensor.to(target)

        return self._map(move)

    def detach(self) -> SetState:
        """The same values without their gradients' history."""
        return self._map(Tensor.detach)

    def __getitem__(self, item: int | slice) -> SetState:
        """One set (as a batch of one) or a slice of them."""
        if not isinstance(item, slice):
            try:
                item = operator.index(item)
            except TypeError:
                raise InputError(
                    f"a state is indexed by a number or a slice; got {type(item).__name__}."
                ) from None
            if not -len(self) <= item < len(self):
                raise IndexError(f"set {item} of a state of {len(self)} sets")
            item = slice(item % len(self), item % len(self) + 1)
        shared = {f"slots.{i}" for i, slots in enumerate(self.frame) if slots.shape[0] == 1}
        named = {n: t if n in shared else t[item] for n, t in self.tensors().items()}
        return SetState.from_tensors(named, self.aggregate, self.fingerprint)

    @staticmethod
    def stack(states: Iterable[SetState]) -> SetState:
        """One state of all the sets of several states, in order; `state[i]` takes them apart.

        The states may have different slots, as those of a training step may.
        """
        states = list(states)
        if not states:
            raise InputError("SetState.stack needs at least one state; got none.")
        first = states[0]
        for other in states:
            SetState.refuse_unlike(first, other, "stack")
        named = {}
        for name, tensor in first.tensors().items():
            tensors = [state.tensors()[name] for state in states]
            if name.startswith("slots."):
                if all(t.shape[0] == 1 and _same(tensor, t) for t in tensors):
                    named[name] = tensor
                    continue
                tensors = [t.expand(len(s), -1, -1) for t, s in zip(tensors, states, strict=True)]
            named[name] = torch.cat(tensors)
        return SetState.from_tensors(named, first.aggregate, first.fingerprint)

    def save(self, path: str | Path) -> None:
        """Write the state to a file that any process can load and merge, without pickle."""
        description = {"aggregate": list(self.aggregate), "digest": self.fingerprint.digest}
        files.write(path, "state", self.tensors(), description)

    @staticmethod
    def load(path: str | Path) -> SetState:
        """Read a state that `save` wrote.

        Raises:
            FileError: the file is missing, truncated, corrupt, foreign or of another version.
        """
        _, tensors, description = files.read(path, "state")
        try:
            fingerprint = Fingerprint.from_digest(str(description["digest"]))
            return SetState.from_tensors(tensors, description["aggregate"], fingerprint)
        except (KeyError, TypeError) as error:
            raise FileError(f"{path} is corrupt: it lacks {error}. Write it anew.") from error

    def trackable(self) -> SetState:
        """Itself, or a copy if autograd could not save what was made in inference mode."""
        return self.clone() if torch.is_grad_enabled() and self.count.is_inference() else self

    def clone(self) -> SetState:
        """The same values in memory of their own; gradients flow through, as through any clone."""
        return self._map(Tensor.clone)

    def __deepcopy__(self, memo: object) -> SetState:
        """A copy of the values; like every deep copy of results, without gradients' history."""
        return self.detach().clone()

    def __reduce__(self) -> tuple[Any, ...]:
        named = {name: tensor.detach() for name, tensor in self.tensors().items()}
        return SetState.from_tensors, (named, self.aggregate, self.fingerprint)


def _same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal, or one holds for every set what the other holds for one."""
    if left is right:
        return True
    if left.shape[1:] != right.shape[1:]:
        return False
    shape = torch.broadcast_shapes(left.shape, right.shape)
    return torch.equal(left.expand(shape), right.expand(shape))


def _refuse(doing: str, what: str, left: object, right: object, remedy: str = "") -> None:
    remedy = remedy or "fold both with the same model"
    raise StateMismatchError(
        f"cannot {doing} states of different {what}: {left} and {right}; {remedy}."
    )
