"""The command export: a model as files that run without setfold."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from setfold.cli.app import app, load_model, print_facts
from setfold.cli.options import Allow, Json, Overwrite
from setfold.errors import InputError


@app.command(
    epilog="Examples:\n\n  setfold export model.safetensors --onnx folder/\n\n"
    "  setfold export model.safetensors --torch programs/ --aoti packages/"
)
def export(
    model: Annotated[
        str,
        typer.Argument(help="Model file written by setfold.save, or package.module:name."),
    ],
    onnx: Annotated[
        Path | None, typer.Option(help="New folder for ONNX graphs; needs the extra onnx.")
    ] = None,
    torch: Annotated[
        Path | None, typer.Option(help="New folder for programs of torch.export.")
    ] = None,
    aoti: Annotated[
        Path | None,
        typer.Option(help="New folder for AOTInductor packages; needs a C++ compiler."),
    ] = None,
    dim_in: Annotated[
        str | None,
        typer.Option(
            help="Number of features of an element, or its shape, such as 3,16,16, if the model does "
            "not define it."
        ),
    ] = None,
    overwrite: Overwrite = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Write a model as graphs: forward, update, update_rows, merge and readout.

    Sets can then be folded without setfold, and with ONNX without torch. export.json in each folder
    says what the graphs take and return, and what could not be exported and why. With several
    folders, --json prints a list.
    """
    given = {"onnx": onnx, "torch": torch, "aoti": aoti}
    folders = {format: folder for format, folder in given.items() if folder is not None}
    if not folders:
        raise typer.BadParameter("expected a folder: --onnx, --torch or --aoti.")
    if len({folder.resolve() for folder in folders.values()}) < len(folders):
        raise typer.BadParameter("expected a folder of its own for each format.")
    shape = None if dim_in is None else _shape(dim_in)
    encoder = load_model(model, allow or [])
    import setfold

    written = []
    for format, folder in folders.items():
        found = setfold.export(encoder, folder, format, dim_in=shape, overwrite=overwrite)
        written.append(asdict(found))
        if not as_json:
            reasons = {f"no_{name}": reason for name, reason in found.missing.items()}
            print_facts(asdict(found) | {"missing": None} | reasons, as_json)
    if as_json:
        typer.echo(json.dumps(written if len(written) > 1 else written[0], indent=2))


def _shape(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise InputError(
            f"expected --dim-in as a number, or as several such as 3,16,16; got {text!r}."
        ) from None
