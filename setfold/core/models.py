"""Models in files: safetensors for the weights, JSON for the structure, never pickle.

A model is described by its class and constructor arguments, which it must keep as attributes of
the same names; modules among them are described likewise. A description is rebuilt only from
classes of setfold and torch.nn, and from import paths that the caller allows by name.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core import persist
from setfold.errors import CancelledAttentionWarning, DescriptionError, FileError

PLACEMENT = ("device", "dtype")  # arguments that say where, not what
SCALARS = (bool, int, float, str, type(None))
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


def save(model: nn.Module, path: str | Path) -> None:
    """Write a model to one file that `load` rebuilds anywhere.

    Args:
        model: made of setfold's encoders, torch.nn modules and modules of your own that keep
            their constructor arguments as attributes of the same names.
        path: where to; by custom it ends in .safetensors.

    >>> import setfold, tempfile
    >>> encoder = setfold.SlotSetEncoder(dim_in=3, num_slots=4, dim_slot=8, dim_out=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     setfold.save(encoder, f"{folder}/encoder.safetensors")
    ...     setfold.load(f"{folder}/encoder.safetensors").num_slots
    4
    """
    if not isinstance(model, nn.Module):
        raise DescriptionError(f"save takes a torch.nn.Module; got {type(model).__name__}.")
    structure = describe(model)
    twin = rebuild(structure, allow=set(foreign_names(structure)))
    weights = model.state_dict()
    for name, tensor in twin.state_dict().items():
        if name not in weights or weights[name].shape != tensor.shape:
            raise DescriptionError(
                f"{type(model).__name__} cannot be rebuilt from its constructor arguments: {name} would "
                "differ. Keep every argument as an attribute of the same name, and change no "
                "submodule after construction."
            )
    if len(weights) != len(twin.state_dict()):
        extra = sorted(set(weights) - set(twin.state_dict()))
        raise DescriptionError(
            f"{type(model).__name__} has weights its constructor does not make: {extra}."
        )
    if str(twin) != str(model):
        raise DescriptionError(
            f"{type(model).__name__} cannot be rebuilt from its constructor arguments: it would be\n{twin}\n"
            f"instead of\n{model}"
        )
    description = {"structure": structure, "dtype": str(_dtype_of(model)).removeprefix("torch.")}
    persist.write(path, "model", weights, description)


def load(path: str | Path, *, allow: Iterable[str] = ()) -> nn.Module:
    """Rebuild a model that `save` wrote, in evaluation mode.

    Args:
        path: the file.
        allow: import paths of classes outside setfold and torch.nn that the file may name, such
            as "mypackage.models.Features". Loading imports and constructs them: allow only
            what you trust.

    Raises:
        FileError: the file is missing, truncated, corrupt, foreign or of another version.
        DescriptionError: the file names a class that is not allowed or cannot be made.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(nn.Linear(3, 4), f"{folder}/layer.safetensors")
    ...     load(f"{folder}/layer.safetensors")
    Linear(in_features=3, out_features=4, bias=True)
    """
    _, tensors, description = persist.read(path, "model")
    try:
        structure, dtype = description["structure"], DTYPES[description["dtype"]]
    except (KeyError, TypeError) as error:
        raise FileError(
            f"{path} is corrupt: its description lacks {error}. Write it anew."
        ) from error
    model = rebuild(structure, allow=set(allow)).to(dtype)
    # In a file tensors lie anywhere; aligned in memory they are faster, and give the same bits as ever.
    aligned = {name: tensor.clone() for name, tensor in tensors.items()}
    try:
        model.load_state_dict(aligned, assign=True)
    except RuntimeError as error:
        raise FileError(f"{path} does not hold the weights that it describes: {error}") from error
    return model.eval()


def describe(module: nn.Module) -> dict[str, Any]:
    """The class of a module and the arguments to construct it with, ready for JSON."""
    kind = type(module)
    if kind in CONTAINERS:
        # by name and with repetitions, as they are: children() would drop a module used twice
        children = [[n, describe(c)] for n, c in module._modules.items() if c is not None]
        return {"class": _name_of(kind), "children": children}
    arguments: dict[str, Any] = {}
    plain = kind.__init__ is nn.Module.__init__  # takes nothing, whatever its signature says
    for name, parameter in () if plain else inspect.signature(kind).parameters.items():
        if name in PLACEMENT:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            if _is_torch(kind):  # nn.Identity takes anything and keeps nothing
                continue
            raise DescriptionError(f"{kind.__name__} cannot be described: it takes *{name}.")
        if hasattr(module, name):
            value = getattr(module, name)
            if _is_torch(kind) and isinstance(value, Tensor):
                value = True  # torch.nn keeps the parameter where it was asked for one: bias=True
            arguments[name] = _encode(value, f"{kind.__name__}.{name}")
        elif not _is_torch(kind):  # torch.nn leaves a few out; the shapes of the weights tell
            raise DescriptionError(
                f"{kind.__name__} cannot be described: keep its constructor argument {name!r} as an "
                f"attribute, self.{name} = {name}."
            )
    return {"class": _name_of(kind), "arguments": arguments}


def rebuild(structure: Any, *, allow: set[str]) -> nn.Module:
    """Construct what `describe` described, from classes that are setfold's, torch.nn's or allowed."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", CancelledAttentionWarning)  # was said when it was made
        try:
            return _build(structure, allow)
        except DescriptionError:
            raise
        except Exception as error:  # whatever a constructor makes of what a file says
            raise DescriptionError(
                f"the description of the model cannot be rebuilt: {error}"
            ) from error


