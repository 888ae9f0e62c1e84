"""setfold encode, update, merge, readout: files in, vectors out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from setfold.cli.app import app, find_model

if TYPE_CHECKING:  # torch and Arrow take seconds to import, and --help should not wait for them
    from torch import nn

    from setfold.files.job import Tell
    from setfold.files.run import Progress, Summary

LINE_EVERY = 30.0  # seconds between lines where there is no terminal


class OnError(StrEnum):
    """What to do with rows and files that cannot be used."""

    STOP = "stop"
    SKIP = "skip"


class Engine(StrEnum):
    """What computes."""

    LOCAL = "local"
    RAY = "ray"


# A command line is flat: every option of it is an argument here, so there are many.

Inputs = Annotated[
    list[str],
    typer.Argument(
        help="Files, folders and patterns: Parquet, Arrow, CSV, npy, npz, HDF5, Zarr, LAS/LAZ, meshes, ROOT, torch."
    ),
]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="A .parquet, .arrow or .npz file: set, count, encoding.")
]
SetColumn = Annotated[
    str | None,
    typer.Option(
        "--set",
        help="Column that tells which set a row belongs to, or key of a key=value folder. Without it every file is one set.",
    ),
]
Features = Annotated[
    str | None,
    typer.Option(
        help="Columns in the order in which the model takes them: 'x,y,z', 'x*0.01,y*0.01'. All columns of numbers but "
        "the set's if left out.",
    ),
]
Explode = Annotated[
    bool, typer.Option("--explode", help="Each row holds many elements, in lists of one length.")
]
Memory = Annotated[
    str,
    typer.Option(help="What the process may take: 800MB, 2GB, 1.5GiB. Ray's workers come on top."),
]
OnErrorOption = Annotated[
    OnError,
    typer.Option(help="'skip' leaves out rows and files that cannot be used, and lists them."),
]
EngineOption = Annotated[Engine, typer.Option(help="'ray' computes on a Ray cluster.")]
Address = Annotated[
    str | None,
    typer.Option(help="Of the Ray cluster; 'auto' for this machine's. Without it one is started."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with a run that was killed, if there is one.")
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Drop what a run that was killed has left.")
]
SaveEvery = Annotated[
    float, typer.Option(help="Seconds of work that a kill costs at most, if saving is quick.")
]
Again = Annotated[
    bool, typer.Option("--again", help="Allow inputs that are in the states already.")
]
Allow = Annotated[
    list[str] | None,
    typer.Option(help="Import path of a class of yours that the model may name; repeatable."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help="The model, where it is not the one in the states: another head, say."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(
    epilog="Examples:\n\n  setfold encode model.safetensors events/*.parquet --set event_id --out encodings.parquet\n\n"
    "  setfold encode model.safetensors scans/*.laz --features x,y,z --out encodings.parquet\n\n"
    "  setfold encode model.safetensors events/ --set event_id --out e.parquet --states s.arrow --resume\n\n"
    "  setfold encode model.safetensors events/ --set event_id --out e.parquet --engine ray --address auto"
)
def encode(
    model: Annotated[
        str,
        typer.Argument(help="A model file that setfold.save wrote, or package.module:name."),
    ],
    inputs: Inputs,
    out: Out,
    column: SetColumn = None,
    features: Features = None,
    explode: Explode = False,
    states: Annotated[
        Path | None,
        typer.Option(help="Keep the states too, in this .arrow file, to be updated and merged."),
    ] = None,
    memory: Memory = "2GB",
    on_error: OnErrorOption = OnError.STOP,
    engine: EngineOption = Engine.LOCAL,
    address: Address = None,
    resume: Resume = False,
    restart: Restart = False,
    save_every: SaveEvery = 20.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would be read, and what it would cost.")
    ] = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Encode sets whose elements stand in files: one vector for each set.

    Sets may be larger than memory, more than memory holds, and spread over files in any order.
    """
    subject = find_model(model, allow or [])
    from setfold.files.encode import encode_sets

    skip = on_error is OnError.SKIP
    if dry_run:
        _show(_forecast(subject, inputs, column, features, explode, memory, skip), as_json)
        return
    _run(
        encode_sets,
        as_json,
        subject,
        inputs,
        out,
        set=column,
        features=features,
        explode=explode,
        states=states,
        memory=memory,
        skip_errors=skip,
        engine=engine,
        address=address,
        resume=resume,
        restart=restart,
        save_every=save_every,
    )


