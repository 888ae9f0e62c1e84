"""The weights of an encoder: which of them shaped a state, and half precision.

Two states may be merged only if the same weights produced both, and an encoder may only continue a
state that its current weights produced. A `Weights` object is a copy of the weights at one moment.
Comparing with the copy takes a few microseconds for an encoder and a millisecond for eight million
weights. It notices every change of a value, however it was made: by an optimizer,
`load_state_dict`, `parameter.data` or a numpy array that shares memory.
Across processes a digest of the copy takes its place.

float16 and bfloat16 weights are kept as they are, and computed with in float32: float16 ends at
65504 and begins at 6e-8, so logits and sums leave its range, and 1e-8 is zero. The formulas of
setfold therefore run in float32 and are rounded once, at the end. Modules of the user, such as
features and heads, run in their own dtype.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from ctypes import c_char
from functools import cache
from inspect import signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import Module

from setfold.core.persist import digest_of
from setfold.core.torch_layers import arguments_of
from setfold.errors import InputError, StateMismatchError

UNKNOWN = "unknown"  # in place of a digest
NARROW = (torch.float16, torch.bfloat16)
Call = Callable[..., Tensor]  # (module, *inputs) -> its output
WATCH = "_weights_watch"  # the attribute in which an encoder keeps its watch; never pickled


class Weights:
    """The weights of one encoder at one moment, or only their digest.

    Attributes:
        dtype: dtype of the first weight, which the elements must share; None without weights.
        tensors: the parameters and buffers themselves; none if only the digest is known.
        kept: what the encoder derived from these weights and wants to use again. It is valid as
            long as the encoder has them.
        has_hooks: whether modules have hooks, which must run every time.
    """

    __slots__ = (
        "_digest",
        "_names",
        "_structure",
        "copies",
        "dtype",
        "has_hooks",
        "kept",
        "tensors",
    )

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]] = (),
        structure: str = "",
        dtype: torch.dtype | None = None,
        digest: str | None = None,
    ) -> None:
        self._names = [f"{number}.{name}" for number, (name, _) in enumerate(named)]
        self._structure = structure
        self._digest = digest
        self.tensors = tuple(tensor for _, tensor in named)
        self.copies = [_Copy(tensor) for tensor in self.tensors]
        self.dtype = dtype
        self.has_hooks = False
        self.kept: Any = None

    @classmethod
    def from_digest(cls, digest: str) -> Weights:
        """The weights of a state from a file: only their digest is known."""
        return cls(digest=digest)

    @classmethod
    def unknown(cls) -> Weights:
        """The weights of a state that was made where they cannot be read, as in torch.compile."""
        return cls.from_digest(UNKNOWN)

    @property
    def is_unknown(self) -> bool:
        return self._digest == UNKNOWN

    def are_of(self, encoder: Module) -> bool:
        """Whether this very encoder has these weights now."""
        watch: _Watch | None = vars(encoder).get(WATCH)
        return watch is not None and watch.weights is self and watch.is_current(encoder)

    @property
    def digest(self) -> str:
        """The digest of the weights: equal weights have equal digests in every process."""
        self._check_known()
        if self._digest is None:
            values = (kept.values for kept in self.copies)
            self._digest = digest_of(dict(zip(self._names, values, strict=True)), self._structure)
        return self._digest

    def match(self, other: Weights) -> bool:
        """Whether both are the same weights."""
        if self is other:
            return True
        other._check_known()
        return self.digest == other.digest

    def _check_known(self) -> None:
        if self.is_unknown:
            raise StateMismatchError(
                "a state that was made inside torch.compile or a transform of torch.func does not "
                "know its weights: create states outside, or compile and transform the encoder's "
                "forward."
            )

    def __reduce__(self) -> tuple[object, ...]:
        return Weights.from_digest, (self.digest,)

    def __deepcopy__(self, memo: object) -> Weights:
        return self


class _Watch:
    """Notices when an encoder's modules, settings, tensors or values change.

    The encoder keeps it. States keep only the `Weights`, and so do not keep the encoder alive.
    """

    def __init__(self, owner: Module, modules: Sequence[Module]) -> None:
        self._owner = weakref.ref(owner)
        inner = _submodules(modules)
        homes = [h for m in inner for h in (_parameters(m), m._buffers, m._modules)]
        hooks = [h for m in inner for h in (m._forward_hooks, m._forward_pre_hooks)]
        has_hooks = any(hooks) or any("forward" in vars(m) for m in inner)
        self._homes = [*homes, *hooks] if owner in inner else [*homes, *hooks, owner._modules]
        self._held = [dict(home) for home in self._homes]
        tensors = [
            (home, name, held)
            for home in homes
            for name, held in home.items()
            if isinstance(held, Tensor)
        ]
        self._single = [place for place in tensors if place[2].numel() == 1]
        settings = [(vars(m), name, value) for m in inner for name, value in _settings(m)]
        self._settings = [(attributes, name) for attributes, name, _ in settings]
        self._values = [copy(value) for _, _, value in settings]
        first = first_tensor(modules)
        dtype = None if first is None else first.dtype
        self.weights = Weights([place[1:] for place in tensors], _structure(inner), dtype)
        self.weights.has_hooks = has_hooks
        plain = [kept for kept in self.weights.copies if kept.bytes is not None]
        self._others = [kept for kept in self.weights.copies if kept.bytes is None]
        self._tensors = [kept.tensor for kept in plain]
        self._layout = self._layout_now()
        self._copied: list[Any] = [kept.bytes for kept in plain]
        self._memory = [
            (c_char * kept.tensor.nbytes).from_address(kept.tensor.data_ptr()) for kept in plain
        ]

    def is_current(self, encoder: Module) -> bool:
        """Whether this is the encoder, and nothing has changed.

        It runs in every update, so it is written for speed: comparing lists leaves the loops to C.
        """
        if self._owner() is not encoder:  # a copy of the encoder
            return False
        for home, name, held in self._single:  # tensors that == could compare
            if home.get(name) is not held:
                return False
        try:
            if self._homes != self._held:
                return False
        except (RuntimeError, TypeError, ValueError):  # another tensor: == has no truth value
            return False
        if [attributes.get(name) for attributes, name in self._settings] != self._values:
            return False
        if self._layout_now() != self._layout:  # the memory may have been freed
            return all(kept.is_current() for kept in self.weights.copies)
        # a bytearray compares its bytes with any memory, by memcmp
        if self._copied != self._memory:
            return False
        return all(kept.is_current() for kept in self._others)

    def _layout_now(self) -> tuple[list[Any], ...]:
        """Where the values are and how they are laid out."""
        tensors = self._tensors
        return (
            [*map(Tensor.data_ptr, tensors)],
            [*map(Tensor.numel, tensors)],
            [*map(Tensor.stride, tensors)],
        )


class _Copy:
    """A copy of a tensor's values, to notice that they changed.

    Attributes:
        tensor: the tensor.
        values: the copy.
        bytes: the memory of the copy; None unless the tensor is contiguous and on the CPU, so that
            their bytes can be compared.
    """

    __slots__ = ("bytes", "tensor", "values")

    def __init__(self, tensor: Tensor) -> None:
        if _is_freed(tensor):
            raise InputError(
                "the memory of a weight was freed, as FSDP does between calls: gather the weights "
                "before you use the encoder."
            )
        self.tensor = tensor
        self.bytes: bytearray | None = None
        if tensor.is_cpu and can_be_kept((tensor,)) and tensor.is_contiguous() and tensor.numel():
            self.bytes = bytearray(tensor.nbytes)
            flat = torch.frombuffer(self.bytes, dtype=tensor.dtype)
            self.values = flat.view(tensor.shape).copy_(tensor.detach())
        else:
            self.values = tensor.detach().clone()

    def is_current(self) -> bool:
        """Whether dtype, device, shape and values are the same."""
        tensor, values = self.tensor, self.values
        if (tensor.dtype, tensor.device) != (values.dtype, values.device):
            return False
        if _is_freed(tensor):
            return False
        return tensor.is_meta or torch.equal(tensor, values)


def _is_freed(tensor: Tensor) -> bool:
    """Whether a tensor has elements and no memory; reading it would end the process."""
    if tensor.numel() == 0 or tensor.is_meta or not can_be_kept((tensor,)):
        return False
    return tensor.untyped_storage().nbytes() == 0


def weights_of(encoder: Module, modules: Sequence[Module]) -> Weights:
    """The weights of an encoder as they are now; the same object as long as nothing changes.

    Args:
        encoder: the encoder.
        modules: those of its modules whose structure, parameters and buffers shape the state.
    """
    watch: _Watch | None = vars(encoder).get(WATCH)
    if watch is None or not watch.is_current(encoder):
        watch = _Watch(encoder, modules)
        if can_be_kept(kept.values for kept in watch.weights.copies):
            vars(encoder)[WATCH] = watch
    return watch.weights


def known_weights_of(encoder: Module) -> Weights | None:
    """The weights of an encoder, if they were copied before and have not changed."""
    watch: _Watch | None = vars(encoder).get(WATCH)
    return watch.weights if watch is not None and watch.is_current(encoder) else None


def kept_for(encoder: Module) -> Any:
    """What was kept with the encoder's weights, if it still has them; else None."""
    watch: _Watch | None = vars(encoder).get(WATCH)
    if watch is None or watch.weights.kept is None or not watch.is_current(encoder):
        return None
    return watch.weights.kept


