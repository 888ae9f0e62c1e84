"""The commands `setfold live update` and `setfold live upgrade`: rows into a store."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from setfold.cli.app import (
    STDIN,
    explain_interrupts,
    grouped,
    load_model,
    print_facts,
    show_progress,
)
from setfold.cli.files import SavedModel
from setfold.cli.live import ModelFile, live, open_store
from setfold.cli.options import (
    Allow,
    DtypeName,
    Features,
    Json,
    LiveColumn,
    OnError,
    OnErrorOption,
    Source,
    Store,
    TimeColumn,
)
from setfold.errors import InputError

if TYPE_CHECKING:  # torch and Arrow take seconds to import, and --help does not need them
    from setfold.live import LiveSets
    from setfold.live.sources.intake import Intake

upgrade = typer.Typer(
    name="upgrade",
    help="Replace the model of a store without a gap: add, fill, switch, drop.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
live.add_typer(upgrade)

AGAIN = (
    "What was applied stays, and each file is applied completely or not at all. Run the same command "
    "again: nothing counts twice."
)

LiveInputs = Annotated[
    list[str],
    typer.Argument(
        help="Files, folders and glob patterns of any format that encode reads; - for JSON lines "
        "from standard input; or kafka://broker:9092/topic."
    ),
]
Number = Annotated[int, typer.Argument(help="Number of a model, as `setfold live info` lists it.")]


@dataclass(frozen=True)
class Rows:
    """How the rows of a source are read."""

    column: LiveColumn
    features: Features = None
    time: TimeColumn = None
    on_error: OnErrorOption = OnError.STOP

    def intake(self, sets: LiveSets, *, history: bool = False) -> Intake:
        """Return what takes rows into a store."""
        from setfold.live.sources.intake import Intake

        skip = self.on_error is OnError.SKIP
        return Intake(sets, self.column, self.features, self.time, skip, history)


@live.command(
    epilog="Examples:\n\n  setfold live update live.db today/*.parquet --set user\n\n"
    "  setfold live update live.db inbox/ --set user --time at --watch 10\n\n"
    "  tail -F events.jsonl | setfold live update live.db - --set user --source events\n\n"
    "  setfold live update live.db kafka://broker:9092/clicks --set user"
)
@explain_interrupts
@grouped
def update(
    store: Store,
    inputs: LiveInputs,
    *,
    rows: Rows,
    source: Source = None,
    watch: Annotated[
        float | None,
        typer.Option(
            help="Look for new files every so many seconds, until Ctrl-C or SIGTERM. A file is "
            "applied when it has not changed between two looks.",
            min=0.01,
            max=86400,
        ),
    ] = None,
    saved: SavedModel,
    as_json: Json = False,
) -> None:
    """Add rows to their sets. What was added before, in whole batches, changes nothing."""
    started = time.monotonic()
    _check_inputs(inputs, source, watch)
    with open_store(store, saved) as sets:
        intake, unreadable = rows.intake(sets), 0
        if inputs[0].startswith("kafka://"):
            _update_from_topic(intake, inputs[0], source)
        elif inputs == [STDIN]:
            _update_from_stdin(intake, source or "")
        else:
            unreadable = _update_from_files(intake, inputs, source, watch)
    _print_intake(intake, unreadable, time.monotonic() - started, as_json)


def _check_inputs(inputs: list[str], source: str | None, watch: float | None) -> None:
    """Raise InputError if inputs do not go together."""
    is_stream = [name == STDIN or name.startswith("kafka://") for name in inputs]
    if any(is_stream) and len(inputs) > 1:
        raise InputError("standard input, or a topic, must be the only input.")
    if any(is_stream) and watch is not None:
        raise InputError("--watch is for files and folders. Omit it.")
    if inputs == [STDIN] and source is None:
        raise InputError(
            "standard input needs a name, so that lines that are piped again count once. Pass "
            "--source."
        )


def _update_from_files(
    intake: Intake, inputs: list[str], source: str | None, watch: float | None
) -> int:
    """Apply files; return how many could not be read."""
    from setfold.live.sources.files import FileSource
    from setfold.live.sources.files import watch as watch_files
    from setfold.live.sources.intake import stopping

    def skip(error: Exception) -> None:
        typer.echo(f"setfold: skipped: {error}", err=True)

    with show_progress() as progress, _noting(AGAIN):
        files = FileSource(intake, source, progress, skip if intake.skip else None)
        if watch is None:
            files.apply(files.find(inputs))
        else:
            with stopping() as stop:
                watch_files(files, inputs, watch, stop)
    return files.unreadable


def _update_from_stdin(intake: Intake, source: str) -> None:
    from setfold.live.sources.intake import stopping
    from setfold.live.sources.lines import apply_lines

    with stopping() as stop:
        apply_lines(intake, sys.stdin.buffer, source, stop)


def _update_from_topic(intake: Intake, url: str, source: str | None) -> None:
    from setfold.live.sources.intake import stopping
    from setfold.live.sources.kafka import Topic, TopicSource

    def note(text: str) -> None:
        typer.echo(f"setfold: {text}", err=True)

    with stopping() as stop:
        TopicSource(intake, Topic.of(url), source, note=note).run(stop)


def _print_intake(intake: Intake, unreadable: int, seconds: float, as_json: bool) -> None:
    facts = {
        "batches": intake.batches,
        "duplicates": intake.duplicates,
        "rows": intake.rows,
        "late": intake.late,
        "deleted": intake.deleted,
        "skipped": intake.skipped,
        "unreadable_files": unreadable,
        "seconds": round(seconds, 3),
    }
    print_facts(facts, as_json)


@contextmanager
def _noting(text: str) -> Iterator[None]:
    """Say what is kept after Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt as error:
        error.add_note(text)
        raise


