"""The commands train and evaluate: from rows and labels to a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from setfold.cli.app import LINE_EVERY, app, explain_interrupts, grouped, print_facts, with_stdin
from setfold.cli.options import (
    Explode,
    Format,
    Inputs,
    Json,
    Memory,
    OnError,
    OnErrorOption,
    Overwrite,
)
from setfold.cli.processes import is_first, over_processes
from setfold.errors import InputError
from setfold.learning.options import TrainOptions

if TYPE_CHECKING:  # torch takes seconds to import, and --help does not need it
    from setfold.learning.loop import Progress
    from setfold.learning.train import Result


class TaskName(StrEnum):
    """What kind of label to predict."""

    CLASSIFICATION = "classification"
    MULTIPLE_INSTANCE = "multiple-instance"
    REGRESSION = "regression"


class ScaleName(StrEnum):
    """How numbers are scaled."""

    STANDARD = "standard"
    ROBUST = "robust"


class TimeName(StrEnum):
    """How times are read."""

    AGE = "age"
    CALENDAR = "calendar"


SetIds = Annotated[
    str | None,
    typer.Option(
        "--set",
        help="Column with the set id of each row, or several: run,event. If omitted, each file is "
        "one set.",
    ),
]
LabelTable = Annotated[
    Path | None,
    typer.Option(
        help="Table with one row per set: the set column and the target. If omitted, the target is "
        "a column of the rows, constant within each set."
    ),
]


def _listed(text: str | None) -> list[str]:
    return [] if text is None else [part.strip() for part in text.split(",") if part.strip()]


@dataclass(frozen=True)
class Splitting:
    """Which sets train, choose and test the model."""

    group: Annotated[
        str | None,
        typer.Option(help="Column with groups. Sets of one group fall into the same split."),
    ] = None
    validation: Annotated[
        float, typer.Option(help="Share of sets that choose the model and stop the training.")
    ] = TrainOptions.validation
    test: Annotated[
        float, typer.Option(help="Share of sets for the reported numbers only; may be 0.")
    ] = TrainOptions.test
    folds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many times sets are held out for validation. Default: 3 for 20 to 299 sets, "
            "else 1.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of split, weights and training.")] = (
        TrainOptions.seed
    )


@dataclass(frozen=True)
class Preparing:
    """How values become features."""

    scale: Annotated[
        ScaleName, typer.Option(help="Scale numbers by mean and deviation, or by quartiles.")
    ] = ScaleName.STANDARD
    center: Annotated[
        str | None,
        typer.Option(help="Columns to center in each set, such as x,y,z. Reads each set twice."),
    ] = None
    position: Annotated[
        str | None,
        typer.Option(
            help="Columns that are the position of an element, for the encoder places. Default: "
            "columns named like coordinates, such as x,y,z."
        ),
    ] = None
    categories: Annotated[
        str | None, typer.Option(help="Columns of whole numbers that are categories.")
    ] = None
    log: Annotated[str | None, typer.Option(help="Columns to take the logarithm of.")] = None
    times: Annotated[
        TimeName,
        typer.Option(
            help="Times as age relative to the last event of the set, which reads each set twice, "
            "or as time of day and weekday only."
        ),
    ] = TimeName.AGE

    def arguments(self) -> dict[str, Any]:
        """Return the options as arguments of `TrainOptions`."""
        names = {name: _listed(getattr(self, name)) for name in ("center", "categories", "log")}
        position = None if self.position is None else _listed(self.position)
        return {"scale": self.scale, "times": self.times, "position": position, **names}


@dataclass(frozen=True)
class Searching:
    """Which models compete, and for how long."""

    task: Annotated[
        TaskName | None,
        typer.Option(
            help="multiple-instance: classes, with weights of elements that explain a prediction. "
            "Default: classification or regression, inferred from the labels."
        ),
    ] = None
    encoder: Annotated[
        str,
        typer.Option(
            help="auto tries statistics, deep-sets, slots and attention, and places if elements "
            "have a position; or one of these, or instances."
        ),
    ] = TrainOptions.encoder
    time_limit: Annotated[
        str, typer.Option("--time", help="Time for training: 90s, 10m, 1.5h.")
    ] = "10m"
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Epochs of each candidate. Default: what fits into the time."),
    ] = None
    balanced: Annotated[
        bool, typer.Option("--balanced", help="Weigh classes inversely to their frequency.")
    ] = False

    def arguments(self) -> dict[str, Any]:
        """Return the options as arguments of `TrainOptions`."""
        from setfold.learning.train import parse_seconds

        return {
            "task": self.task,
            "encoder": self.encoder,
            "seconds": parse_seconds(self.time_limit),
            "epochs": self.epochs,
            "balanced": self.balanced,
        }


@dataclass(frozen=True)
class Running:
    """How to run, and what to print."""

    memory: Memory = "2GB"
    on_error: OnErrorOption = OnError.STOP
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted training.")] = (
        False
    )
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard an interrupted training and start over.")
    ] = False
    overwrite: Overwrite = False
    report: Annotated[
        Path | None,
        typer.Option(help="Report as HTML; JSON is written beside it. Default: next to the model."),
    ] = None
    as_json: Json = False

    def arguments(self) -> dict[str, Any]:
        """Return the options as arguments of `train_sets`."""
        return {
            "resume": self.resume,
            "restart": self.restart,
            "overwrite": self.overwrite,
        }


@app.command(
    epilog="Examples:\n\n"
    "  setfold train events/*.parquet --set user --labels labels.csv --target churned "
    "--out model.safetensors\n\n"
    "  setfold train scans/*.laz --labels labels.csv --target species --center x,y,z "
    "--out model.safetensors\n\n"
    "  torchrun --nproc-per-node 4 -m setfold.cli train ...  # over four processes"
)
@explain_interrupts
@over_processes
@grouped
def train(
    inputs: Inputs,
    target: Annotated[str, typer.Option(help="Column with the label of each set.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The model, a .safetensors file.")],
    *,
    column: SetIds = None,
    labels: LabelTable = None,
    features: Annotated[
        str | None,
        typer.Option(
            help="Columns to learn from: 'x,y,z'. Default: all except set and target; for files of "
            "slides, the vectors in features."
        ),
    ] = None,
    explode: Explode = False,
    stdin_format: Format = None,
    searching: Searching,
    splitting: Splitting,
    preparing: Preparing,
    running: Running,
) -> None:
    """Train a model on your own sets and labels.

    Several models that fold in one pass compete on a validation split. Plain statistics with
    logistic regression and gradient boosting compete, too, and the report says who wins.
    """
    from setfold.learning.report import write_report
    from setfold.learning.train import train_sets
    from setfold.learning.work_folder import is_interrupted

    page = running.report or out.with_suffix(".html")
    options = TrainOptions(
        target=target,
        labels=labels,
        set=column,
        features=None if features is None else _listed(features),
        explode=explode,
        memory=running.memory,
        skip_errors=running.on_error is OnError.SKIP,
        **asdict(splitting),
        **preparing.arguments(),
        **searching.arguments(),
    )
    if running.resume and out.exists() and not is_interrupted(out):
        _say(f"{out} is already complete; nothing was trained.")
        return
    others = [out, *map(Path, inputs), *([labels] if labels else [])]
    _check_report(page, others, running.overwrite)
    opened = with_stdin(inputs, stdin_format, column=column, resume=running.resume)
    with opened as names, _show_training() as progress:
        result = train_sets(
            names,
            out,
            options,
            **running.arguments(),
            progress=progress,
            note=_say,
        )
    if not is_first():
        return
    facts = write_report(result, page)
    if running.as_json:
        print_facts(facts, as_json=True)
        return
    _print_table(result)
    typer.echo(facts["verdict"])
    typer.echo(f"model: {out}\nreport: {page}")


@app.command(
    epilog="Example:\n\n"
    "  setfold evaluate model.safetensors test/*.parquet --set user --labels test.csv"
)
def evaluate(
    model: Annotated[Path, typer.Argument(help="Model written by setfold train.")],
    inputs: Inputs,
    column: SetIds = None,
    labels: LabelTable = None,
    explode: Explode = False,
    stdin_format: Format = None,
    memory: Memory = "2GB",
    on_error: OnErrorOption = OnError.STOP,
    as_json: Json = False,
) -> None:
    """Measure a trained model on other sets."""
    from setfold.learning.train import evaluate_sets, summarize

    with with_stdin(inputs, stdin_format, column=column, resume=False) as names:
        target, found, _ = evaluate_sets(
            model,
            names,
            labels=labels,
            set=column,
            explode=explode,
            memory=memory,
            skip_errors=on_error is OnError.SKIP,
        )
    facts = summarize(target, found)
    shown = {n: round(v, 4) if isinstance(v, float) else v for n, v in facts.items()}
    print_facts(facts if as_json else shown, as_json)


def _say(text: str) -> None:
    if is_first():
        typer.echo(text, err=True)


def _check_report(page: Path, others: list[Path], overwrite: bool) -> None:
    """Raise InputError if the report cannot be written, or would replace something."""
    if page.suffix != ".html":
        raise InputError(f"a report must go to an .html file; got {page}.")
    page.parent.mkdir(parents=True, exist_ok=True)
    for path in (page, page.with_suffix(".json")):
        if path.resolve() in [other.resolve() for other in others]:
            raise InputError(f"{path} is used for something else. Name the report with --report.")
        if path.exists() and not overwrite:
            raise InputError(
                f"{path} exists. Choose another name with --report, or replace it with --overwrite."
            )


@contextmanager
def _show_training() -> Iterator[Callable[[str, Progress], None]]:
    """Yield a callback that shows a bar on a terminal, otherwise lines of text."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, quiet=not is_first())
    bar = Bar(
        TextColumn("{task.fields[name]}"),
        BarColumn(),
        TextColumn("{task.description}  left:"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task("", name="", total=1.0)
    last, current, started, before = time.monotonic(), "", 0.0, 0.0

    def show(name: str, now: Progress) -> None:
        nonlocal last, current, started, before
        if name != current:
            current, started, before = name, time.monotonic(), now.epoch
            bar.reset(task, total=now.epochs, name=name)
        shown = "  ".join(f"{n} {v:.4g}" for n, v in now.numbers.items())
        text = f"epoch {now.epoch:.1f} of {now.epochs}  {shown}"
        bar.update(task, completed=now.epoch, description=text)
        if not console.is_terminal and time.monotonic() - last > LINE_EVERY:
            last = time.monotonic()
            speed = (last - started) / max(now.epoch - before, 1e-9)
            left = speed * (now.epochs - now.epoch)
            console.print(f"{name}: {text}  about {left:.0f} s left", soft_wrap=True)

    with bar:
        yield show


def _print_table(result: Result) -> None:
    """Print candidates and baselines, the best first."""
    from rich.console import Console
    from rich.table import Table

    from setfold.learning.metrics import loss_of, measure

    rows: list[tuple[float, str, dict[str, float], Any]] = []
    for trial in result.search.trials:
        values = measure(result.target, trial.found)
        rows.append((loss_of(result.target, trial.found), trial.name, values, trial.seconds))
    for base in result.search.baselines:
        values = measure(result.target, base.found)
        rows.append((loss_of(result.target, base.found), base.name, values, None))
    rows.sort(key=lambda row: row[0])
    name = "test sets" if len(result.data.test) else "sets held out"
    table = Table(name, *rows[0][2], "seconds")
    for _, name, values, seconds in rows:
        mark = " (saved)" if name == result.search.best.name else ""
        cells = [f"{value:.4g}" for value in values.values()]
        table.add_row(name + mark, *cells, "" if seconds is None else f"{seconds:.0f}")
    Console().print(table)
