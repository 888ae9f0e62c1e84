"""The commands `setfold live ...`: sets that grow all day, in a database."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from setfold.cli.app import (
    BROKEN,
    app,
    grouped,
    load_model,
    print_facts,
)
from setfold.cli.files import SavedModel
from setfold.cli.options import (
    Allow,
    DtypeName,
    Head,
    Json,
    Last,
    Overwrite,
    SetIds,
    Store,
)

if TYPE_CHECKING:  # torch and Arrow take seconds to import, and --help does not need them
    from torch import Tensor

    from setfold.live import LiveSets

live = typer.Typer(
    name="live",
    help="Keep sets that grow all day in a database; each batch counts once.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(live)

ModelFile = Annotated[
    str, typer.Argument(help="Model file written by setfold.save, or package.module:name.")
]


def open_store(store: str, saved: SavedModel) -> LiveSets:
    """Open a store with the options of a command."""
    from setfold.live import open as open_sets

    return open_sets(store, **saved.arguments())


@live.command(
    epilog="Examples:\n\n  setfold live create live.db model.safetensors\n\n"
    "  setfold live create live.db model.safetensors --bucket 1d --window 30d\n\n"
    "  setfold live create postgresql://ann@host/sets model.safetensors"
)
def create(
    store: Store,
    model: ModelFile,
    bucket: Annotated[
        str | None,
        typer.Option(help="Keep a state for each bucket of time, such as 1h or 1d."),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            help="Buckets older than this expire, such as 30d: a multiple of the buckets."
        ),
    ] = None,
    dtype: Annotated[
        DtypeName | None, typer.Option(help="Compute in this dtype. Default: that of the model.")
    ] = None,
    allow: Allow = None,
) -> None:
    """Create a store for the sets of a model. The store keeps a copy of the model."""
    from setfold.live import create as create_sets

    encoder = load_model(model, allow or [])
    with create_sets(store, encoder, bucket=bucket, window=window, dtype=dtype) as sets:
        typer.echo(f"created {sets.database.shown}")


# ---- reading -------------------------------------------------------------------------------------


@live.command(
    epilog="Examples:\n\n  setfold live get live.db ann bob\n\n"
    "  setfold live get live.db ann --last 7d --head --json"
)
@grouped
def get(
    store: Store,
    names: SetIds,
    *,
    last: Last = None,
    head: Head = False,
    count: Annotated[
        bool, typer.Option("--count", help="Print numbers of elements, without encodings.")
    ] = False,
    saved: SavedModel,
    as_json: Json = False,
) -> None:
    """Print the encodings of sets, or their numbers of elements."""
    with open_store(store, saved) as sets:
        ids = _parsed_ids(sets, names)
        found: list[dict[str, Any]] = [
            {"set": name, "count": number}
            for name, number in zip(names, sets.count(ids, last=last), strict=True)
        ]
        if not count:
            encodings = sets.encode(ids, last=last, head=head)
            _add_predictions(found, sets, encodings, head)
            for entry, encoding in zip(found, encodings.tolist(), strict=True):
                entry["encoding"] = encoding
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for entry in found:
        texts = [str(entry["set"]), f"{entry['count']:,}"]
        texts += [str(entry["prediction"])] if "prediction" in entry else []
        texts += [json.dumps(entry["encoding"])] if "encoding" in entry else []
        typer.echo("\t".join(texts))


def _add_predictions(
    found: list[dict[str, Any]], sets: LiveSets, encodings: Tensor, head: bool
) -> None:
    """Add the labels that a model with a head predicts."""
    from setfold.files.request import read_by
    from setfold.files.tables.table import predict_labels, predicted_target

    target = predicted_target(read_by(sets.model, True)) if head else None
    if target is not None:
        for entry, label in zip(found, predict_labels(target, encodings).to_pylist(), strict=True):
            entry["prediction"] = label


def _parsed_ids(sets: LiveSets, names: list[str]) -> list[Any]:
    """Return set ids as a store takes them: tuples if they have several columns."""
    if len(sets.ids or ()) < 2:
        return names
    return [tuple(row) for row in csv.reader(names, skipinitialspace=True)]


@live.command(
    epilog="Examples:\n\n  setfold live export live.db encodings.parquet\n\n"
    "  setfold live export live.db snapshot.arrow --states"
)
@grouped
def export(
    store: Store,
    out: Annotated[Path, typer.Argument(help="Output: .parquet, .arrow, .npz or .csv.")],
    *,
    states: Annotated[
        bool,
        typer.Option("--states", help="Write states to an .arrow file, for merge and readout."),
    ] = False,
    last: Last = None,
    head: Head = False,
    overwrite: Overwrite = False,
    saved: SavedModel,
    as_json: Json = False,
) -> None:
    """Write all sets to a file, as they are at this moment."""
    with open_store(store, saved) as sets:
        done = sets.export(out, states=states, last=last, head=head, overwrite=overwrite)
    print_facts({**done._asdict(), "out": str(out)}, as_json)


@live.command()
@grouped
def info(store: Store, *, saved: SavedModel, as_json: Json = False) -> None:
    """Show what a store holds."""
    with open_store(store, saved) as sets:
        found = sets.info()
    facts = asdict(found)
    facts["updated"] = None if found.updated is None else found.updated.isoformat()
    facts["models"] = [model._asdict() for model in found.models]
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    models, positions = facts.pop("models"), facts.pop("positions")
    ids = facts.pop("ids")
    facts["ids"] = None if ids is None else ", ".join(f"{n}: {kind}" for n, kind in ids.items())
    print_facts(facts, False)
    for source, parts in positions.items():
        where = ", ".join(f"{part} at {offset:,}" for part, offset in parts.items())
        print_facts({f"source {source}": where}, False)
    for model in models:
        typer.echo("")
        print_facts({"model": f"{model['number']} ({model['kind']})"}, False)
        print_facts({name: model[name] for name in model if name not in ("number", "kind")}, False)


@live.command()
@grouped
def verify(store: Store, *, saved: SavedModel, as_json: Json = False) -> None:
    """Check the database, the models, and the checksum of every state. Exit with 1 if one is bad."""
    with open_store(store, saved) as sets:
        found = sets.verify()
    if as_json:
        typer.echo(json.dumps(found._asdict(), indent=2))
    else:
        for problem in found.problems:
            typer.echo(f"{problem}.")
        typer.echo(f"{found.states:,} states, {len(found.problems):,} problems")
    if found.problems:
        raise typer.Exit(BROKEN)


# ---- deletion ------------------------------------------------------------------------------------


@live.command(epilog="Example:\n\n  setfold live delete live.db ann bob --yes")
@grouped
def delete(
    store: Store,
    names: SetIds,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    saved: SavedModel,
    as_json: Json = False,
) -> None:
    """Delete sets completely: from all models and buckets, and overwrite their bytes."""
    with open_store(store, saved) as sets:
        ids = _parsed_ids(sets, names)
        if not yes:
            elements = sum(sets.count(ids))
            typer.confirm(
                f"Delete {len(ids):,} sets with {elements:,} elements from {sets.database.shown}?",
                abort=True,
                err=True,
            )
        print_facts({"sets": len(ids), "elements": sets.delete(ids)}, as_json)


@live.command()
@grouped
def expire(store: Store, *, saved: SavedModel, as_json: Json = False) -> None:
    """Delete the buckets that are older than the window."""
    with open_store(store, saved) as sets:
        print_facts({"states": sets.expire()}, as_json)


@live.command(name="import", epilog="Example:\n\n  setfold live import live.db history.arrow")
@grouped
def import_states(
    store: Store,
    files: Annotated[
        list[Path],
        typer.Argument(help="State files written by encode --states, merge or live export."),
    ],
    *,
    at: Annotated[
        datetime | None,
        typer.Option(help="Time of all elements (UTC), if the store has buckets."),
    ] = None,
    saved: SavedModel,
    as_json: Json = False,
) -> None:
    """Merge state files into a store. A file that was imported before changes nothing."""
    moment = None if at is None else at.replace(tzinfo=UTC)
    facts = {"files": 0, "duplicates": 0, "rows": 0, "deleted": 0}
    with open_store(store, saved) as sets:
        for file in files:
            found = sets.import_states(file, at=moment)
            facts["files" if found.status == "applied" else "duplicates"] += 1
            facts["rows"] += found.rows
            facts["deleted"] += found.deleted
    print_facts(facts, as_json)
