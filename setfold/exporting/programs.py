"""From functions of tensors to programs of torch.export, ONNX and AOTInductor in files."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from setfold.errors import InputError
from setfold.exporting.graphs import Graph, Port

EXAMPLE = {"B": 3, "n": 7, "N": 11}  # different sizes, so that none is taken for another


def trace(graph: Graph) -> ExportedProgram:
    """A graph as a program for any sizes.

    Raises:
        InputError: torch cannot trace a module.
    """
    sizes = {name: Dim(name, min=0) for name in EXAMPLE}
    dynamic = tuple(
        {axis: sizes[size] for axis, size in enumerate(port.shape) if isinstance(size, str)}
        for port in graph.inputs
    )
    example = tuple(_example(port) for port in graph.inputs)
    names = graph.module.forward.__code__.co_varnames[1:]
    fixed = graph.module.forward.__code__.co_argcount - 1
    shapes = dict(zip(names, dynamic[:fixed], strict=False))
    if len(example) > fixed:
        shapes[names[fixed]] = dynamic[fixed:]
    with torch.no_grad(), quiet():
        return torch.export.export(graph.module, example, dynamic_shapes=shapes)


def _example(port: Port) -> Tensor:
    shape = [EXAMPLE[size] if isinstance(size, str) else size for size in port.shape]
    return torch.zeros(shape, dtype=port.dtype)

@contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
