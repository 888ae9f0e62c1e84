"""Command line of the experiments: python -m experiments list, run, report, prepare."""

from __future__ import annotations

import os
import shlex
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from experiments.recipe import Recipe, Size
from setfold import cli
from setfold.errors import InputError

if TYPE_CHECKING:
    from experiments.data.store import DataSet

FAILED, INTERRUPTED = 1, 130  # exit codes
ALL = "all"


class Device(StrEnum):
    """Device for the models."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"


class Precision(StrEnum):
    """Floating point precision of training."""

    FULL = "32-true"
    MIXED = "bf16-mixed"


app = typer.Typer(
    name="python -m experiments",
    help="Reproduce the paper's experiments, each with one command.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

Records = Annotated[Path, typer.Option(help="Folder with the records.", metavar="FOLDER")]


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Global options; `main` handles --debug itself."""


@app.command("list")
def show_list(records: Records = Path("results/records")) -> None:
    """List the recipes with their run time and number of records."""
    from rich.table import Column, Table

    from experiments.recipes import all_recipes
    from experiments.records import read

    names = Column("recipe", no_wrap=True, min_width=max(map(len, all_recipes())))  # for copying
    table = Table("", names, "title", "minutes (size small)", f"records in {records}")
    for name, recipe in all_recipes().items():
        count = sum(record.size == Size.SMALL for record in read(records, name))
        cells = recipe.number, name, recipe.title, f"{recipe.minutes:.0f}", count or "none"
        table.add_row(*map(str, cells))
    Console().print(table)


@app.command(
    epilog="Examples:\n\n  python -m experiments run all --size smoke\n\n"
    "  python -m experiments run RECIPE --seed 0 --seed 1\n\n"
    "  torchrun --nproc-per-node 2 -m experiments run RECIPE --size paper\n\n"
    "Start the same command twice with --threads 1 to share the work between two processes."
)
def run(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE...|all",
            help="Names of recipes; `python -m experiments list` shows them.",
        ),
    ],
    size: Annotated[
        Size,
        typer.Option(
            help="smoke: seconds, on synthetic data. small: the size in RESULTS.md. paper: the "
            "paper's settings, for a GPU."
        ),
    ] = Size.SMALL,
    seed: Annotated[
        list[int] | None,
        typer.Option(help="Seed to run; can be repeated. Default: all seeds of the size."),
    ] = None,
    device: Annotated[Device, typer.Option(help="Device for the models.")] = Device.AUTO,
    precision: Annotated[Precision, typer.Option(help="Training precision.")] = Precision.FULL,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of torch. Default: torch's choice.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for trainings and records.", metavar="FOLDER")
    ] = Path("out/experiments"),
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Repeat measurements that are already recorded. Finished trainings are reused.",
        ),
    ] = False,
) -> None:
    """Run recipes: train, measure, record.

    Skips runs that are already recorded and resumes interrupted runs.

    Exit codes: 0 if every run is recorded, 1 if a run failed, 130 if interrupted.
    """
    recipes = _recipes(names)
    from experiments import running

    options = running.Options(out, device.value, precision.value, threads, again)
    try:
        failures = running.run(recipes, size, seed or None, options=options)
    except KeyboardInterrupt:
        typer.echo("interrupted: run the same command again to resume.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    for failure in failures:
        typer.echo(f"failed: {failure}", err=True)
    folder = out / "records" / size
    if os.environ.get("RANK", "0") == "0" and any(folder.glob("*.jsonl")):
        options_of_report = ["--records", folder, "--size", size, "--out", out / "report"]
        typer.echo(f"records: {folder}")
        typer.echo(f"python -m experiments report {shlex.join(map(str, options_of_report))}")
    raise typer.Exit(FAILED if failures else 0)


def _recipes(names: list[str]) -> list[Recipe]:
    """Return the recipes with these names."""
    from experiments.recipes import all_recipes

    known = all_recipes()
    for name in names:
        if name not in known and name != ALL:
            near = get_close_matches(name, [*known, ALL], cutoff=0.5)
            hint = (
                f"Did you mean {' or '.join(near)}?" if near else "See python -m experiments list."
            )
            raise InputError(f"unknown recipe {name!r}. {hint}")
    return [recipe for name, recipe in known.items() if name in names or ALL in names]


@app.command(
    epilog="Examples:\n\n  python -m experiments report\n\n"
    "  python -m experiments report --records out/experiments/records/small --out out/report"
)
def report(
    records: Records = Path("results/records"),
    out: Annotated[
        Path, typer.Option(help="Folder for RESULTS.md and results/*.png.", metavar="FOLDER")
    ] = Path(),
    size: Annotated[Size, typer.Option(help="Size of the records to report.")] = Size.SMALL,
) -> None:
    """Write RESULTS.md and its figures from the records, without running anything."""
    from experiments.page import write
    from experiments.recipes import all_recipes

    for path in write(list(all_recipes().values()), records, out, size):
        typer.echo(path)


@app.command(
    epilog="Examples:\n\n  python -m experiments prepare  # lists the data sets\n\n"
    "  python -m experiments prepare mnist  # says what to download\n\n"
    "  python -m experiments prepare mnist ~/Downloads/mnist --out ~/data\n\n"
    "  python -m experiments prepare tiny_imagenet tiny-imagenet-200.zip "
    "--module torchvision.models:resnet18 --side 224"
)
def prepare(
    dataset: Annotated[
        str | None,
        typer.Argument(
            help="modelnet40, celeba, mnist or tiny_imagenet. Without it, lists all of them.",
            metavar="DATASET",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Argument(help="Downloaded file or folder. Without it, says what to download."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the prepared file.", envvar="SETFOLD_DATA", metavar="FOLDER"),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            help="Network that computes features of the pictures, for tiny_imagenet only: FILE.pt2 "
            "from torch.export.save (use only files that you trust) or package.module:factory."
        ),
    ] = None,
    side: Annotated[
        int, typer.Option(min=1, help="With --module: side of the pictures in pixels.")
    ] = 224,
    dims: Annotated[
        int, typer.Option(min=1, help="With --module: principal components to keep.")
    ] = 256,
) -> None:
    """Convert a downloaded data set to the file that the experiments read."""
    from experiments.data.features import Extraction
    from experiments.data.prepare import DATASETS, with_module

    if dataset is None:
        typer.echo("\n\n".join(f"{name}: {data.help}" for name, data in DATASETS.items()))
        return
    if dataset not in DATASETS:
        raise InputError(f"unknown data set {dataset!r}. Available: {', '.join(DATASETS)}.")
    data = DATASETS[dataset]
    if module is not None:
        if dataset != "tiny_imagenet":
            raise InputError(f"--module is only for tiny_imagenet; got {dataset}.")
        data = with_module(Extraction(module, side=side, dims=dims))
    if source is None:
        typer.echo(data.help)
    elif out is None:
        raise InputError("pass --out FOLDER, or set SETFOLD_DATA to the folder for prepared data.")
    else:
        typer.echo(_prepare(data, source, out))


def _prepare(data: DataSet, source: Path, out: Path) -> Path:
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"preparing {data.name}", total=None)
        return data.prepare(
            source, out, lambda done, total: bar.update(task, completed=done, total=total)
        )


def main() -> None:
    """Run the command line."""
    cli.run(app, "experiments", FAILED)


if __name__ == "__main__":
    main()
