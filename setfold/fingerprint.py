"""Which weights shaped a state, told cheaply.

Two states may be merged only if the same weights made both. Within a process that is told by the
identity and version counters of the parameters, for next to nothing; across processes and days by
a digest of them, which is computed when it is first asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import chain

from torch import Tensor, is_grad_enabled
from torch.nn import Module

from setfold.errors import StateMismatchError
from setfold.files import digest_of

_current: weakref.WeakKeyDictionary[Module, Fingerprint] = weakref.WeakKeyDictionary()
_structures: weakref.WeakKeyDictionary[Module, str] = weakref.WeakKeyDictionary()


class Fingerprint:
    """The weights of one encoder at one moment, or only their digest."""

    __slots__ = ("_digest", "_names", "_owner", "_structure", "_tensors", "_versions", "dtype")

    def __init__(self, owner: Module, modules: Sequence[Module]) -> None:
        self._owner: weakref.ref[Module] | None = weakref.ref(owner)
        self._names, self._tensors = _named_tensors(modules)
        self._versions = [_version(t) for t in self._tensors]
        first = first_tensor(modules)
        self.dtype = None if first is None else first.dtype
        self._structure = "\n".join(map(_structure, modules))
        self._digest: str | None = None

    @classmethod
    def from_digest(cls, digest: str | None) -> Fingerprint:
        """What a state from a file has: no live encoder, only the digest of its weights."""
        self = cls.__new__(cls)
        self._owner = None
        self._names, self._tensors, self._versions = (), (), []
        self._structure, self._digest, self.dtype = "", digest, None
        return self

    def belongs_to(self, encoder: Module) -> bool:
        """Whether this is the fingerprint of that very encoder, as it is now."""
        return self._owner is not None and self._owner() is encoder and self.is_current()

    def is_current(self) -> bool:
        """Whether the weights are still what they were."""
        return [_version(t) for t in self._tensors] == self._versions

    @property
    def digest(self) -> str:
        """The digest of the weights, the same in every process for the same weights."""
        if self._digest is None:
            if not self.is_current():
                raise StateMismatchError(
                    "the encoder's weights have changed since this state was begun, so which weights "
                    "shaped it can no longer be told. Save or merge states before the next optimiser "
                    "step, or make them under torch.no_grad()."
                )
            named = dict(zip(self._names, self._tensors, strict=True))
            self._digest = digest_of(named, self._structure)
        return self._digest

    def matches(self, other: Fingerprint) -> bool:
        """Whether both are of the same weights."""
        return self is other or self.digest == other.digest

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
    fresh = Fingerprint(encoder, modules)
    known = _current.get(encoder)
    if known is not None and known._versions == fresh._versions:
        return known
    _current[encoder] = fresh
    if not is_grad_enabled():
        fresh.digest  # noqa: B018  # now, while the weights are what they are; hashed once per change
    return fresh


def first_tensor(modules: Iterable[Module]) -> Tensor | None:
    """The first floating-point weight; what meets the elements comes first."""
    tensors = (t for m in modules for t in chain(m.parameters(), m.buffers()))
    return next((t for t in tensors if t.is_floating_point()), None)


def _structure(module: Module) -> str:
    """What a module is made of, in words; written down once, because that takes a while."""
    if module not in _structures:
        _structures[module] = str(module)
    return _structures[module]


def _named_tensors(modules: Sequence[Module]) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    named: dict[str, Tensor] = {}
    for number, module in enumerate(modules):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            named[f"{number}.{name}"] = tensor
    return tuple(named), tuple(named.values())


def _version(tensor: Tensor) -> tuple[int, int]:
    """Changes when a tensor is written to or its storage is exchanged."""
    try:
        return tensor.data_ptr(), tensor._version
    except RuntimeError:  # a tensor made in inference mode has no version
        return tensor.data_ptr(), 0
