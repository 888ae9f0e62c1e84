"""Models in files: safetensors for the weights, JSON for the structure, never pickle.

The structure of a model is its class and its constructor arguments, which the model must keep as
attributes of the same names. Arguments that are modules are described in the same way. Loading
constructs only classes of setfold and torch.nn, and classes that the caller allows by import path.
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

PLACEMENT = ("device", "dtype")  # arguments that are not part of the structure
SCALARS = (bool, int, float, str, type(None))
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


def save(model: nn.Module, path: str | Path) -> None:
    """Save a model to one file, from which `load` rebuilds it.

    Args:
        model: built from setfold encoders, torch.nn modules and your own modules. Your modules must
            keep their constructor arguments as attributes of the same names.
        path: the file, conventionally with the extension .safetensors.

    Raises:
        DescriptionError: the model cannot be rebuilt from its constructor arguments.
        FileError: the file cannot be written.

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
    rebuilt = rebuild(structure, allow=set(foreign_names(structure)))
    weights = model.state_dict()
    for name, tensor in rebuilt.state_dict().items():
        if name not in weights or weights[name].shape != tensor.shape:
            raise DescriptionError(
                f"{type(model).__name__} cannot be rebuilt from its constructor arguments: {name} "
                "would differ. Keep every argument as an attribute of the same name, and do not "
                "replace submodules after construction."
            )
    if len(weights) != len(rebuilt.state_dict()):
        extra = sorted(set(weights) - set(rebuilt.state_dict()))
        raise DescriptionError(
            f"{type(model).__name__} has weights that its constructor does not create: {extra}. "
            "Create all submodules in the constructor."
        )
    if str(rebuilt) != str(model):
        raise DescriptionError(
            f"{type(model).__name__} cannot be rebuilt from its constructor arguments: the result "
            f"would be\n{rebuilt}\ninstead of\n{model}\nKeep every argument as an attribute of the "
            "same name, and do not replace submodules after construction."
        )
    description = {"structure": structure, "dtype": str(_dtype_of(model)).removeprefix("torch.")}
    persist.write(path, "model", weights, description)


def load(path: str | Path, *, allow: Iterable[str] = ()) -> nn.Module:
    """Load a model that `save` wrote, in evaluation mode.

    Args:
        path: the file.
        allow: import paths of classes outside setfold and torch.nn that the file may contain, such
            as "mypackage.models.Features". Loading imports these modules and calls the classes, so
            allow only what you trust.

    Raises:
        FileError: the file is missing, truncated, corrupt, not a setfold model, or has another
            format version.
        DescriptionError: the file contains a class that is not allowed or cannot be constructed.

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
            f"{path} is corrupt: its description has no valid {error}. Save the model again."
        ) from error
    model = rebuild(structure, allow=set(allow)).to(dtype)
    # Tensors in a file are not aligned. Aligned copies are faster, and results are reproducible.
    aligned = {name: tensor.clone() for name, tensor in tensors.items()}
    try:
        model.load_state_dict(aligned, assign=True)
    except RuntimeError as error:
        raise FileError(
            f"{path} is corrupt: its weights do not fit its description ({error}). Save the model "
            "again."
        ) from error
    return model.eval()


def describe(module: nn.Module) -> dict[str, Any]:
    """The class of a module and its constructor arguments, as JSON.

    Raises:
        DescriptionError: an argument was not kept as an attribute, or is not a supported type.
    """
    kind = type(module)
    if kind in CONTAINERS:
        # _modules, because children() would drop a module that is used twice
        children = [[n, describe(c)] for n, c in module._modules.items() if c is not None]
        return {"class": _name_of(kind), "children": children}
    arguments: dict[str, Any] = {}
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
        elif not _is_torch(kind):  # a few torch.nn modules omit some; `save` compares the result
            raise DescriptionError(
                f"{kind.__name__} cannot be saved: keep its constructor argument {name!r} as an "
                f"attribute, self.{name} = {name}."
            )
    return {"class": _name_of(kind), "arguments": arguments}


def rebuild(structure: Any, *, allow: set[str]) -> nn.Module:
    """Construct a module from its description.

    Args:
        structure: from `describe`.
        allow: import paths of classes outside setfold and torch.nn that may be constructed.

    Raises:
        DescriptionError: a class is not allowed, or its constructor raises.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # the user was warned when the model was first constructed
        warnings.simplefilter("ignore", CancelledAttentionWarning)
        try:
            return _build(structure, allow)
        except DescriptionError:
            raise
        except Exception as error:  # a constructor can raise anything
            raise DescriptionError(
                f"the model cannot be rebuilt from its description: {type(error).__name__}: {error}"
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


def _decode(value: Any, allow: set[str]) -> Any:
    if isinstance(value, dict):
        return _build(value["module"], allow)
    if isinstance(value, list):
        items = [_decode(item, allow) for item in value]
        return items if any(isinstance(i, (nn.Module, str)) for i in items) else tuple(items)
    return value


def _exported(name: str) -> Any:
    """What setfold exports under a name, or None."""
    return getattr(importlib.import_module("setfold"), name, None)


def _is_torch(kind: type) -> bool:
    return getattr(nn, kind.__name__, None) is kind


def _name_of(kind: type[nn.Module]) -> str:
    if _exported(kind.__name__) is kind:
        return f"setfold.{kind.__name__}"
    if _is_torch(kind):
        return f"torch.nn.{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def _class_of(name: str, allow: set[str]) -> type[nn.Module]:
    package, _, last = name.rpartition(".")
    known = {"setfold": _exported(last), "torch.nn": getattr(nn, last, None)}
    kind = known.get(package)
    if package not in known:
        if name not in allow:
            raise DescriptionError(
                f"the model contains {name}, which is not part of setfold or torch.nn. If you "
                f'trust it, allow it: setfold.load(path, allow=["{name}"]).'
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
    return kind


def foreign_names(structure: Any) -> Iterator[str]:
    """The import paths outside setfold and torch.nn in a description."""
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
