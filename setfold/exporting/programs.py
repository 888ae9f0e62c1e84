"""From functions of tensors to files: ONNX, programs of torch.export, AOTInductor packages."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from inspect import signature
from pathlib import Path

import torch
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from setfold.errors import InputError
from setfold.exporting.graphs import Graph

EXAMPLE = {"B": 3, "n": 7, "N": 11}  # sizes to trace with; none may be taken for another
SMALLEST = {"B": 1, "n": 0, "N": 0}
LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir")  # they warn about what they leave as it is


def trace(graph: Graph) -> ExportedProgram:
    """A graph as a program of torch.export for any sizes.

    Raises:
        InputError: torch cannot trace it.
    """
    sizes = {name: Dim(name, min=least) for name, least in SMALLEST.items()}
    dynamic = [
        {axis: sizes[size] for axis, size in enumerate(port.shape) if isinstance(size, str)}
        for port in graph.inputs
    ]
    example = tuple(port.zeros(EXAMPLE) for port in graph.inputs)
    shapes = dict(signature(graph.module.forward).bind(*dynamic).arguments)
    with torch.inference_mode(False), torch.no_grad(), _quiet():
        try:
            return torch.export.export(graph.module, example, dynamic_shapes=shapes)
        except GuardOnDataDependentSymNode as error:
            reason = "a size within it depends on the values of its inputs"
            raise InputError(_message(graph, reason)) from error
        except Exception as error:  # a module of the user may raise anything
            raise InputError(_message(graph, f"{type(error).__name__}: {error}")) from error


def _message(graph: Graph, reason: str) -> str:
    return (
        f"cannot export {graph.name!r}: {reason}. Sizes and control flow of features and heads may "
        "depend on shapes only."
    )


# ---- formats -------------------------------------------------------------------------------------


def write_onnx(graph: Graph, folder: Path) -> None:
    """Write NAME.onnx, and beside it the weights if they have more than 2 GB."""
    try:
        import onnxscript  # noqa: F401  (torch imports it)
    except ImportError as error:
        raise InputError(
            f"ONNX needs the package {error.name}. Run: pip install 'setfold[onnx]'"
        ) from error
    program = trace(graph)
    with torch.no_grad(), _quiet():
        try:
            found = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=[port.name for port in graph.inputs],
                output_names=[port.name for port in graph.outputs],
            )
        except Exception as error:  # an operator has no ONNX form
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise InputError(_message(graph, f"ONNX: {type(cause).__name__}: {cause}")) from error
        assert found is not None
        for node in found.model.graph.all_nodes():
            node.metadata_props.clear()  # the paths of the source code it came from
        found.save(folder / f"{graph.name}.onnx")


def write_torch(graph: Graph, folder: Path) -> None:
    """Write NAME.pt2, which torch.export.load reads."""
    with _quiet():
        torch.export.save(trace(graph), folder / f"{graph.name}.pt2")


def write_aoti(graph: Graph, folder: Path) -> None:
    """Write NAME.pt2, which torch._inductor.aoti_load_package loads, without tracing or compiling."""
    program, path = trace(graph), folder / f"{graph.name}.pt2"
    with torch.no_grad(), _quiet():
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        except Exception as error:  # there may be no compiler
            raise InputError(
                f"cannot compile {graph.name!r}: {type(error).__name__}: {error}. AOTInductor needs "
                "a C++ compiler, such as g++."
            ) from error


WRITERS: dict[str, Callable[[Graph, Path], None]] = {
    "onnx": write_onnx,
    "torch": write_torch,
    "aoti": write_aoti,
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch says of its own code: deprecations, logs, graphs that it could not trace."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with (
            warnings.catch_warnings(),
            redirect_stdout(io.StringIO()),
            redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
