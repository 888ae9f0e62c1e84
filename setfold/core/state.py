"""SetState: what a fold has seen so far, as an immutable value."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from setfold.core import persist
from setfold.core.state_files import check_form, describe_fields, fields_from, names_of
from setfold.core.statistic import Fields, Parts, Statistics, join
from setfold.core.weights import Weights
from setfold.errors import FileError, InputError, StateMismatchError


class SetState:
    """What a streaming encoder has seen of B sets: immutable, mergeable, differentiable.

    An encoder's `initial_state` creates one, its `update` returns new ones, and `merge` joins two
    that began alike. Slots are drawn once, by `initial_state`, and are kept here.

    Attributes:
        fields: the declaration of the state: by name, a statistic and its shape for one set.
        statistics: by field, the tensors of its statistic, each (B, ...), in float64.
        count: (B,), the number of elements seen, int64.
        frame: what was fixed at the beginning: the slots of each level, (1, K, h) if all sets share
            them, else (B, K, h).
        context: the readouts of earlier passes, each (B, ...); empty in a first pass.
        weights: the weights that shape the state.

    >>> import setfold
    >>> encoder = setfold.SlotSetEncoder(dim_in=3, num_slots=4, dim_slot=8, dim_out=8).eval()
    >>> empty = encoder.initial_state()
    >>> left, right = (encoder.update(empty, torch.randn(1, n, 3)) for n in (5, 7))
    >>> left.merge(right).count
    tensor([12])
    """

    __slots__ = ("context", "count", "fields", "frame", "prepared", "statistics", "weights")

    def __init__(
        self,
        fields: Fields,
        statistics: Statistics,
        count: Tensor,
        *,
        frame: tuple[Tensor, ...] = (),
        context: tuple[Tensor, ...] = (),
        weights: Weights,
        prepared: Any = None,
    ) -> None:
        self.fields = fields
        self.statistics = statistics
        self.count = count
        self.frame = frame
        self.context = context
        self.weights = weights
        # What the encoder derived from the frame and the weights without a graph, for the next
        # update. Never saved, compared or moved.
        self.prepared = prepared

    @property
    def slots(self) -> Tensor | None:
        """(B, K, h), the slots that the elements attend to; None for an encoder without slots."""
        if not self.frame:
            return None
        return self.frame[0].expand(self.batch_size, -1, -1)

    @property
    def has_own_slots(self) -> bool:
        """Whether each set has slots of its own, like a stack of training states."""
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
        kept = ", ".join(f"{n}={f.statistic}{list(f.shape)}" for n, f in self.fields.items())
        elements = int(self.count.sum()) if self.count.device.type != "meta" else "?"
        return f"SetState({len(self)} sets, {elements} elements, {kept})"

    def with_statistics(self, statistics: Statistics, count: Tensor) -> SetState:
        """A state with the same beginning that has seen other elements."""
        return SetState(
            self.fields,
            statistics,
            count,
            frame=self.frame,
            context=self.context,
            weights=self.weights,
            prepared=self.prepared,
        )

    # ---- merging -----------------------------------------------------------------------------

    def merge(self, other: SetState) -> SetState:
        """The state of the union of what both have seen, set by set.

        Merging is associative and commutative. The identity is the state that both began with.

        Raises:
            StateMismatchError: the states differ in slots, weights, fields or shapes.
        """
        self.check_compatible(other)
        self._check_same_beginning(other)
        left, right = self.trackable(), other.trackable()
        joined = join(self.fields, left.statistics, right.statistics)
        return left.with_statistics(joined, left.count + right.count)

    def check_compatible(self, other: SetState, verb: str = "merge") -> None:
        """Raise StateMismatchError unless another state has the same fields and weights."""
        if not isinstance(other, SetState):
            raise StateMismatchError(f"expected a state to {verb}; got {type(other).__name__}.")
        if self.fields is not other.fields and self.fields != other.fields:
            left, right = describe_fields(self.fields), describe_fields(other.fields)
            raise _mismatch(verb, "fields", left, right)
        if self.device != other.device:
            advice = "move one of them with state.to(device)"
            raise _mismatch(verb, "devices", self.device, other.device, advice)
        mine, others = _shapes(self.frame), _shapes(other.frame)
        if mine != others:
            raise _mismatch(verb, "numbers of slots", mine, others)
        mine, others = _shapes(self.context), _shapes(other.context)
        if mine != others:
            advice = "both must follow the same earlier pass"
            raise _mismatch(verb, "contexts", mine, others, advice)
        if not self.weights.match(other.weights):
            raise _mismatch(verb, "weights", self.weights.digest[:8], other.weights.digest[:8])

    def _check_same_beginning(self, other: SetState) -> None:
        """Raise unless another state began with the same slots and context."""
        if self.count.shape != other.count.shape:
            raise _mismatch("merge", "numbers of sets", len(self), len(other))
        if not all(_same(a, b) for a, b in zip(self.frame, other.frame, strict=True)):
            raise StateMismatchError(
                "cannot merge states with different slots: all states of one set must begin with "
                "the same slots. Begin both from one initial_state, call encoder.eval(), which "
                "uses the same slots everywhere, or pass generators with the same seed."
            )
        if not all(_same(a, b) for a, b in zip(self.context, other.context, strict=True)):
            raise StateMismatchError(
                "cannot merge states with different contexts: both must follow the same earlier "
                "pass."
            )

    # ---- tensors by name ---------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, as they are stored in a file or a table."""
        named = {
            f"{name}.{i}": p for name, parts in self.statistics.items() for i, p in enumerate(parts)
        }
        named["count"] = self.count
        named |= {f"slots.{i}": slots for i, slots in enumerate(self.frame)}
        named |= {f"context.{i}": part for i, part in enumerate(self.context)}
        return named

    @classmethod
    def from_tensors(cls, named: dict[str, Tensor], fields: Fields, weights: Weights) -> SetState:
        """The state whose `tensors` these are.

        Raises:
            KeyError: a tensor is missing.
        """

        def numbered(prefix: str) -> Parts:
            names = (f"{prefix}.{i}" for i in range(len(named)))
            return tuple(named[name] for name in names if name in named)

        statistics = {
            name: tuple(named[f"{name}.{i}"] for i in range(len(field.statistic.empty)))
            for name, field in fields.items()
        }
        return cls(
            fields,
            statistics,
            named["count"],
            frame=numbered("slots"),
            context=numbered("context"),
            weights=weights,
        )

    def _map(self, function: Any) -> SetState:
        named = {name: function(tensor) for name, tensor in self.tensors().items()}
        return SetState.from_tensors(named, self.fields, self.weights)

    def to(self, device: str | torch.device) -> SetState:
        """The same state on another device."""
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
        """The same values without a graph."""
        return self._map(Tensor.detach)

    def clone(self) -> SetState:
        """The same values in memory of their own; gradients flow through, as through any clone."""
        return self._map(Tensor.clone)

    def trackable(self) -> SetState:
        """Itself, or a copy if it was made in inference mode, whose tensors autograd rejects."""
        return self.clone() if torch.is_grad_enabled() and self.count.is_inference() else self

    # ---- sets --------------------------------------------------------------------------------

    def __getitem__(self, item: int | slice | Sequence[int] | Tensor) -> SetState:
        """One set (as a batch of one), a slice of the sets, or the sets at some places.

        Places are a list or a tensor of integers, in any order, or a bool tensor (B,).
        """
        if not isinstance(item, slice):
            item = self._places(item)
        shared = {f"slots.{i}" for i, slots in enumerate(self.frame) if slots.shape[0] == 1}
        named = {n: t if n in shared else t[item] for n, t in self.tensors().items()}
        return SetState.from_tensors(named, self.fields, self.weights)

    def _places(self, item: Any) -> slice | Tensor:
        """What selects sets from a tensor (B, ...).

        Raises:
            IndexError: a place is out of range.
            InputError: it is not made of integers.
        """
        sets = len(self)
        if isinstance(item, Tensor) and item.dtype == torch.bool and item.shape == (sets,):
            return item.to(self.device)
        if isinstance(item, Tensor) and item.dim() == 1:
            item = item.tolist()
        several = isinstance(item, list)
        try:
            places = [operator.index(place) for place in (item if several else [item])]
            if several and any(isinstance(place, bool) for place in item):
                raise TypeError
        except TypeError:
            raise InputError(
                "index a state with integers, a slice, or a bool tensor with one value for each "
                f"set; got {item!r:.60}."
            ) from None
        for place in places:
            if not -sets <= place < sets:
                raise IndexError(f"index {place} is out of range for a state of {sets} sets")
        if several:
            return torch.tensor(places, dtype=torch.long, device=self.device)
        return slice(places[0] % sets, places[0] % sets + 1)

    @staticmethod
    def stack(states: Iterable[SetState]) -> SetState:
        """One state with the sets of several states, in order; `state[i]` separates them again.

        The states may have different slots, as training states do.
        """
        states = list(states)
        if not states:
            raise InputError("SetState.stack needs at least one state; got none.")
        first = states[0]
        for other in states:
            SetState.check_compatible(first, other, "stack")
        named = {}
        for name, tensor in first.tensors().items():
            tensors = [state.tensors()[name] for state in states]
            if name.startswith("slots."):
                if all(t.shape[0] == 1 and _same(tensor, t) for t in tensors):
                    named[name] = tensor
                    continue
                tensors = [t.expand(len(s), -1, -1) for t, s in zip(tensors, states, strict=True)]
            named[name] = torch.cat(tensors)
        return SetState.from_tensors(named, first.fields, first.weights)

    # ---- files and copies --------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What a file must keep in addition to `tensors`, as JSON."""
        return {"fields": describe_fields(self.fields), "digest": self.weights.digest}

    @classmethod
    def from_file(cls, named: dict[str, Tensor], description: Mapping[str, Any]) -> SetState:
        """The state with these `tensors` and this description, which may come from anywhere.

        Raises:
            FileError: a statistic is not defined here.
            ValueError: the tensors are not exactly those of a state that the description declares.
        """
        fields, digest = fields_from(description.get("fields")), description.get("digest")
        if not isinstance(digest, str) or len(digest) != 2 * persist.DIGEST_BYTES:
            raise ValueError(f"expected the digest of the weights; got {digest!r:.60}")
        missing = {*names_of(fields)} - named.keys()
        if missing:
            raise ValueError(f"there is no {min(missing)!r}")
        state = cls.from_tensors(named, fields, Weights.from_digest(digest))
        unknown = named.keys() - state.tensors().keys()
        if unknown:
            raise ValueError(f"{min(unknown)!r} belongs to no field")
        check_form(state)
        return state

    def save(self, path: str | Path) -> None:
        """Write the state to a file that any process can load and merge, without pickle."""
        persist.write(path, "state", self.tensors(), self.describe())

    @staticmethod
    def load(path: str | Path) -> SetState:
        """Read a state that `save` wrote.

        Raises:
            FileError: the file is missing, truncated, corrupt, of another kind or version, or keeps
                a statistic that is not defined here.
        """
        _, tensors, description = persist.read(path, "state")
        try:
            return SetState.from_file(tensors, description)
        except FileError:
            raise
        except Exception as error:  # statistics of other packages may raise anything for a shape
            raise FileError(f"{path} is corrupt: {error}. Write it again.") from error

    def __deepcopy__(self, memo: object) -> SetState:
        """A copy of the values, without a graph."""
        return self.detach().clone()

    def __reduce__(self) -> tuple[Any, ...]:
        named = {name: tensor.detach() for name, tensor in self.tensors().items()}
        return SetState.from_tensors, (named, self.fields, self.weights)


def _same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal after broadcasting the first dimension."""
    if left is right:
        return True
    if left.shape[1:] != right.shape[1:]:
        return False
    shape = torch.broadcast_shapes(left.shape, right.shape)
    return torch.equal(left.expand(shape), right.expand(shape))


def _shapes(tensors: Iterable[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape[1:]) for tensor in tensors]


def _mismatch(
    verb: str, what: str, left: object, right: object, advice: str = "use the same model for both"
) -> StateMismatchError:
    return StateMismatchError(
        f"cannot {verb} states with different {what}: {left} and {right}; {advice}."
    )
