"""`export`: a model as files that run without setfold."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import setfold
from setfold.core.arguments import check_choice, check_sizes, checked
from setfold.core.persist import as_path
from setfold.core.primitives import SetEncoder
from setfold.errors import InputError
from setfold.exporting.folder import check_replaceable, write_manifest, writing
from setfold.exporting.graphs import Graphs, Port, graphs_of
from setfold.exporting.programs import WRITERS
from setfold.preprocessing.columns import columns_of

VERSION = 1  # of export.json


@dataclass(frozen=True)
class Exported:
    """What `export` has written.

    Attributes:
        folder: Where it is.
        format: "onnx", "torch" or "aoti".
        graphs: The names of the graphs.
        missing: By name, why the others could not be exported.
        bytes: The size of all files.
    """

    folder: str
    format: str
    graphs: tuple[str, ...]
    missing: dict[str, str]
    bytes: int


@checked
def export(
    model: nn.Module,
    folder: str | Path,
    format: str = "onnx",
    *,
    dim_in: int | Sequence[int] | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write a model as graphs, with which a stream can be folded without setfold, or without torch.

    The graphs are `forward`, `update`, `update_rows`, `merge` and `readout`, for any number of sets
    and elements. `export.json` describes what they take and return, and the state of an empty set.
    Models that do not fold in one pass have `forward` only. The model is exported in evaluation
    mode, with its slots. Graphs check nothing: NaN or infinity enters a state unseen.

    Args:
        model: a set encoder.
        folder: a folder, which must not exist. It is complete, or absent.
        format: "onnx", which needs the extra `onnx`; "torch" for programs of torch.export; "aoti"
            for AOTInductor packages, which need a C++ compiler.
        dim_in: the width of an element, or its shape, if the model does not define it.
        overwrite: whether to replace an export that is in the folder.

    Raises:
        FileError: the folder cannot be written.
        InputError: the folder exists, or the model cannot be exported; the message says why.

    >>> import setfold, tempfile
    >>> encoder = setfold.SlotSetEncoder(dim_in=3, num_slots=4, dim_slot=8, dim_out=8)
    >>> with tempfile.TemporaryDirectory() as there:
    ...     setfold.export(encoder, f"{there}/encoder", "torch").graphs
    ('forward', 'update', 'update_rows', 'merge', 'readout')
    """
    check_choice(tuple(WRITERS), format=format)
    if not isinstance(model, SetEncoder):
        raise InputError(
            f"export takes a set encoder; got {type(model).__name__}. For modules around one, use "
            "Composition(encoder, features, head)."
        )
    element = _shape_of_element(model, dim_in)
    target = as_path(folder).resolve()
    check_replaceable(target, overwrite=overwrite)
    with torch.inference_mode(False), torch.no_grad():
        graphs = graphs_of(copy.deepcopy(model).cpu(), element)
    with writing(target) as temporary:
        for graph in graphs.graphs:
            WRITERS[format](graph, temporary)
        write_manifest(temporary, _describe(type(model).__name__, format, graphs))
        size = sum(path.stat().st_size for path in temporary.iterdir())
        check_replaceable(target, overwrite=overwrite)  # again, because tracing takes seconds
    names = tuple(graph.name for graph in graphs.graphs)
    return Exported(str(folder), format, names, graphs.missing, size)


def _shape_of_element(model: SetEncoder, given: int | Sequence[int] | None) -> tuple[int, ...]:
    columns = columns_of(model)
    own = model.dim_in if columns is None else columns.width
    if given is None and own is None:
        missing = f"{type(model).__name__} does not define the width of an element. Pass it: "
        raise InputError(
            f"{missing}setfold.export(model, folder, dim_in=...).", command=f"{missing}--dim-in."
        )
    shape = (own,) if given is None else (given,) if isinstance(given, int) else tuple(given)
    for size in shape:
        check_sizes(dim_in=size)
    if own is not None and shape != (own,):
        raise InputError(
            f"dim_in must be {own}, as the model says; got {given}. Omit it.",
            command=f"--dim-in must be {own}, as the model says; got {given}. Omit it.",
        )
    return tuple(size for size in shape if size is not None)


def _describe(model: str, format: str, graphs: Graphs) -> dict[str, Any]:
    """What a program must know to use the graphs, as JSON."""
    suffix = "onnx" if format == "onnx" else "pt2"
    return {
        "version": VERSION,
        "setfold": setfold.__version__,
        "torch": torch.__version__,
        "format": format,
        "model": model,
        "weights": graphs.digest,
        "graphs": {
            graph.name: {
                "file": f"{graph.name}.{suffix}",
                "inputs": [_describe_port(port) for port in graph.inputs],
                "outputs": [_describe_port(port) for port in graph.outputs],
            }
            for graph in graphs.graphs
        },
        "missing": graphs.missing,
        "state": [
            _describe_port(part.port) | {"empty": _describe_number(part.empty)}
            for part in graphs.state
        ],
        "slots": [level.tolist() for level in graphs.slots],
    }


def _describe_port(port: Port) -> dict[str, Any]:
    dtype = str(port.dtype).removeprefix("torch.")
    return {"name": port.name, "dtype": dtype, "shape": list(port.shape)}


def _describe_number(number: float) -> float | str:
    """A number; infinity, which JSON does not have, as text that float() understands."""
    return number if math.isfinite(number) else str(number)
