"""Arguments and options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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
        "all but weight. Default: all numeric columns except the set column; for files of slides, "
        "the vectors in features.",
    ),
]
Format = Annotated[
    str | None,
    typer.Option("--format", help="Format of standard input, if an input is -: csv, jsonl, ..."),
]
Explode = Annotated[
    bool,
    typer.Option(
        "--explode",
        help="Each row holds many elements, as lists of equal length. ROOT files do not need it.",
    ),
]
Memory = Annotated[
    str,
    typer.Option(help="Memory limit of this process: 800MB, 2GB, 1.5GiB. Excludes Ray workers."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Threads that read and encode, if the memory allows it. Default: one per core. Models "
        "in half precision, or with modules of your own, have one.",
        show_default=False,
    ),
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
    bool, typer.Option("--again", help="Accept an input that several of the files contain.")
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
Store = Annotated[
    str, typer.Argument(help="Store of live sets: a SQLite file, or postgresql://user@host/name.")
]
SetIds = Annotated[
    list[str],
    typer.Argument(help="Set ids. If an id has several columns, separate the values by commas."),
]
LiveColumn = Annotated[
    str,
    typer.Option(
        "--set",
        help="Column with the set id of each row, or key of a key=value folder; several "
        "as 'run,event'.",
    ),
]
TimeColumn = Annotated[
    str | None,
    typer.Option("--time", help="Column with the time of each row, if the store has buckets."),
]
Source = Annotated[
    str | None,
    typer.Option(
        help="Name of the source, which is part of the identity of its batches. Default: 'files', "
        "or the topic. Standard input needs one.",
        show_default=False,
    ),
]
Last = Annotated[
    str | None,
    typer.Option(help="Only the most recent elements, such as 7d: a multiple of the buckets."),
]
