"""The commands check and info: inspect models and states."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

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


@app.command(
    epilog="Examples:\n\n  setfold info encoder.safetensors\n\n"
    "  setfold info state.safetensors --json"
)
def info(
    file: Annotated[
        Path,
        typer.Argument(help="A model file, a state, or a state file written by encode --states."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a model or state file contains. No code from the file is run."""
    from setfold.core import persist

    if file.suffix == ".arrow":
        _print_info(_describe_states(file), as_json)
        return
    kind, tensors, description = persist.read(file)
    facts: dict[str, Any] = {
        "file": str(file),
        "kind": kind,
        "format": persist.FORMAT_VERSION,
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
    _print_info(facts, as_json)


def _describe_states(file: Path) -> dict[str, Any]:
    """Return the facts about a state file."""
    from setfold.files.columns import format_features
    from setfold.files.states import read_provenance

    set_type, sets, provenance = read_provenance(file)
    columns = provenance.columns
    return {
        "file": str(file),
        "kind": "states",
        "bytes": file.stat().st_size,
        "sets": sets,
        "named by": str(set_type),
        "features": format_features(columns.features or ()) if columns else "unknown",
        "model": f"{len(provenance.model):,} bytes" if provenance.model else "not in the file",
        "inputs": {name: f"{size:,} bytes" for name, (size, _) in provenance.inputs.items()},
    }


def _print_info(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        typer.echo(
            f"{name + ':':<12} {value if isinstance(value, (str, int)) else _format_value(value)}"
        )


def _format_value(value: Any) -> str:
    if isinstance(value, dict) and "class" in value:
        value = _outline(value)
    elif isinstance(value, dict):
        value = [f"{name:<32} {shown}" for name, shown in value.items()]
    else:
        return ", ".join(map(str, value))
    return "\n  " + "\n  ".join(value)


def _outline(structure: dict[str, Any], label: str = "", depth: int = 0) -> list[str]:
    """Return the description of a model as indented lines."""
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
