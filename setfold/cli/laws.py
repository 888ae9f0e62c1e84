"""The command check: whether a model satisfies the laws of a fold."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Annotated

import typer

from setfold.cli.app import BROKEN, PASSED, app, load_model


@app.command(
    epilog="Examples:\n\n  setfold check encoder.safetensors\n\n"
    "  setfold check mypackage.models:encoder --dim-in 3\n\n"
    "  setfold check encoder.safetensors --json | jq .passed\n\n"
    "  setfold check --all"
)
def check(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model file written by setfold.save, or package.module:name of a model, or of a "
            "class or function that returns one.",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Check all encoders of setfold instead of a model."),
    ] = False,
    dim_in: Annotated[
        int | None,
        typer.Option(help="Number of features of an element, if the model does not define it."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="Import path of a class that the file may use. Repeatable."),
    ] = None,
    processes: Annotated[
        bool, typer.Option(help="Also merge with a state computed in another process.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed for random test cases.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether a model satisfies the laws of a fold.

    The exit code is 0 if every applicable law holds, 1 if one fails, and 2 if the model cannot be
    loaded.

    With --all, the exit code is 0 if every encoder behaves as documented.
    """
    if (model is None) != everything:
        raise typer.BadParameter("expected either a model or --all.")
    subject = None if model is None else load_model(model, allow or [])
    from rich.console import Console

    from setfold.laws import check as checks

    console, messages = Console(), Console(stderr=True)
    with messages.status("checking the laws") if messages.is_terminal else nullcontext() as status:
        report: checks.Report | checks.Survey
        if subject is not None:
            report = checks.check(subject, dim_in, processes=processes, seed=seed)
        else:

            def progress(done: int, total: int, name: str) -> None:
                if status is not None:
                    status.update(f"{done} of {total} encoders checked; {name}")

            report = checks.check_all(processes=processes, seed=seed, progress=progress)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    elif console.is_terminal:
        console.print(report)
    else:
        typer.echo(str(report), nl=False)  # not wrapped to the width of a terminal
    raise typer.Exit(PASSED if report.passed else BROKEN)
