"""What the commands show: progress, summaries, and what is kept after Ctrl-C."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from setfold.cli.processes import is_first

if TYPE_CHECKING:  # torch and Arrow take seconds to import, and --help does not need them
    from setfold.files.request import ProgressCallback
    from setfold.files.run import Progress

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
            value = ", ".join(value)
        typer.echo(f"{name.replace('_', ' ') + ':':<22} {value}")