def first_tensor(modules: Iterable[Module]) -> Tensor | None:
    """The first floating-point weight: that of the module that sees the elements first."""
    tensors = (t for m in modules for t in chain(m.parameters(), _of_replica(m), m.buffers()))
    return next((t for t in tensors if t.is_floating_point()), None)


def _of_replica(module: Module) -> Iterator[Tensor]:
    """What nn.DataParallel gives the copies of a module in place of parameters."""
    for part in module.modules():
        yield from getattr(part, "_former_parameters", {}).values()


def can_be_kept(tensors: Iterable[Tensor]) -> bool:
    """Whether all are ordinary tensors, not stand-ins of a function transform or a tracer."""
    return all(type(t) in (Tensor, nn.Parameter) and not _is_wrapped(t) for t in tensors)


def _is_wrapped(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def _parameters(module: Module) -> dict[str, Any]:
    """The parameters of a module by name; those of a copy that nn.DataParallel made are tensors."""
    return getattr(module, "_former_parameters", None) or module._parameters


def _submodules(modules: Iterable[Module]) -> list[Module]:
    """All modules within some; one that is used twice is listed twice, as a copy may not share it."""
    return [p for m in modules for _, p in m.named_modules(remove_duplicate=False)]


def _structure(parts: Iterable[Module]) -> str:
    """Classes and settings of modules, as text that later versions of setfold and torch give too.

    Files keep a digest of it. So of a class of setfold or torch only the arguments of its
    constructor count, and only those that are not the default: a later version may keep other
    attributes, and take new arguments.
    """
    return "\n".join(f"{type(part).__qualname__} {_lasting_settings(part)}" for part in parts)


def _lasting_settings(module: Module) -> list[tuple[str, object]]:
    settings = _settings(module)
    kind: Any = type(module)
    if not kind.__module__.startswith(("setfold.", "torch.")):
        return settings
    if (found := arguments_of(module)) is not None:  # parts of it have settings of their own
        return sorted((n, value) for n, value in found.items() if _is_plain(value, False))
    defaults = _defaults(kind)
    return [(n, value) for n, value in settings if n in defaults and value != defaults[n]]


@cache
def _defaults(kind: type[Module]) -> dict[str, object]:
    """By name, the default of each argument of a constructor; `Parameter.empty` if it has none."""
    return {n: argument.default for n, argument in signature(kind).parameters.items()}


def _settings(module: Module) -> list[tuple[str, object]]:
    """The plain public attributes of a module, which are taken for its settings.

    Lists are settings of setfold's modules. Elsewhere they may be logs, which grow.
    """
    lists = type(module).__module__.startswith("setfold.")
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and _is_plain(value, lists)
    )


