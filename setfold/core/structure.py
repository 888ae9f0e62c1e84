"""The structure of a model as JSON: its class and its constructor arguments.

A model must keep its constructor arguments as attributes of the same names. Arguments that are
modules are described in the same way. Only classes of setfold and torch.nn are constructed, and
classes that the caller allows by import path.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from setfold.core.torch_layers import NOT_NEEDED, arguments_of, check_arguments
from setfold.errors import CancelledAttentionWarning, DescriptionError

PLACEMENT = ("device", "dtype")  # arguments that are not part of the structure
SCALARS = (bool, int, float, str, type(None))
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Constructors call torch functions about 5 times for each tensor that they create.
CALLS, CALLS_EACH = 5_000, 25
DRAWING = (Tensor.normal_, nn.init.normal_)
MAX_SHOWN = 500  # characters of an error of a constructor

T = TypeVar("T")


# ---- from a module to its description ------------------------------------------------------------


def describe(module: nn.Module) -> dict[str, Any]:
    """The class of a module and its constructor arguments, as JSON.

    Raises:
        DescriptionError: an argument was not kept as an attribute, or is not a supported type; or
            the class cannot be imported elsewhere.
    """
    kind = type(module)
    if kind in CONTAINERS:
        # _modules, because children() would drop a module that is used twice
        children = [[n, describe(c)] for n, c in module._modules.items() if c is not None]
        return {"class": _name_of(kind), "children": children}
    found = arguments_of(module)
    if found is None:
        arguments = _arguments(module)
    else:
        arguments = {n: _encode(value, f"{kind.__name__}.{n}") for n, value in found.items()}
    return {"class": _name_of(kind), "arguments": arguments}


def _arguments(module: nn.Module) -> dict[str, Any]:
    """The constructor arguments of a module, as JSON, from its attributes of the same names."""
    kind, arguments = type(module), {}
    no_arguments = kind.__init__ is nn.Module.__init__  # its signature is (*args, **kwargs)
    for name, parameter in () if no_arguments else inspect.signature(kind).parameters.items():
        if name in PLACEMENT:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if _is_torch(kind):  # nn.Identity accepts and ignores any argument
                continue
            raise DescriptionError(
                f"{kind.__name__} cannot be saved: its constructor takes *{name}. Name every "
                "constructor argument."
            )
        if hasattr(module, name):
            value = getattr(module, name)
            if _is_torch(kind) and isinstance(value, Tensor):
                value = True  # torch.nn keeps the parameter itself as the attribute of bias=True
            arguments[name] = _encode(value, f"{kind.__name__}.{name}")
        elif not _is_torch(kind):
            raise DescriptionError(
                f"{kind.__name__} cannot be saved: keep its constructor argument {name!r} as an "
                f"attribute, self.{name} = {name}."
            )
        elif name not in NOT_NEEDED:
            raise DescriptionError(
                f"{kind.__name__} cannot be saved, because it does not keep its constructor "
                f"argument {name!r}. Construct it in a module of your own, which keeps it."
            )
    return arguments


def _encode(value: Any, where: str) -> Any:
    """An argument as JSON; `where` names it in the error."""
    if isinstance(value, nn.Module):
        return {"module": describe(value)}
    if isinstance(value, (list, tuple)):
        return [_encode(item, where) for item in value]
    if isinstance(value, SCALARS):
        return value
    raise DescriptionError(
        f"{where} is a {type(value).__name__}, which cannot be saved. Constructor arguments must "
        "be numbers, booleans, strings, None, modules, or lists of these."
    )


def _name_of(kind: type[nn.Module]) -> str:
    if _exported(kind.__name__) is kind:
        return f"setfold.{kind.__name__}"
    if _is_torch(kind):
        return f"torch.nn.{kind.__name__}"
    if kind.__module__ == "__main__":
        raise DescriptionError(
            f"{kind.__name__} cannot be saved: it is defined in a script or notebook, where no "
            "other process can import it. Move it to a module, and import it from there."
        )
    return f"{kind.__module__}.{kind.__qualname__}"


def foreign_names(structure: Any) -> Iterator[str]:
    """The import paths outside setfold and torch.nn in a description."""
    for described in _modules_in(structure):
        name = described["class"]
        if isinstance(name, str) and name.rpartition(".")[0] not in ("setfold", "torch.nn"):
            yield name


def _modules_in(structure: Any) -> Iterator[dict[str, Any]]:
    """The descriptions of all modules within a description."""
    if isinstance(structure, dict):
        if "class" in structure:
            yield structure
        for value in structure.values():
            yield from _modules_in(value)
    elif isinstance(structure, list):
        for value in structure:
            yield from _modules_in(value)


# ---- from a description to a module --------------------------------------------------------------


def rebuild(structure: Any, *, allow: set[str]) -> nn.Module:
    """Construct a module from its description.

    Args:
        structure: from `describe`.
        allow: import paths of classes outside setfold and torch.nn that may be constructed.

    Raises:
        DescriptionError: a class is not allowed, or its constructor raises.
    """
    return _attempt(lambda: _Builder(allow).build(structure))


def sketch(structure: Any, *, allow: set[str], num_tensors: int) -> nn.Module:
    """The module that `rebuild` would construct, with tensors that have no memory and no values.

    A class outside setfold and torch.nn whose constructor needs values is constructed in memory,
    but its arguments are not. How long such a constructor runs is not limited.

    Args:
        structure: from `describe`.
        allow: import paths of classes outside setfold and torch.nn that may be constructed.
        num_tensors: how many tensors the module should have. The time that its construction may
            take depends on it.

    Raises:
        DescriptionError: a class is not allowed, its constructor raises, or it creates far more
            than `num_tensors` tensors.
    """
    described = _attempt(lambda: sum(1 for _ in _modules_in(structure)))
    calls = CALLS + CALLS_EACH * (num_tensors + described)

    def build(own_device: str) -> nn.Module:
        # The mode of gradients is restored here: if the limit stops a constructor within no_grad,
        # it also stops the call that would restore it.
        gradients = torch.set_grad_enabled(torch.is_grad_enabled())
        with gradients, torch.device("meta"), _Sketching(calls) as sketching:
            own = partial(sketching.own_code, own_device)
            return _attempt(lambda: _Builder(allow, own).build(structure))

    try:
        return build("meta")
    except DescriptionError:
        if not any(foreign_names(structure)):
            raise
        return build("cpu")


class _Sketching(TorchFunctionMode):
    """Limits the calls of torch functions, and leaves tensors without memory as they are.

    Drawing random numbers for them has no effect, but torch would import 800 modules for it.
    """

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.limited = True

    @contextmanager
    def own_code(self, device: str) -> Iterator[None]:
        """Do not limit the calls in the user's own code, and set its device."""
        self.limited = False
        with torch.device(device):
            yield
        self.limited = True

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.calls -= self.limited
        if self.calls < 0:
            raise DescriptionError(
                "the model is described as far larger than the tensors that are stored with it."
            )
        kwargs = kwargs or {}
        if function in DRAWING:
            drawn: Tensor = args[0] if args else kwargs["tensor"]
            if drawn.is_meta:
                return drawn
        if function is torch.randn and not kwargs.keys() - {"dtype", "requires_grad"}:
            function = torch.empty
        return function(*args, **kwargs)


