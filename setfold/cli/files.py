"""The commands encode, update, merge and readout: encode sets from files."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from setfold.cli.app import app, import_from_here, load_model
from setfold.cli.show import explain_interrupts, print_facts, show_progress
from setfold.cli.stdin import with_stdin

if TYPE_CHECKING:  # torch and Arrow take seconds to import, and --help does not need them
    from torch import nn

    from setfold.files.run import Summary


class OnError(StrEnum):
    """What to do with bad rows and files, and with sets that overflow."""

    STOP = "stop"
    SKIP = "skip"


class DtypeName(StrEnum):
    """In which dtype to compute."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"


class EngineName(StrEnum):
    """Where to compute."""

    LOCAL = "local"
    RAY = "ray"


# Typer needs one argument for each option, so the commands have many.

Inputs = Annotated[
    list[str],
    typer.Argument(
        help="Files, folders and glob patterns: Parquet, Arrow, CSV, JSON lines, npy, npz, HDF5, "
        "Zarr, LAS/LAZ, meshes, ROOT, torch; - for standard input, with --format."
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out", "-o", help="Output: .parquet, .arrow, .npz or .csv with set, count, encoding."
    ),
]
SetColumn = Annotated[
    str | None,
    typer.Option(
        "--set",
        help="Column with the set id of each row, or key of a key=value folder; several as "
        "'run,event'. If omitted, each file is one set, and its absolute path is the set id.",
    ),
]
Root = Annotated[
    Path | None,
    typer.Option(
        help="Folder that contains all inputs. Without --set, set ids are paths relative to it "
        "instead of absolute paths."
    ),
]
Features = Annotated[
    str | None,
    typer.Option(
        help="Columns in the order the model expects: 'x,y,z' or 'x*0.01,(y-500)*0.01'. '!weight' for "
        "all but weight. Default: all numeric columns except the set column.",
    ),
]
Format = Annotated[
    str | None,
    typer.Option("--format", help="Format of standard input, if an input is -: csv, jsonl, ..."),
]
Explode = Annotated[
    bool, typer.Option("--explode", help="Each row holds many elements, as lists of equal length.")
]
Memory = Annotated[
    str,
    typer.Option(help="Memory limit of this process: 800MB, 2GB, 1.5GiB. Excludes Ray workers."),
]
OnErrorOption = Annotated[
    OnError,
    typer.Option(
        help="Bad rows and files, and sets that overflow: 'stop' stops the run and names them, "
        "'skip' skips them and lists them in a report."
    ),
]
EngineOption = Annotated[
    EngineName, typer.Option(help="Compute in this process, or on a Ray cluster.")
]
Address = Annotated[
    str | None,
    typer.Option(
        help="Address of the Ray cluster; 'auto' for the cluster of this machine. If omitted, Ray "
        "is started on this machine."
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Resume an interrupted run from its last checkpoint. Do nothing if the output is "
        "already complete.",
    ),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Discard an interrupted run and start over.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace outputs that exist. Inputs are never replaced.")
]
SaveEvery = Annotated[float, typer.Option(help="Checkpoint interval in seconds.")]
Again = Annotated[
    bool, typer.Option("--again", help="Accept inputs that the states already contain.")
]
Allow = Annotated[
    list[str] | None,
    typer.Option(help="Import path of a class that the model file may use. Repeatable."),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help="Model to use instead of the one in the states, e.g. with another head."
    ),
]
Head = Annotated[
    bool,
    typer.Option(
        "--head/--no-head",
        help="Apply the head of the model, for predictions instead of encodings. A classifier then "
        "writes the most probable label as prediction, and the probability of each.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(
    epilog="Examples:\n\n"
    "  setfold encode model.safetensors events/*.parquet --set event_id --out encodings.parquet\n\n"
    "  setfold encode model.safetensors scans/*.laz --features x,y,z --out encodings.parquet\n\n"
    "  setfold encode model.safetensors events/ --set event_id --out e.parquet "
    "--states s.arrow --resume\n\n"
    "  setfold encode model.safetensors events/ --set event_id --out e.parquet "
    "--engine ray --address auto\n\n"
    "  zcat events.jsonl.gz | setfold encode model.safetensors - --format jsonl --set event_id "
    "--out e.parquet"
)
@explain_interrupts
def encode(
    model: Annotated[
        str,
        typer.Argument(help="Model file written by setfold.save, or package.module:name."),
    ],
    inputs: Inputs,
    out: Out,
    column: SetColumn = None,
    features: Features = None,
    explode: Explode = False,
    root: Root = None,
    stdin_format: Format = None,
    states: Annotated[
        Path | None,
        typer.Option(
            help="Also save the states to this .arrow file, to update and merge them later."
        ),
    ] = None,
    dtype: Annotated[
        DtypeName | None,
        typer.Option(
            help="Compute in this dtype. Default: that of the model. States keep it: update, merge "
            "and readout use the same."
        ),
    ] = None,
    head: Head = False,
    memory: Memory = "2GB",
    on_error: OnErrorOption = OnError.STOP,
    engine: EngineOption = EngineName.LOCAL,
    address: Address = None,
    resume: Resume = False,
    restart: Restart = False,
    overwrite: Overwrite = False,
    save_every: SaveEvery = 20.0,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what would be read and estimate the time; write nothing."
        ),
    ] = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Encode sets from files and write one vector per set.

    A set may be larger than memory, there may be more sets than fit in memory, and the rows of a
    set may be spread over the files in any order.
    """
    encoder = load_model(model, allow or [])
    from setfold.files.api import encode_sets

    skip = on_error is OnError.SKIP
    with with_stdin(inputs, stdin_format, column=column, resume=resume) as names:
        if dry_run:
            columns = {"set": column, "features": features, "explode": explode, "root": root}
            print_facts(_estimate(encoder, names, columns, dtype, memory, skip), as_json)
            return
        _run(
            encode_sets,
            as_json,
            encoder,
            names,
            out,
            set=column,
            features=features,
            explode=explode,
            root=root,
            states=states,
            dtype=dtype,
            head=head,
            memory=memory,
            skip_errors=skip,
            engine=engine,
            address=address,
            resume=resume,
            restart=restart,
            overwrite=overwrite,
            save_every=save_every,
        )


@app.command(
    epilog="Examples:\n\n  setfold update states.arrow today/*.parquet --set event_id\n\n"
    "  setfold update states.arrow today/ --set event_id --out tomorrow.arrow"
)
@explain_interrupts
def update(
    states: Annotated[Path, typer.Argument(help="State file written by encode --states.")],
    inputs: Inputs,
    out: Annotated[
        Path | None,
        typer.Option(help="Output for the new states. If omitted, the file is updated in place."),
    ] = None,
    model: ModelOption = None,
    column: SetColumn = None,
    features: Features = None,
    explode: Explode = False,
    root: Root = None,
    stdin_format: Format = None,
    memory: Memory = "2GB",
    on_error: OnErrorOption = OnError.STOP,
    again: Again = False,
    engine: EngineOption = EngineName.LOCAL,
    address: Address = None,
    resume: Resume = False,
    restart: Restart = False,
    overwrite: Overwrite = False,
    save_every: SaveEvery = 20.0,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Add the elements of more files to saved states."""
    from setfold.files.api import update_states

    with with_stdin(inputs, stdin_format, column=column, resume=resume) as names:
        _run(
            update_states,
            as_json,
            states,
            names,
            out=out,
            **_model_options(model, allow),
            set=column,
            features=features,
            explode=explode,
            root=root,
            again=again,
            memory=memory,
            skip_errors=on_error is OnError.SKIP,
            engine=engine,
            address=address,
            resume=resume,
            restart=restart,
            overwrite=overwrite,
            save_every=save_every,
        )