@app.command(
    epilog="Examples:\n\n  setfold update states.arrow today/*.parquet --set event_id\n\n"
    "  setfold update states.arrow today/ --set event_id --out tomorrow.arrow"
)
def update(
    states: Annotated[Path, typer.Argument(help="A file that encode --states wrote.")],
    inputs: Inputs,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the new states go; the old ones are replaced if left out."),
    ] = None,
    model: ModelOption = None,
    column: SetColumn = None,
    features: Features = None,
    explode: Explode = False,
    memory: Memory = "2GB",
    on_error: OnErrorOption = OnError.STOP,
    again: Again = False,
    engine: EngineOption = Engine.LOCAL,
    address: Address = None,
    resume: Resume = False,
    restart: Restart = False,
    save_every: SaveEvery = 20.0,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Add the elements of more files to states that were kept."""
    from setfold.files.collected import update_states

    _run(
        update_states,
        as_json,
        states,
        inputs,
        out=out,
        **_whose(model, allow),
        set=column,
        features=features,
        explode=explode,
        again=again,
        memory=memory,
        skip_errors=on_error is OnError.SKIP,
        engine=engine,
        address=address,
        resume=resume,
        restart=restart,
        save_every=save_every,
    )


@app.command(epilog="Example:\n\n  setfold merge monday.arrow tuesday.arrow --out both.arrow")
def merge(
    states: Annotated[list[Path], typer.Argument(help="Files that encode --states wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="An .arrow file.")],
    model: ModelOption = None,
    memory: Memory = "2GB",
    again: Again = False,
    resume: Resume = False,
    restart: Restart = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Merge files of states into one."""
    from setfold.files.collected import merge_states

    care = {"memory": memory, "resume": resume, "restart": restart}
    _run(merge_states, as_json, states, out, **_whose(model, allow), again=again, **care)


@app.command(epilog="Example:\n\n  setfold readout all.arrow --out encodings.parquet")
def readout(
    states: Annotated[Path, typer.Argument(help="A file that encode --states wrote.")],
    out: Out,
    model: ModelOption = None,
    memory: Memory = "2GB",
    resume: Resume = False,
    restart: Restart = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Read the encodings out of a file of states."""
    from setfold.files.collected import readout_states

    care = {"memory": memory, "resume": resume, "restart": restart}
    _run(readout_states, as_json, states, out, **_whose(model, allow), **care)


def _whose(model: str | None, allow: list[str] | None) -> dict[str, Any]:
    """The model that states are of: one that is named, or the one in their file."""
    subject = None if model is None else find_model(model, allow or [])
    return {"model": subject, "allow": allow or ()}


def _run(job: Callable[..., Summary], as_json: bool, *arguments: Any, **options: Any) -> None:
    """Carry out a job, show how far it is, and what it did."""
    with _progress() as tell:
        summary = job(*arguments, **options, progress=tell)
    _show({**asdict(summary), "elements_per_second": round(summary.rate)}, as_json)


# ---- what is shown -----------------------------------------------------------------------------


@contextmanager
def _progress() -> Iterator[Tell]:
    """Something that shows how far a run is: a bar on a terminal, elsewhere a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    bar = Bar(
        TextColumn("{task.fields[doing]}"),
        BarColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    shown = bar.add_task("", doing="", total=None)
    last = time.monotonic()

    def tell(progress: Progress) -> None:
        nonlocal last
        text = _line(progress)
        bar.update(
            shown,
            doing=progress.doing,
            completed=progress.done,
            total=progress.total or None,
            description=text,
        )
        if not console.is_terminal and time.monotonic() - last > LINE_EVERY:
            last = time.monotonic()
            console.print(f"{progress.doing}: {text}", soft_wrap=True)

    with bar:
        yield tell


def _line(progress: Progress) -> str:
    from setfold.files.budget import shown_size

    parts = [f"{progress.elements:,} elements"]
    if progress.doing == "reading":
        parts.append(f"{shown_size(progress.done)} of {shown_size(progress.total)}")
        parts.append(f"{shown_size(progress.rate)}/s")
    if progress.left is not None:
        parts.append(f"about {progress.left:.0f} s left")
    parts.append(f"{shown_size(progress.memory)} in memory")
    return ", ".join(parts)


def _forecast(
    model: nn.Module,
    inputs: list[str],
    column: str | None,
    features: str | None,
    explode: bool,
    memory: str,
    skip: bool,
) -> dict[str, Any]:
    """What encoding would read, and what it would cost, by what its first rows cost."""
    from setfold.files.columns import Columns, features_of
    from setfold.files.job import ReadOptions, completed, plan_for, streaming
    from setfold.files.tables.table import state_bytes

    options = completed({"memory": memory, "skip_errors": skip}, ReadOptions)
    columns = Columns(features_of(features), column, explode)
    plan = plan_for(streaming(model), inputs, columns, options)
    facts: dict[str, Any] = {
        "files": len(plan.inputs),
        "bytes": plan.bytes,
        "rows": plan.rows,
        "skipped": len(plan.skipped),
        "set_type": str(plan.set_type),
        "width": plan.task.width,
        "rows_at_once": plan.division.rows,
        "bytes_for_states": plan.division.budget,
        "sets_before_spilling": plan.division.budget // 4 // state_bytes(plan.task.encoder),
    }
    if plan.pieces:
        started = time.monotonic()
        step = next(plan.task.steps(0, plan.pieces[0]), None)
        seconds = time.monotonic() - started
        if plan.rows is not None and step is not None and step.rows:
            facts["seconds"] = round(seconds * plan.rows / step.rows, 1)
    return facts


def _show(facts: dict[str, Any], as_json: bool) -> None:
    from setfold.files.budget import shown_size

    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        if value is None or value == ():
            continue
        if "bytes" in name or name == "peak_memory":
            value = shown_size(value)
        elif name == "seconds":
            value = f"{value:.1f}"
        elif isinstance(value, int):
            value = f"{value:,}"
        elif isinstance(value, tuple):
            value = ", ".join(value)
        typer.echo(f"{name.replace('_', ' ') + ':':<22} {value}")