# ---- upgrade -------------------------------------------------------------------------------------


@upgrade.command(epilog="Example:\n\n  setfold live upgrade add live.db new.safetensors")
def add(
    store: Store,
    model: ModelFile,
    dtype: Annotated[
        DtypeName | None, typer.Option(help="Compute in this dtype. Default: that of the model.")
    ] = None,
    allow: Allow = None,
) -> None:
    """Put a model beside the active one. From now on, every update is for both."""
    with open_store(store, SavedModel(allow=allow)) as sets:
        number = sets.add_model(load_model(model, allow or []), dtype=dtype)
    typer.echo(f"added model {number}. Fill it with history, then switch to it.")


@upgrade.command(
    epilog="Example:\n\n  setfold live upgrade fill live.db history/*.parquet --set user"
)
@explain_interrupts
@grouped
def fill(
    store: Store,
    inputs: Annotated[
        list[str], typer.Argument(help="Files, folders and glob patterns, as for update.")
    ],
    *,
    rows: Rows,
    source: Source = None,
    saved: SavedModel,
    as_json: Json = False,
) -> None:
    """Add history to the models that are not active. Files that they have already change nothing."""
    from setfold.live.sources.files import FileSource

    started = time.monotonic()
    with open_store(store, saved) as sets, show_progress() as progress, _noting(AGAIN):
        intake = rows.intake(sets, history=True)
        files = FileSource(intake, source, progress)
        files.apply(files.find(inputs))
    _print_intake(intake, files.unreadable, time.monotonic() - started, as_json)


@upgrade.command(epilog="Example:\n\n  setfold live upgrade switch live.db 2")
@grouped
def switch(store: Store, number: Number, *, saved: SavedModel) -> None:
    """Make a model the active one. The one before stays: the way back is to switch again."""
    with open_store(store, saved) as sets:
        sets.switch(number)
    typer.echo(f"model {number} is active")


@upgrade.command(epilog="Example:\n\n  setfold live upgrade drop live.db 1")
@grouped
def drop(store: Store, number: Number, *, saved: SavedModel) -> None:
    """Remove a model that is not active, and its states."""
    with open_store(store, saved) as sets:
        sets.drop_model(number)
    typer.echo(f"dropped model {number}")
