"""Shared by the commands: the application, errors, models, and the terminal.

On the terminal, commands show progress and a summary, explain what is kept after Ctrl-C, and take
rows from standard input.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, get_type_hints

import typer

from setfold import __version__
from setfold.cli.processes import is_first, is_shown_elsewhere
from setfold.errors import InputError, SetfoldError

if TYPE_CHECKING:  # torch and Arrow take seconds to import, and --help does not need them
    from torch import nn

    from setfold.files.request import ProgressCallback
    from setfold.files.run import Progress

PASSED, BROKEN, USAGE = 0, 1, 2  # exit codes
INTERRUPTED = 130  # exit code, as of other programs that end by Ctrl-C
LINE_EVERY = 30.0  # seconds between lines if stderr is not a terminal
MAX_NAMES = 12  # in a line of facts
CONTINUE = (
    "Run the same command with --resume. It continues from the last checkpoint, or starts again if "
    "there is none."
)

STDIN = "-"

P = ParamSpec("P")

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


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command whose parameters are groups of options one that Typer understands.

    Typer needs one parameter for each option. A group is a dataclass with one field for each option.
    """
    own = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {}
    shown: list[inspect.Parameter] = []
    for name, parameter in own.parameters.items():
        kind = parameter.annotation
        if not is_dataclass(kind):
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(kind, type)
        groups[name] = kind
        hints = get_type_hints(kind, include_extras=True)
        shown += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(kind)
        ]

    @wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        command(**given, **made)

    vars(run)["__signature__"] = own.replace(parameters=shown)
    return run


# ---- the terminal ------------------------------------------------------------------------------


def explain_interrupts(command: Callable[P, None]) -> Callable[P, None]:
    """Make a command say after Ctrl-C what is kept, and how to continue."""

    @wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt as error:
            notes = getattr(error, "__notes__", [CONTINUE])  # added where the run was interrupted
            if is_first():
                typer.echo(f"setfold: interrupted. {' '.join(notes)}", err=True)
            raise typer.Exit(INTERRUPTED) from error

    return run


@contextmanager
def show_progress() -> Iterator[ProgressCallback]:
    """Yield a callback that shows progress: as a bar on a terminal, otherwise as lines of text."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    bar = Bar(
        TextColumn("{task.fields[phase]}"),
        BarColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("", phase="", total=None)
    last = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal last
        text = _format_progress(progress)
        bar.update(
            task,
            phase=progress.phase,
            completed=progress.done,
            total=progress.total or None,
            description=text,
        )
        if not console.is_terminal and time.monotonic() - last > LINE_EVERY:
            last = time.monotonic()
            console.print(f"{progress.phase}: {text}", soft_wrap=True)

    with bar:
        yield show


def _format_progress(progress: Progress) -> str:
    from setfold.files.budget import format_size

    parts = [f"{progress.elements:,} elements"]
    if progress.phase == "reading":
        parts.append(f"{format_size(progress.done)} of {format_size(progress.total)}")
        parts.append(f"{format_size(progress.rate)}/s")
    if progress.seconds_left is not None:
        parts.append(f"about {progress.seconds_left:.0f} s left")
    parts.append(f"{format_size(progress.memory)} in memory")
    return ", ".join(parts)


def print_facts(facts: dict[str, Any], as_json: bool) -> None:
    """Print facts as JSON, or as one line each."""
    from setfold.files.budget import format_size

    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        if value is None or value is False or value == ():
            continue
        if "bytes" in name or name == "peak_memory":
            value = format_size(value)
        elif name == "seconds":
            value = f"{value:.1f}"
        elif value is True:
            value = "yes"
        elif isinstance(value, int):
            value = f"{value:,}"
        elif isinstance(value, tuple):
            more = f" and {len(value) - MAX_NAMES} more" if len(value) > MAX_NAMES else ""
            value = ", ".join(value[:MAX_NAMES]) + more
        typer.echo(f"{name.replace('_', ' ') + ':':<22} {value}")


# ---- standard input ----------------------------------------------------------------------------


@contextmanager
def with_stdin(
    inputs: list[str], kind: str | None, *, column: str | None, resume: bool
) -> Iterator[list[str]]:
    """Yield the inputs, with a temporary file in place of "-": a run reads its inputs repeatedly.

    Args:
        inputs: Files, folders and glob patterns, and "-" for standard input.
        kind: The format of standard input, a suffix without its dot; None without "-".
        column: The set column; None if each file is a set.
        resume: Whether to resume an interrupted run.

    Raises:
        InputError: The format is missing or unknown, or standard input cannot be used here.
    """
    if STDIN not in inputs:
        if kind is not None:
            raise InputError("--format is for standard input. Pass - as an input, or omit it.")
        yield inputs
        return
    _check_stdin(inputs, kind, column, resume)
    with tempfile.TemporaryDirectory(prefix="setfold-") as folder:
        path = Path(folder) / f"stdin.{kind}"
        with path.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        yield [str(path) if name == STDIN else name for name in inputs]


def _check_stdin(inputs: list[str], kind: str | None, column: str | None, resume: bool) -> None:
    """Raise InputError if standard input cannot be read."""
    from setfold.files.inputs import READERS

    known = [s.removeprefix(".") for r in READERS if not r.is_folder for s in r.suffixes]
    if kind not in known:
        got = "none" if kind is None else repr(kind)
        raise InputError(
            f"expected the format of standard input with --format; got {got}. Pass one of "
            f"{', '.join(known)}."
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("several processes cannot share standard input. Write it to a file first.")
    if inputs.count(STDIN) > 1:
        raise InputError("standard input can be read once; got - several times.")
    if column is None:
        raise InputError("standard input has no name that could be a set id. Pass --set.")
    if resume:
        raise InputError(
            "standard input cannot be read again, so --resume is not possible. Write it to a file "
            "first, or start over with --restart."
        )
