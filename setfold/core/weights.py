"""Which weights shaped a state, told cheaply.

Two states may be merged only if the same weights made both. Within a process that is told by the
identity and version counters of the parameters, for next to nothing; across processes and days by
a digest of them, which is computed when it is first asked for.

What torch itself cannot see is not seen here either: writing through `parameter.data`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Module
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from setfold.core.persist import digest_of
from setfold.errors import StateMismatchError

UNKNOWN = "unknown"  # in place of a digest
_current: weakref.WeakKeyDictionary[Module, Fingerprint] = weakref.WeakKeyDictionary()


def _note_fused_step(optimizer: Optimizer, *_: Any) -> None:
    """Fused optimisers write to weights without a trace; leave the trace that others leave."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            increment_version([p for p in group["params"] if p.grad is not None])


register_optimizer_step_post_hook(_note_fused_step)


class Fingerprint:
    """The weights of one encoder at one moment, or only their digest.

    Attributes:
        dtype: of the first weight, which the elements must share; None where there is none.
    """

    __slots__ = (
        "_children",
        "_digest",
        "_homes",
        "_names",
        "_owner",
        "_structure",
        "_tensors",
        "_versions",
        "dtype",
    )

    def __init__(self, owner: Module, modules: Sequence[Module]) -> None:
        self._owner: weakref.ref[Module] | None = weakref.ref(owner)
        inner = _parts(modules)
        # Nothing here may keep the encoder alive: parameters do not, modules are held weakly.
        self._children = [
            (weakref.ref(parent), name, weakref.ref(child))
            for parent in (owner, *inner)
            for name, child in parent._modules.items()
            if child is not None and (parent is not owner or child in inner)
        ]
        self._homes = [
            (home, name, tensor)
            for part in inner
            for home in (part._parameters, part._buffers)
            for name, tensor in home.items()
            if tensor is not None
        ]
        self._names = tuple(f"{number}.{name}" for number, (_, name, _) in enumerate(self._homes))
        self._tensors = tuple(tensor for _, _, tensor in self._homes)
        self._versions = [version(tensor) for tensor in self._tensors]
        self._structure = _structure(inner)
        first = first_tensor(modules)
        self.dtype = None if first is None else first.dtype
        self._digest: str | None = None

    @classmethod
    def from_digest(cls, digest: str | None) -> Fingerprint:
        """What a state from a file has: no live encoder, only the digest of its weights."""
        self = cls.__new__(cls)
        self._owner, self.dtype = None, None
        self._names, self._tensors = (), ()
        self._children, self._homes, self._versions = [], [], []
        self._structure, self._digest = "", digest
        return self

    @classmethod
    def unknown(cls) -> Fingerprint:
        """What a state has that was made inside torch.compile, where weights cannot be told."""
        return cls.from_digest(UNKNOWN)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The weights themselves, as long as an encoder has them; none where only a digest is known."""
        return self._tensors

    def belongs_to(self, encoder: Module) -> bool:
        """Whether this is the fingerprint of that very encoder, as it is now."""
        return self._owner is not None and self._owner() is encoder and self.is_current()

    def is_current(self) -> bool:
        """Whether weights and modules are still what they were."""
        for home, name, tensor in self._homes:
            if home.get(name) is not tensor:
                return False
        for parent, name, child in self._children:
            module = parent()
            if module is None or module._modules.get(name) is not child():
                return False
        return self._weights_untouched()

    def _weights_untouched(self) -> bool:
        return [version(tensor) for tensor in self._tensors] == self._versions

    @property
    def digest(self) -> str:
        """The digest of the weights, the same in every process for the same weights."""
        if self._digest == UNKNOWN:
            raise StateMismatchError(
                "a state that was made inside torch.compile does not know its weights: make states "
                "outside, and compile the encoder's forward."
            )
        if self._digest is None:
            if not self._weights_untouched():
                raise StateMismatchError(
                    "the encoder's weights have changed since this state was begun, so which weights "
                    "shaped it can no longer be told. Save or merge states before the next optimiser "
                    "step, or make them under torch.no_grad(). (BatchNorm in training mode changes with "
                    "every chunk: call model.eval().)"
                )
            named = dict(zip(self._names, self._tensors, strict=True))
            self._digest = digest_of(named, self._structure)
        return self._digest

    def matches(self, other: Fingerprint) -> bool:
        """Whether both are of the same weights."""
        return self is other or self.digest == other.digest

    def surely_matches(self, other: Fingerprint) -> bool:
        """Whether both are of the same weights, and that can be told."""
        try:
            return self.matches(other)
        except StateMismatchError:
            return False

    def __reduce__(self) -> tuple[object, ...]:
        return Fingerprint.from_digest, (self.digest,)

    def __deepcopy__(self, memo: object) -> Fingerprint:
        return self


def fingerprint_of(encoder: Module, modules: Sequence[Module]) -> Fingerprint:
    """The fingerprint of an encoder as it is now; the same object while nothing changes.

    Args:
        encoder: whose it is.
        modules: those whose structure, parameters and buffers shape the state.
    """
    found = _current.get(encoder)
    if found is None or not found.is_current() or found._structure != _structure(_parts(modules)):
        found = _current[encoder] = Fingerprint(encoder, modules)
    if not torch.is_grad_enabled():
        found.digest  # noqa: B018  # now, while the weights are what they are; hashed once per change
    return found


def first_tensor(modules: Iterable[Module]) -> Tensor | None:
    """The first floating-point weight; what meets the elements comes first."""
    tensors = (t for m in modules for t in chain(m.parameters(), m.buffers()))
    return next((t for t in tensors if t.is_floating_point()), None)


def _parts(modules: Iterable[Module]) -> list[Module]:
    """All modules within some, one that is used twice twice: a copy may not share it."""
    return [p for m in modules for _, p in m.named_modules(remove_duplicate=False)]


def _structure(parts: Iterable[Module]) -> str:
    """What modules are beside their weights, in words: their classes and plain attributes."""
    return "\n".join(f"{type(part).__qualname__} {_settings(part)}" for part in parts)


def _settings(module: Module) -> list[tuple[str, object]]:
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and _is_plain(value)
    )


def _is_plain(value: object) -> bool:
    """Whether a value reads the same in every process."""
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, bool | int | float | str)


def version(tensor: Tensor) -> tuple[int, int]:
    """Changes when a tensor is written to or its storage is exchanged."""
    try:
        return tensor.data_ptr(), tensor._version
    except RuntimeError:  # made in inference mode, or a stand-in of a function transform
        return id(tensor), 0
