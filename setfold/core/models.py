"""Models in files: safetensors for the weights, JSON for the structure, never pickle.

A file may come from anywhere. Before any memory is allocated for the model that it describes, the
names, shapes and dtypes of its weights are compared with the tensors that it stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from setfold.core import persist
from setfold.core.structure import describe, foreign_names, is_known, rebuild, sketch
from setfold.errors import DescriptionError, FileError, InputError

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
DERIVED_BYTES = 1 << 26  # of buffers that are not saved, such as the noise of random slots

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of tensors, by name


def save(model: nn.Module, path: str | Path) -> None:
    """Save a model to one file, from which `load` rebuilds it.

    Args:
        model: built from setfold encoders, torch.nn modules and your own modules. Your modules must
            keep their constructor arguments as attributes of the same names.
        path: the file, conventionally with the extension .safetensors.

    Raises:
        DescriptionError: the model cannot be rebuilt from its constructor arguments, or not in
            another process.
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
    name = type(model).__name__
    structure, weights, dtype = describe(model), model.state_dict(), _dtype_of(model)
    allow = set(foreign_names(structure))
    found = layout_of(weights)
    described = _described(structure, allow, len(found), dtype)
    others = {n: d for n, (_, d) in found.items() if d != dtype and d in DTYPES.values()}
    difference = _difference(_with_dtypes(described, others), found)
    if difference:
        raise DescriptionError(f"{name} {CANNOT_REBUILD}: {difference}. {ADVICE}")
    rebuilt = rebuild(structure, allow=allow).to(dtype)
    if str(rebuilt) != str(model):
        raise DescriptionError(
            f"{name} {CANNOT_REBUILD}: the result would be\n{rebuilt}\ninstead of\n{model}\n{ADVICE}"
        )
    try:
        rebuilt.load_state_dict(weights)
    except RuntimeError as error:
        raise DescriptionError(f"{name} cannot be loaded again: {error}") from error
    description = {"structure": structure, "dtype": _name_of(dtype)}
    if others:
        description["dtypes"] = {name: _name_of(other) for name, other in others.items()}
    persist.write(path, "model", weights, description)


CANNOT_REBUILD = "cannot be rebuilt from its constructor arguments"
ADVICE = (
    "Keep every argument as an attribute of the same name, create all submodules in the "
    "constructor, and do not replace them afterwards."
)


def load(path: str | Path, *, allow: Iterable[str] = ()) -> nn.Module:
    """Load a model that `save` wrote, in evaluation mode.

    Args:
        path: the file.
        allow: import paths of classes outside setfold and torch.nn that the file may contain, such
            as "mypackage.models.Features". Loading imports these modules and calls the classes with
            arguments from the file, so allow only what you trust.

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
    allowed = set() if isinstance(allow, str) or not isinstance(allow, Iterable) else {*allow}
    if (allow and not allowed) or not all(isinstance(name, str) for name in allowed):
        raise InputError(
            f'allow takes a list of import paths, such as ["package.module.Class"]; got {allow!r}.'
        )
    _, tensors, description = persist.read(path, "model")
    try:
        structure, dtype = description["structure"], DTYPES[description["dtype"]]
        others = {str(name): DTYPES[other] for name, other in description.get("dtypes", {}).items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise FileError(
            f"{path} is corrupt: its description is not valid ({error!r}). Save the model again."
        ) from error
    described = _described(structure, allowed, len(tensors), dtype)
    difference = _difference(_with_dtypes(described, others), layout_of(tensors))
    if difference:
        raise _misfit(path, difference)
    model = rebuild(structure, allow=allowed).to(dtype)
    # Tensors in a file are not aligned. Aligned copies are faster, and results are reproducible.
    aligned = {name: tensor.clone() for name, tensor in tensors.items()}
    try:
        model.load_state_dict(aligned, assign=True)
    except RuntimeError as error:
        raise _misfit(path, str(error)) from error
    return model.eval()


def _misfit(path: str | Path, difference: str) -> FileError:
    return FileError(
        f"{path} is corrupt: its weights do not fit its description ({difference}). Save the model "
        "again."
    )


def _described(structure: Any, allow: set[str], num_tensors: int, dtype: torch.dtype) -> Layout:
    """Names, shapes and dtypes of the tensors of a described model, without allocating them.

    Raises:
        DescriptionError: the model cannot be constructed, or would need far more memory than its
            weights.
    """
    blank = sketch(structure, allow=allow, num_tensors=num_tensors).to(dtype)
    derived = sum(buffer.nbytes for buffer in _derived_buffers(blank))
    if derived > DERIVED_BYTES:
        raise DescriptionError(
            f"the buffers that are not saved, such as the noise of random slots, would take "
            f"{derived:,} bytes; at most {DERIVED_BYTES:,} are supported. Use fewer slots."
        )
    return layout_of(blank.state_dict())


def _derived_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that modules of setfold and torch.nn do not save."""
    return [
        buffer
        for module in model.modules()
        if is_known(type(module))
        for name, buffer in module._buffers.items()
        if buffer is not None and name in module._non_persistent_buffers_set
    ]


def layout_of(tensors: Mapping[str, Any]) -> Layout:
    """Names, shapes and dtypes of tensors.

    Raises:
        DescriptionError: one is not a tensor, or has no shape yet.
    """
    found: Layout = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise DescriptionError(
                f"{name} is a {type(tensor).__name__}; only tensors can be saved. Make it a "
                "constructor argument, or a buffer."
            )
        if nn.parameter.is_lazy(tensor):
            raise DescriptionError(f"{name} has no shape yet. Call the model once, then save it.")
        found[name] = (tuple(tensor.shape), tensor.dtype)
    return found


def _with_dtypes(layout: Layout, dtypes: dict[str, torch.dtype]) -> Layout:
    """A layout in which some floating-point tensors have another dtype."""
    return {
        name: (shape, dtypes.get(name, dtype) if dtype.is_floating_point else dtype)
        for name, (shape, dtype) in layout.items()
    }


def _difference(described: Layout, found: Layout) -> str:
    """The first difference between two layouts, in words; empty if there is none."""
    for name in [*described, *found]:
        if name not in found:
            return f"{name} is missing"
        if name not in described:
            return f"{name} is not created by the constructor"
        if described[name] != found[name]:
            (shape, dtype), (actual, other) = described[name], found[name]
            return f"{name} would be {shape} {_name_of(dtype)}; it is {actual} {_name_of(other)}"
    return ""


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(model: nn.Module) -> torch.dtype:
    tensors = (*model.parameters(), *model.buffers())
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
    if dtype not in DTYPES.values():
        raise DescriptionError(
            f"the weights are {dtype}; expected one of {', '.join(DTYPES)}. Cast the model first."
        )
    return dtype