def _build(structure: Any, allow: set[str]) -> nn.Module:
    kind = _class_of(structure["class"], allow)
    if "children" in structure:
        children = {name: _build(child, allow) for name, child in structure["children"]}
        if issubclass(kind, nn.ModuleList):
            return kind(children.values())
        return kind(OrderedDict(children))
    return kind(**{name: _decode(value, allow) for name, value in structure["arguments"].items()})


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, nn.Module):
        return {"module": describe(value)}
    if isinstance(value, (list, tuple)):
        return [_encode(item, where) for item in value]
    if isinstance(value, SCALARS):
        return value
    raise DescriptionError(
        f"{where} is a {type(value).__name__}, which cannot be written down. Constructor arguments "
        "may be numbers, words, lists of them, None and modules."
    )


def _decode(value: Any, allow: set[str]) -> Any:
    if isinstance(value, dict):
        return _build(value["module"], allow)
    if isinstance(value, list):
        items = [_decode(item, allow) for item in value]
        return items if any(isinstance(i, (nn.Module, str)) for i in items) else tuple(items)
    return value


def _own(name: str) -> Any:
    """What setfold exports under a name: its public names are the registry."""
    return getattr(importlib.import_module("setfold"), name, None)


def _is_torch(kind: type) -> bool:
    return getattr(nn, kind.__name__, None) is kind


def _name_of(kind: type[nn.Module]) -> str:
    if _own(kind.__name__) is kind:
        return f"setfold.{kind.__name__}"
    if _is_torch(kind):
        return f"torch.nn.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_of(name: str, allow: set[str]) -> type[nn.Module]:
    package, _, last = name.rpartition(".")
    known = {"setfold": _own(last), "torch.nn": getattr(nn, last, None)}
    kind = known.get(package)
    if package not in known:
        if name not in allow:
            raise DescriptionError(
                f"the model contains {name}, which is neither setfold's nor torch.nn's. If you trust "
                f'it, allow it: setfold.load(path, allow=["{name}"]).'
            )
        try:
            kind = getattr(importlib.import_module(package), last)
        except (ImportError, AttributeError, ValueError) as error:
            raise DescriptionError(f"cannot import {name}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise DescriptionError(f"the model contains {name}, which is no module here.")
    return kind


def foreign_names(structure: Any) -> Iterator[str]:
    """The import paths outside setfold and torch.nn that a description names."""
    if isinstance(structure, dict):
        name = structure.get("class", "")
        if name.rpartition(".")[0] not in ("", "setfold", "torch.nn"):
            yield name
        for value in structure.values():
            yield from foreign_names(value)
    elif isinstance(structure, list):
        for value in structure:
            yield from foreign_names(value)


def _dtype_of(model: nn.Module) -> torch.dtype:
    tensors = (*model.parameters(), *model.buffers())
    return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
