"""What all commands share: the application, its errors, and how a model is named."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from setfold import __version__
from setfold.errors import InputError, SetfoldError

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not wait for it
    from torch import nn

PASSED, BROKEN, USAGE = 0, 1, 2  # exit codes

app = typer.Typer(
    name="setfold",
    help="Fold a set of any size into one vector.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"setfold {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Options that come before the command; `main` looks for --debug itself."""


def find_model(name: str, allow: list[str]) -> nn.Module:
    """A model from a file, or from an import path."""
    if ":" not in name or Path(name).exists():
        from setfold.core.models import load

        return load(name, allow=allow)
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")  # what stands in the current folder can be named, as with python -m
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module does when it is imported
        raise InputError(f"cannot import {name}: {type(error).__name__}: {error}.") from error
    from torch import nn

    if not isinstance(found, nn.Module):
        try:
            found = found()
        except Exception as error:  # whatever it takes to make the model
            raise InputError(
                f"{name}() gives no model: {type(error).__name__}: {error}. Name a model, or a class or "
                "function that makes one without arguments."
            ) from error
    if not isinstance(found, nn.Module):
        raise InputError(f"{name} gives a {type(found).__name__}; expected a torch.nn.Module.")
    return found


def run(commands: typer.Typer, name: str, failed: int) -> None:
    """Run a command line whose errors are one line, unless --debug is given.

    Args:
        commands: what there is to run.
        name: whose errors they are.
        failed: the exit code for them.
    """
    try:
        commands()
    except (SetfoldError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        typer.echo(f"{name}: {error}", err=True)
        sys.exit(failed)
