"""Which weights shaped a state, told cheaply.

Two states may be merged only if the same weights made both. Within a process that is told by the
identity and version counters of the parameters, for next to nothing; across processes and days by
a digest of them, which is computed when it is first asked for.

What torch itself cannot see is not seen here either: writing through `parameter.data`, and an
attribute of a module of your own that its `extra_repr` does not show.
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

from setfold.errors import StateMismatchError
from setfold.files import digest_of

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
        memo: what the encoder has derived from these weights and would derive again and again.
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
        "memo",
    )

    def __init__(self, owner: Module, modules: Sequence[Module]) -> None:
        self._owner: weakref.ref[Module] | None = weakref.ref(owner)
        inner = [part for module in modules for part in module.modules()]
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
        self._versions = [_version(tensor) for tensor in self._tensors]
        self._structure = "\n".join(
            f"{name} {type(part).__qualname__}({part.extra_repr()})"
            for module in modules
            for name, part in module.named_modules(remove_duplicate=False)
        )
        first = first_tensor(modules)
        self.dtype = None if first is None else first.dtype
        self._digest: str | None = None
        self.memo: dict[str, Any] = {}

    @classmethod
    def from_digest(cls, digest: str | None) -> Fingerprint:
        """What a state from a file has: no live encoder, only the digest of its weights."""
        self = cls.__new__(cls)
        self._owner, self.dtype = None, None
        self._names, self._tensors = (), ()
        self._children, self._homes, self._versions = [], [], []
        self._structure, self._digest, self.memo = "", digest, {}
        return self

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
        return [_version(tensor) for tensor in self._tensors] == self._versions

    @property
    def digest(self) -> str:
        """The digest of the weights, the same in every process for the same weights."""
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
    if found is None or not found.is_current():
        found = _current[encoder] = Fingerprint(encoder, modules)
    if not torch.is_grad_enabled():
        found.digest  # noqa: B018  # now, while the weights are what they are; hashed once per change
    return found


def first_tensor(modules: Iterable[Module]) -> Tensor | None:
    """The first floating-point weight; what meets the elements comes first."""
    tensors = (t for m in modules for t in chain(m.parameters(), m.buffers()))
    return next((t for t in tensors if t.is_floating_point()), None)


def _version(tensor: Tensor) -> tuple[int, int]:
    """Changes when a tensor is written to or its storage is exchanged."""
    try:
        return tensor.data_ptr(), tensor._version
    except RuntimeError:  # a tensor made in inference mode has no version
        return tensor.data_ptr(), 0
