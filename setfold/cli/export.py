"""The command export: a model as files that run without setfold."""

from __future__ import annotations

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
    says what the graphs take and return, and what could not be exported and why.
    """
    folders = {"onnx": onnx, "torch": torch, "aoti": aoti}
    if not any(folders.values()):
        raise typer.BadParameter("expected a folder: --onnx, --torch or --aoti.")
    shape = None if dim_in is None else _shape(dim_in)
    encoder = load_model(model, allow or [])
    import setfold

    for format, folder in folders.items():
        if folder is not None:
            found = setfold.export(encoder, folder, format, dim_in=shape, overwrite=overwrite)
            facts = asdict(found)
            if not as_json:
                reasons = facts.pop("missing")
                facts |= {f"no_{name}": reason for name, reason in reasons.items()}
            print_facts(facts, as_json)


def _shape(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise InputError(
            f"expected --dim-in as a number, or as several such as 3,16,16; got {text!r}."
        ) from None