class _Unrepeatable:
    """A list or text that cannot be repeated, as [2] * 10**9 would fill the memory."""

    def __mul__(self, times: Any) -> Any:
        raise TypeError("a number was expected instead of a list or text")

    __rmul__ = __mul__


class _List(_Unrepeatable, list[Any]):
    pass


class _Tuple(_Unrepeatable, tuple[Any, ...]):
    __slots__ = ()


class _Text(_Unrepeatable, str):
    __slots__ = ()


class _Builder:
    """Constructs modules.

    Args:
        allow: import paths of classes outside setfold and torch.nn that may be constructed.
        own_code: the context in which their constructors run, if the others are only sketched.
    """

    def __init__(
        self,
        allow: set[str],
        own_code: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self.allow = allow
        self.own_code = own_code

    def build(self, structure: Any) -> nn.Module:
        """Construct the module that a description describes."""
        kind = _class_of(structure["class"], self.allow)
        if "children" in structure:
            children = {name: self.build(child) for name, child in structure["children"]}
            if issubclass(kind, nn.ModuleList):
                return kind(children.values())
            return kind(OrderedDict(children))
        foreign = not is_known(kind)
        guarded = self.own_code is not None and not foreign
        described = structure["arguments"].items()
        arguments = {name: self._decode(value, guarded) for name, value in described}
        placed = [name for name in PLACEMENT if name in arguments]
        if placed:
            raise DescriptionError(
                f"the description of {structure['class']} has an argument {placed[0]!r}, which is "
                "never saved."
            )
        check_arguments(kind, arguments)
        with self.own_code() if self.own_code and foreign else nullcontext():
            return kind(**arguments)

    def _decode(self, value: Any, guarded: bool) -> Any:
        """An argument from JSON; a list of numbers becomes a tuple."""
        if isinstance(value, dict):
            return self.build(value["module"])
        if isinstance(value, str):
            return _Text(value) if guarded else value
        if not isinstance(value, list):
            return value
        items = [self._decode(item, guarded) for item in value]
        if any(isinstance(item, (nn.Module, str)) for item in items):
            return _List(items) if guarded else items
        return _Tuple(items) if guarded else tuple(items)


def _attempt(build: Callable[[], T]) -> T:
    """Call a function that constructs modules, without any effect on random numbers.

    Raises:
        DescriptionError: it raised anything.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # the user was warned when the model was first constructed
        warnings.simplefilter("ignore", CancelledAttentionWarning)
        try:
            return build()
        except DescriptionError:
            raise
        except Exception as error:  # a constructor can raise anything
            reason = f"{type(error).__name__}: {error}"
            raise DescriptionError(
                f"the model cannot be rebuilt from its description: {reason[:MAX_SHOWN]}"
            ) from error


def _class_of(name: str, allow: set[str]) -> type[nn.Module]:
    package, _, last = name.rpartition(".")
    if package == "torch.nn":
        kind = getattr(nn, last, None)
    elif package == "setfold":
        kind = _exported(last)
    else:
        if name not in allow:
            found = f"the model contains {name}, which is not part of setfold or torch.nn. "
            raise DescriptionError(
                f'{found}If you trust it, allow it: setfold.load(path, allow=["{name}"]).',
                command=f"{found}If you trust it, pass --allow {name}.",
            )
        try:
            kind = getattr(importlib.import_module(package), last)
        except (ImportError, AttributeError, ValueError) as error:
            raise DescriptionError(
                f"cannot import {name}: {error}. Make the module importable, then load again."
            ) from error
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise DescriptionError(
            f"the model contains {name}, which is not a torch.nn.Module in this version."
        )
    if package == "torch.nn" and kind.forward is nn.Module.forward and kind not in CONTAINERS:
        raise DescriptionError(f"the model contains {name}, which is a base class, not a layer.")
    return kind


def is_known(kind: type) -> bool:
    """Whether a class is part of setfold or torch.nn."""
    return kind.__module__.partition(".")[0] == "setfold" or _is_torch(kind)


def _exported(name: str) -> Any:
    """What setfold exports under a name, or None."""
    return getattr(importlib.import_module("setfold"), name, None)


def _is_torch(kind: type) -> bool:
    return getattr(nn, kind.__name__, None) is kind
