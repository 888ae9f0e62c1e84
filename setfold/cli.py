"""The command line: setfold check, setfold info."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
            help="A model file that setfold.save wrote, or package.module:name for a model, a class "
            "or a function that makes one.",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Instead of a model, compare all of setfold's own encoders."),
    ] = False,
    dim_in: Annotated[
        int | None, typer.Option(help="Width of the elements, where the model does not tell.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="Import path of a class of yours that the file may name; repeatable."),
    ] = None,
    processes: Annotated[
        bool, typer.Option(help="Also merge with a state from another process.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Seed of the random cases.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Put the laws of a fold to the test on a model.

    Exit code 0 if every law that applies holds, 1 if one fails, 2 if the model cannot be had.

    With --all the exit code is 0 if every encoder is what it claims to be.
    """
    if (model is None) != everything:
        raise typer.BadParameter("name a model, or give --all for all of setfold's encoders.")
    subject = None if model is None else _model(model, allow or [])
    from rich.console import Console

    from setfold import checks

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
        typer.echo(str(report), nl=False)  # a pipe has no width that a table must fit
    raise typer.Exit(PASSED if report.passed else BROKEN)


@app.command(
    epilog="Examples:\n\n  setfold info encoder.safetensors\n\n  setfold info state.safetensors --json"
)
def info(
    file: Annotated[Path, typer.Argument(help="A model or state file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what is in a model or state file, without running anything in it."""
    from setfold import files

    kind, tensors, description = files.read(file)
    facts: dict[str, Any] = {
        "file": str(file),
        "kind": kind,
        "format": files.FORMAT_VERSION,
        "bytes": file.stat().st_size,
    }
    if kind == "state":
        counts = tensors["count"].tolist()
        facts |= {"sets": len(counts), "elements": sum(counts)}
    else:
        facts |= {"parameters": sum(t.numel() for t in tensors.values())}
    facts |= description
    facts["tensors"] = {
        name: f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}"
        for name, t in tensors.items()
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        typer.echo(f"{name + ':':<12} {value if isinstance(value, (str, int)) else _lines(value)}")


def _lines(value: Any) -> str:
    if isinstance(value, dict) and "class" in value:
        value = _outline(value)
    elif isinstance(value, dict):
        value = [f"{name:<32} {shown}" for name, shown in value.items()]
    else:
        return ", ".join(map(str, value))
    return "\n  " + "\n  ".join(value)


def _outline(structure: dict[str, Any], label: str = "", depth: int = 0) -> list[str]:
    """A model's description as indented lines."""
    arguments = structure.get("arguments", {})
    inner: list[tuple[str, dict[str, Any]]] = []
    plain = []
    for name, value in arguments.items():
        nested = value if isinstance(value, list) else [value]
        modules = [v["module"] for v in nested if isinstance(v, dict)]
        inner += [(name if len(modules) == 1 else f"{name}[{i}]", m) for i, m in enumerate(modules)]
        if not modules:
            plain.append(f"{name}={value!r}")
    inner += [(name, child) for name, child in structure.get("children", [])]
    lines = ["  " * depth + f"{label}{structure['class']}({', '.join(plain)})"]
    for name, module in inner:
        lines += _outline(module, f"{name}: ", depth + 1)
    return lines


def _model(name: str, allow: list[str]) -> nn.Module:
    """A model from a file, or from an import path."""
    if ":" not in name or Path(name).exists():
        from setfold.io.models import load

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


def main() -> None:
    """Run the command line."""
    run(app, "setfold", USAGE)


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


if __name__ == "__main__":
    main()
