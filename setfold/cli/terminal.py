"""The terminal: progress, summaries, what is kept after Ctrl-C, and rows from standard input."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from setfold.errors import InputError

if TYPE_CHECKING:  # torch and Arrow take seconds to import, and --help does not need them
    from setfold.files.request import ProgressCallback
    from setfold.files.run import Progress

STDIN = "-"
INTERRUPTED = 130  # exit code, as of other programs that end by Ctrl-C
LINE_EVERY = 30.0  # seconds between lines if stderr is not a terminal
CONTINUE = (
    "Run the same command with --resume. It continues from the last checkpoint, or starts again if "
    "there is none."
)

P = ParamSpec("P")


def explain_interrupts(command: Callable[P, None]) -> Callable[P, None]:
    """Make a command say after Ctrl-C what is kept, and how to continue."""

    @wraps(command)
    def run(*arguments: P.args, **options: P.kwargs) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt as error:
            notes = getattr(error, "__notes__", [CONTINUE])  # added where the run was interrupted
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
            value = ", ".join(value)
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
    if inputs.count(STDIN) > 1:
        raise InputError("standard input can be read once; got - several times.")
    if column is None:
        raise InputError("standard input has no name that could be a set id. Pass --set.")
    if resume:
        raise InputError(
            "standard input cannot be read again, so --resume is not possible. Write it to a file "
            "first, or start over with --restart."
        )
