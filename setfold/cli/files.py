"""The commands encode, merge and readout: encode sets from files."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from setfold.cli.app import (
    app,
    explain_interrupts,
    grouped,
    import_from_here,
    load_model,
    print_facts,
    show_progress,
    with_stdin,
)
from setfold.cli.options import (
    Address,
    Again,
    Allow,
    DtypeName,
    EngineName,
    EngineOption,
    Explode,
    Features,
    Format,
    Head,
    Inputs,
    Json,
    Memory,
    ModelOption,
    OnError,
    OnErrorOption,
    Out,
    Overwrite,
    Restart,
    Resume,
    Root,
    SaveEvery,
    SetColumn,
    Threads,
)

if TYPE_CHECKING:  # torch and Arrow take seconds to import, and --help does not need them
    from torch import nn

    from setfold.files.run import Summary


States = Annotated[Path, typer.Argument(help="State file written by encode --states.")]


@dataclass(frozen=True)
class Reading:
    """Which rows to read, and where to compute."""

    column: SetColumn = None
    features: Features = None
    explode: Explode = False
    root: Root = None
    stdin_format: Format = None
    engine: EngineOption = EngineName.LOCAL
    address: Address = None

    def columns(self) -> dict[str, Any]:
        """Return which columns to read, as arguments of the functions of `setfold.files.api`."""
        return {
            "set": self.column,
            "features": self.features,
            "explode": self.explode,
            "root": self.root,
        }

    def arguments(self) -> dict[str, Any]:
        """Return the options as arguments of the functions of `setfold.files.api`."""
        return {**self.columns(), "engine": self.engine, "address": self.address}


@dataclass(frozen=True)
class Running:
    """How to run, and what to print."""

    memory: Memory = "2GB"
    threads: Threads = None
    on_error: OnErrorOption = OnError.STOP
    resume: Resume = False
    restart: Restart = False
    overwrite: Overwrite = False
    save_every: SaveEvery = 20.0
    as_json: Json = False

    def arguments(self) -> dict[str, Any]:
        """Return the options as arguments of the functions of `setfold.files.api`."""
        return {
            "memory": self.memory,
            "threads": self.threads,
            "skip_errors": self.on_error is OnError.SKIP,
            "resume": self.resume,
            "restart": self.restart,
            "overwrite": self.overwrite,
            "save_every": self.save_every,
        }


@dataclass(frozen=True)
class SavedModel:
    """The model of saved states."""

    model: ModelOption = None
    allow: Allow = None

    def arguments(self) -> dict[str, Any]:
        """Return the options as arguments of the functions of `setfold.files.api`."""
        import_from_here()
        allow = self.allow or []
        model = None if self.model is None else load_model(self.model, allow)
        return {"model": model, "allow": allow}


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
@grouped
def encode(
    model: Annotated[
        str,
        typer.Argument(help="Model file written by setfold.save, or package.module:name."),
    ],
    inputs: Inputs,
    out: Out,
    *,
    reading: Reading,
    states: Annotated[
        Path | None,
        typer.Option(
            help="Also save the states to this .arrow file, for merge, readout and live import."
        ),
    ] = None,
    dtype: Annotated[
        DtypeName | None,
        typer.Option(
            help="Compute in this dtype. Default: that of the model. States keep it: merge and "
            "readout use the same."
        ),
    ] = None,
    head: Head = False,
    running: Running,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what would be read and estimate the time; write nothing."
        ),
    ] = False,
    allow: Allow = None,
) -> None:
    """Encode sets from files and write one vector per set.

    A set may be larger than memory, there may be more sets than fit in memory, and the rows of a
    set may be spread over the files in any order.
    """
    encoder = load_model(model, allow or [])
    from setfold.files.api import encode_sets

    with _names_of(inputs, reading, running) as names:
        if dry_run:
            print_facts(_estimate(encoder, names, reading, running, dtype), running.as_json)
            return
        more = {"states": states, "dtype": dtype, "head": head}
        _run(encode_sets, running, encoder, names, out, **reading.arguments(), **more)


@app.command(epilog="Example:\n\n  setfold merge monday.arrow tuesday.arrow --out both.arrow")
@explain_interrupts
@grouped
def merge(
    states: Annotated[list[Path], typer.Argument(help="State files written by encode --states.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output, an .arrow file.")],
    *,
    saved: SavedModel,
    again: Again = False,
    running: Running,
) -> None:
    """Merge several state files into one."""
    from setfold.files.api import merge_states

    _run(merge_states, running, states, out, **saved.arguments(), again=again)


@app.command(epilog="Example:\n\n  setfold readout all.arrow --out encodings.parquet")
@explain_interrupts
@grouped
def readout(
    states: States,
    out: Out,
    *,
    saved: SavedModel,
    head: Head = False,
    running: Running,
) -> None:
    """Compute the encodings of the sets in a state file."""
    from setfold.files.api import readout_states

    _run(readout_states, running, states, out, **saved.arguments(), head=head)


def _names_of(
    inputs: list[str], reading: Reading, running: Running
) -> AbstractContextManager[list[str]]:
    """A context with the inputs of a run, in which standard input is a file."""
    return with_stdin(inputs, reading.stdin_format, column=reading.column, resume=running.resume)


def _run(function: Callable[..., Summary], running: Running, *arguments: Any, **more: Any) -> None:
    """Call a function of `setfold.files.api`. Show its progress and its summary."""
    with show_progress() as callback:
        summary = function(*arguments, **more, **running.arguments(), progress=callback)
    if summary.was_complete:
        names, verb = ", ".join(summary.out), "are" if len(summary.out) > 1 else "is"
        typer.echo(f"{names} {verb} already complete; nothing was computed.", err=True)
    print_facts({**asdict(summary), "elements_per_second": round(summary.rate)}, running.as_json)


def _estimate(
    model: nn.Module,
    inputs: list[str],
    reading: Reading,
    running: Running,
    dtype: str | None,
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

    skip = running.on_error is OnError.SKIP
    options = with_defaults({"memory": running.memory, "skip_errors": skip}, ReadOptions)
    first, passes = first_pass(model)
    encoder = cast_encoder(first, dtype)
    plan = build_plan(encoder, inputs, make_columns(**reading.columns()), options)
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
