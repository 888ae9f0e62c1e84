"""The command weights: which elements of its set a model attends to."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from setfold.cli.app import app, explain_interrupts, load_model, print_facts, show_progress
from setfold.cli.options import (
    Allow,
    Explode,
    Features,
    Inputs,
    Json,
    Memory,
    Overwrite,
    Restart,
    Resume,
    Root,
    SetColumn,
)


@app.command(
    epilog="Examples:\n\n"
    "  setfold weights model.safetensors slide.h5 --out heat.parquet --picture heat.png\n\n"
    "  setfold weights model.safetensors events/*.parquet --set user --keep time --out weights.csv"
)
@explain_interrupts
def weights(
    model: Annotated[
        str,
        typer.Argument(help="Model file written by setfold.save, or package.module:name."),
    ],
    inputs: Inputs,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Output: .parquet, .arrow or .csv with one row per element."
        ),
    ],
    column: SetColumn = None,
    features: Features = None,
    explode: Explode = False,
    root: Root = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Columns to copy to the output: 'x,y'. Default: the coordinates of a slide, if the "
            "files have features and coords."
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Also draw the weights of one set, where its elements are: a .png file."),
    ] = None,
    memory: Memory = "2GB",
    resume: Resume = False,
    restart: Restart = False,
    overwrite: Overwrite = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Write the weight of each element in the encoding of its set.

    The weights of attention sum to 1 over the elements of a set. The files are read twice, so
    memory does not depend on the size of a set.
    """
    encoder = load_model(model, allow or [])
    from setfold.files.weights import weigh_sets

    with show_progress() as callback:
        summary = weigh_sets(
            encoder,
            inputs,
            out,
            set=column,
            features=features,
            explode=explode,
            root=root,
            keep=None
            if keep is None
            else [part.strip() for part in keep.split(",") if part.strip()],
            picture=picture,
            memory=memory,
            resume=resume,
            restart=restart,
            overwrite=overwrite,
            progress=callback,
        )
    print_facts(asdict(summary), as_json)