@app.command(epilog="Example:\n\n  setfold merge monday.arrow tuesday.arrow --out both.arrow")
@explain_interrupts
def merge(
    states: Annotated[list[Path], typer.Argument(help="State files written by encode --states.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output, an .arrow file.")],
    model: ModelOption = None,
    memory: Memory = "2GB",
    on_error: OnErrorOption = OnError.STOP,
    again: Again = False,
    resume: Resume = False,
    restart: Restart = False,
    overwrite: Overwrite = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Merge several state files into one."""
    from setfold.files.api import merge_states

    _run(
        merge_states,
        as_json,
        states,
        out,
        **_model_options(model, allow),
        again=again,
        memory=memory,
        skip_errors=on_error is OnError.SKIP,
        resume=resume,
        restart=restart,
        overwrite=overwrite,
    )


@app.command(epilog="Example:\n\n  setfold readout all.arrow --out encodings.parquet")
@explain_interrupts
def readout(
    states: Annotated[Path, typer.Argument(help="State file written by encode --states.")],
    out: Out,
    model: ModelOption = None,
    head: Head = False,
    memory: Memory = "2GB",
    on_error: OnErrorOption = OnError.STOP,
    resume: Resume = False,
    restart: Restart = False,
    overwrite: Overwrite = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Compute the encodings of the sets in a state file."""
    from setfold.files.api import readout_states

    _run(
        readout_states,
        as_json,
        states,
        out,
        **_model_options(model, allow),
        head=head,
        memory=memory,
        skip_errors=on_error is OnError.SKIP,
        resume=resume,
        restart=restart,
        overwrite=overwrite,
    )


def _model_options(model: str | None, allow: list[str] | None) -> dict[str, Any]:
    """Return the arguments for the model of saved states."""
    import_from_here()
    encoder = None if model is None else load_model(model, allow or [])
    return {"model": encoder, "allow": allow or ()}


def _run(function: Callable[..., Summary], as_json: bool, *arguments: Any, **options: Any) -> None:
    """Call a function of `setfold.files.api`. Show its progress and its summary."""
    with show_progress() as callback:
        summary = function(*arguments, **options, progress=callback)
    if summary.was_complete:
        names, verb = ", ".join(summary.out), "are" if len(summary.out) > 1 else "is"
        typer.echo(f"{names} {verb} already complete; nothing was computed.", err=True)
    print_facts({**asdict(summary), "elements_per_second": round(summary.rate)}, as_json)


def _estimate(
    model: nn.Module,
    inputs: list[str],
    columns: dict[str, Any],
    dtype: str | None,
    memory: str,
    skip: bool,
) -> dict[str, Any]:
    """Return what encoding would read, and an estimate of the time from the first rows."""
    from setfold.files.passes import first_pass
    from setfold.files.request import (
        ReadOptions,
        build_plan,
        cast_encoder,
        make_columns,
        with_defaults,
    )

    options = with_defaults({"memory": memory, "skip_errors": skip}, ReadOptions)
    first, passes = first_pass(model)
    encoder = cast_encoder(first, dtype)
    plan = build_plan(encoder, inputs, make_columns(**columns), options)
    facts: dict[str, Any] = {
        "files": len(plan.inputs),
        "bytes": plan.bytes,
        "rows": plan.rows,
        "passes": passes,
        "skipped": len(plan.skipped),
        "set_type": str(plan.set_type),
        "width": plan.task.width,
        "rows_at_once": plan.budget.batch_rows,
        "bytes_for_states": plan.budget.store_bytes,
        "sets_before_spilling": plan.budget.store_bytes // 4 // plan.task.encoder.state_nbytes,
    }
    if plan.shards:
        started = time.monotonic()
        step = next(plan.task.steps(0, plan.shards[0]), None)
        seconds = time.monotonic() - started
        if plan.rows is not None and step is not None and step.rows:
            facts["seconds"] = round(passes * seconds * plan.rows / step.rows, 1)
    return facts