def _is_plain(value: object, lists: bool) -> bool:
    """Whether a value prints the same in every process."""
    if isinstance(value, tuple) or (lists and isinstance(value, list)):
        return all(_is_plain(item, lists) for item in value)
    return isinstance(value, bool | int | float | str | None)


def version(tensor: Tensor) -> tuple[int, int]:
    """Changes when a tensor is written to or its storage is exchanged, except through `.data`."""
    try:
        return tensor.data_ptr(), tensor._version
    except RuntimeError:  # made in inference mode, or a stand-in of a function transform
        return id(tensor), 0


# ---- half precision ----------------------------------------------------------------------------


def caller_for(dtype: torch.dtype) -> Call:
    """A function that calls a module: as it is or, for a narrow dtype, in float32.

    >>> layer = nn.Linear(2, 2).half()
    >>> caller_for(torch.float16)(layer, torch.ones(1, 2)).dtype
    torch.float32
    """
    return _call_in_single if dtype in NARROW else _call


def _call(module: nn.Module, *inputs: Tensor) -> Tensor:
    return module(*inputs)


def _call_in_single(module: nn.Module, *inputs: Tensor) -> Tensor:
    """Call a module with inputs and weights in float32; gradients flow on to the weights."""
    wide = {
        f"{path}.{name}".lstrip("."): tensor.float()
        for path, part in module.named_modules()  # each once, or functional_call would not undo it
        for name, tensor in chain(part._parameters.items(), part._buffers.items())
        if tensor is not None and tensor.dtype in NARROW
    }
    rows = tuple(tensor.float() for tensor in inputs)
    return functional_call(module, wide, rows, tie_weights=False)
