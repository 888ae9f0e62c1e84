"""The command line of the experiments: python -m experiments list, run, report, prepare."""

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
    """What models run on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"


class Precision(StrEnum):
    """Of the numbers in training."""

    FULL = "32-true"
    MIXED = "bf16-mixed"


app = typer.Typer(
    name="python -m experiments",
    help="The paper's experiments, each with one command.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

Records = Annotated[Path, typer.Option(help="Folder of the records.", metavar="FOLDER")]


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Options that come before the command; `main` looks for --debug itself."""


@app.command("list")
def show_list(records: Records = Path("results/records")) -> None:
    """List the recipes: what each shows, what it costs, whether it is recorded."""
    from rich.table import Column, Table

    from experiments.recipes import all_recipes
    from experiments.records import read

    whole = Column("recipe", no_wrap=True, min_width=max(map(len, all_recipes())))  # to be copied
    table = Table("", whole, "title", "small size, minutes", f"records in {records}")
    for name, recipe in all_recipes().items():
        count = sum(record.size == Size.SMALL for record in read(records, name))
        cells = recipe.number, name, recipe.title, f"{recipe.minutes:.0f}", count or "none"
        table.add_row(*map(str, cells))
    Console().print(table)


@app.command(
    epilog="Examples:\n\n  python -m experiments run all --size smoke\n\n"
    "  python -m experiments run RECIPE --seed 0 --seed 1\n\n"
    "  torchrun --nproc-per-node 2 -m experiments run RECIPE --size paper\n\n"
    "Start the same command twice, with --threads 1, and the two share the work."
)
def run(
    names: Annotated[list[str], typer.Argument(metavar="RECIPE...|all", help="See list.")],
    size: Annotated[
        Size,
        typer.Option(
            help="smoke: seconds, on made-up data. small: the numbers of RESULTS.md. paper: the "
            "paper's own setting, for a GPU."
        ),
    ] = Size.SMALL,
    seed: Annotated[
        list[int] | None, typer.Option(help="Repeatable; all seeds of the size without it.")
    ] = None,
    device: Annotated[Device, typer.Option(help="What models run on.")] = Device.AUTO,
    precision: Annotated[Precision, typer.Option(help="Of training.")] = Precision.FULL,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of torch on the CPU; its own choice without it.")
    ] = None,
    out: Annotated[Path, typer.Option(help="For trainings and records.", metavar="FOLDER")] = Path(
        "out/experiments"
    ),
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Measure again what is recorded. Finished trainings are used as they are.",
        ),
    ] = False,
) -> None:
    """Run recipes: train, measure, record.

    What is recorded is not run again, and what was interrupted goes on where it stopped.

    Exit code 0 if every run is recorded, 1 if one failed, 130 if interrupted.
    """
    recipes = _recipes(names)
    from experiments import running

    options = running.Options(out, device.value, precision.value, threads, again)
    try:
        failures = running.run(recipes, size, seed or None, options=options)
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on where this one stopped.", err=True)
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
    """The recipes with these names."""
    from experiments.recipes import all_recipes

    known = all_recipes()
    for name in names:
        if name not in known and name != ALL:
            near = get_close_matches(name, [*known, ALL], cutoff=0.5)
            hint = (
                f"Did you mean {' or '.join(near)}?" if near else "See python -m experiments list."
            )
            raise InputError(f"there is no recipe {name!r}. {hint}")
    return [recipe for name, recipe in known.items() if name in names or ALL in names]


@app.command(
    epilog="Examples:\n\n  python -m experiments report\n\n"
    "  python -m experiments report --records out/experiments/records/small --out out/report"
)
def report(
    records: Records = Path("results/records"),
    out: Annotated[
        Path, typer.Option(help="Gets RESULTS.md and results/*.png.", metavar="FOLDER")
    ] = Path(),
    size: Annotated[Size, typer.Option(help="Of the records that count.")] = Size.SMALL,
) -> None:
    """Write RESULTS.md and its figures from records; nothing is run."""
    from experiments.recipes import all_recipes
    from experiments.report import write

    for path in write(list(all_recipes().values()), records, out, size):
        typer.echo(path)


@app.command(
    epilog="Examples:\n\n  python -m experiments prepare  # lists the data sets\n\n"
    "  python -m experiments prepare mnist  # tells what to download\n\n"
    "  python -m experiments prepare mnist ~/Downloads/mnist --out ~/data\n\n"
    "  python -m experiments prepare tiny_imagenet tiny-imagenet-200.zip "
    "--module torchvision.models:resnet18 --side 224"
)
def prepare(
    dataset: Annotated[
        str | None,
        typer.Argument(
            help="modelnet40, celeba, mnist or tiny_imagenet. Without it you are told of all.",
            metavar="DATASET",
        ),
    ] = None,
    source: Annotated[
        Path | None, typer.Argument(help="What you downloaded. Without it you are told what to.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Gets the prepared file.", envvar="SETFOLD_DATA", metavar="FOLDER"),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(
            help="For tiny_imagenet, of pictures: makes their features. FILE.pt2, as "
            "torch.export.save writes it (run only files that you trust), or "
            "package.module:factory."
        ),
    ] = None,
    side: Annotated[int, typer.Option(min=1, help="With --module: pixels of a side.")] = 224,
    dims: Annotated[int, typer.Option(min=1, help="With --module: components kept.")] = 256,
) -> None:
    """Make the file that the experiments read, of a data set that you downloaded."""
    from experiments.data.features import Extraction
    from experiments.data.prepare import DATASETS, with_module

    if dataset is None:
        typer.echo("\n\n".join(f"{name}: {data.help}" for name, data in DATASETS.items()))
        return
    if dataset not in DATASETS:
        raise InputError(f"there is no data set {dataset!r}. There are {', '.join(DATASETS)}.")
    data = DATASETS[dataset]
    if module is not None:
        if dataset != "tiny_imagenet":
            raise InputError(f"--module is for tiny_imagenet; {dataset} needs none.")
        data = with_module(Extraction(module, side=side, dims=dims))
    if source is None:
        typer.echo(data.help)
    elif out is None:
        raise InputError("give --out FOLDER, or set SETFOLD_DATA to the folder for prepared data.")
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
