"""Shared by all commands: the application, error handling, and loading models."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from setfold import __version__
from setfold.cli.processes import is_shown_elsewhere
from setfold.errors import InputError, SetfoldError

if TYPE_CHECKING:  # torch takes seconds to import, and --help does not need it
    from torch import nn

PASSED, BROKEN, USAGE = 0, 1, 2  # exit codes

app = typer.Typer(
    name="setfold",
    help="Fold a set of any size into one vector.",
    no_args_is_help=True,
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
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback if an error occurs.")
    ] = False,
) -> None:
    """Options before the command. `run` reads --debug from sys.argv."""


def import_from_here() -> None:
    """Make modules in the current folder importable. Installed ones of the same name come first."""
    if "" not in sys.path:
        sys.path.append("")


def load_model(name: str, allow: list[str]) -> nn.Module:
    """Load a model from a file, or import it from package.module:name.

    Raises:
        InputError: It cannot be imported, or it is not a model.
    """
    import_from_here()
    if ":" not in name or Path(name).exists():
        from setfold.core.models import load

        return load(name, allow=allow)
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a module may raise anything
        raise InputError(
            f"cannot import {name}: {type(error).__name__}: {error}. Check the name. Modules are "
            "looked for in the installed packages, in PYTHONPATH and in the current folder."
        ) from error
    from torch import nn

    if not isinstance(found, nn.Module):
        try:
            found = found()
        except Exception as error:  # a constructor may raise anything
            raise InputError(
                f"{name}() failed: {type(error).__name__}: {error}. Pass a model, or a class or "
                "function that returns one when called without arguments."
            ) from error
    if not isinstance(found, nn.Module):
        raise InputError(
            f"expected a torch.nn.Module; got {type(found).__name__} from {name}. Pass a model, or "
            "a class or function that returns one."
        )
    return found


def run(commands: typer.Typer, name: str, failed: int) -> None:
    """Run a command line. Print errors in one line, or with a traceback if --debug is given.

    Args:
        commands: The application.
        name: The name of the program, for error messages.
        failed: The exit code if an error occurs.
    """
    try:
        commands()
    except (SetfoldError, OSError) as error:
        if "--debug" in sys.argv:
            raise
        if not is_shown_elsewhere(error):
            typer.echo(f"{name}: {getattr(error, 'command', None) or error}", err=True)
        sys.exit(failed)
