"""What all jobs on files share: their options, what is asked for, and how it is carried out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import nn

from setfold.core.encoder import StreamingSetEncoder
from setfold.errors import InputError
from setfold.files.budget import parse_size
from setfold.files.columns import Columns
from setfold.files.engines import local
from setfold.files.engines.task import Stamp
from setfold.files.journal import SAVE_EVERY, working
from setfold.files.outputs import ArrowSink, refuse_as_target
from setfold.files.plan import Plan, make_plan
from setfold.files.run import Engine, Output, Progress, Run, Summary, published

Names = str | Path | Sequence[str | Path]
Job = tuple[Plan, list[Output]]
Tell = Callable[[Progress], None]


class RunOptions(TypedDict, total=False):
    """Options of every job.

    Attributes:
        memory: bytes that the process may take, such as "2GB", which is the default.
        resume: go on with a run that was killed; begin one if there is none.
        restart: drop what such a run has left.
        save_every: seconds of work that a kill costs at most, if saving is quick; 20 by default.
        progress: is told how far it is.
    """

    memory: str | int
    resume: bool
    restart: bool
    save_every: float
    progress: Tell | None


class ReadOptions(RunOptions, total=False):
    """Options of jobs that read elements, besides those of every job.

    Attributes:
        skip_errors: leave out rows and files that cannot be used, and list them in a file beside the output.
        engine: "local", the default, or "ray".
        address: of a Ray cluster; "auto" for the one that this machine belongs to.
    """

    skip_errors: bool
    engine: str
    address: str | None


DEFAULTS: ReadOptions = {
    "memory": "2GB",
    "resume": False,
    "restart": False,
    "save_every": SAVE_EVERY,
    "progress": None,
    "skip_errors": False,
    "engine": "local",
    "address": None,
}


def completed(options: RunOptions | ReadOptions, kind: type[RunOptions]) -> ReadOptions:
    """Options with what was left out, if a job of that kind has them."""
    unknown = [name for name in options if name not in kind.__annotations__]
    if unknown:
        known = ", ".join(sorted(kind.__annotations__))
        raise TypeError(f"there is no option {unknown[0]!r} here; known are {known}.")
    return {**DEFAULTS, **options}


def plan_for(
    encoder: StreamingSetEncoder,
    inputs: Names,
    columns: Columns,
    options: ReadOptions,
    states: Sequence[Path] = (),
) -> Plan:
    """The plan of a job."""
    names = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    if not names and not states:
        raise InputError("there is nothing to read: name files, folders or patterns.")
    memory, skip = parse_size(options["memory"]), options["skip_errors"]
    return make_plan(encoder, names, columns, memory=memory, skip=skip, states=states)


def streaming(model: nn.Module) -> StreamingSetEncoder:
    """The model in evaluation mode, if it folds in one pass."""
    if isinstance(model, StreamingSetEncoder):
        return model.eval()
    passes = getattr(model, "passes", None)
    if passes is not None:
        raise InputError(
            f"{type(model).__name__} needs {passes} passes over a set; files are read once. Fold set by set with "
            "setfold.fold, or use an encoder that folds in one pass."
        )
    raise InputError(
        f"expected a streaming set encoder; got {type(model).__name__}, which cannot be folded. setfold.check tells why."
    )


def chosen_engine(options: ReadOptions) -> Engine:
    """What computes the steps."""
    name, address = options["engine"], options["address"]
    if name == "local":
        if address is not None:
            raise InputError("an address is for --engine ray.")
        return local.steps
    if name == "ray":
        from setfold.files.engines import ray

        return partial(ray.steps, address=address)
    raise InputError(f"engine must be 'local' or 'ray'; got {name!r}.")


def request_of(doing: str, inputs: Names, out: str | Path, **more: Any) -> dict[str, Any]:
    """What is asked for, to be compared by a run that goes on with it."""
    names = [inputs] if isinstance(inputs, str | Path) else inputs
    return {
        "job": doing,
        "inputs": [full_name(name) for name in names],
        "out": full_name(out),
        **more,
    }


def full_name(path: str | Path | None) -> str | None:
    """A path from the root on."""
    return None if path is None else str(Path(path).resolve())


def carried_out(
    request: dict[str, Any], prepare: Callable[[], Job], engine: Engine, options: ReadOptions
) -> Summary:
    """Do what is asked for, or what is left of it.

    Args:
        request: what is asked for.
        prepare: makes the plan; not called if a run that was killed had come to its end.
        engine: what computes the steps.
        options: of the job.
    """
    out = Path(request["out"])
    refuse_as_target(out)
    with (
        torch.no_grad(),
        working(
            out,
            request,
            resume=options["resume"],
            restart=options["restart"],
            save_every=options["save_every"],
        ) as work,
    ):
        if work.journal is not None and work.journal.publish:  # all was done but this
            return published(work)
        plan, outputs = prepare()
        _refuse_overwriting(plan, outputs)
        return Run(plan, work, engine, outputs, options["progress"]).run()


def _refuse_overwriting(plan: Plan, outputs: Sequence[Output]) -> None:
    paths = [output.path.resolve() for output in outputs]
    if len({*paths}) < len(paths):
        raise InputError("encodings and states need files of their own.")
    for output in outputs:
        refuse_as_target(output.path)
    read = {piece.input.path.resolve() for piece in plan.pieces if not piece.states}
    for path in paths:
        if path in read:
            raise InputError(f"{path} is an input, and would be overwritten. Choose another name.")


def as_states(path: str | Path) -> Path:
    """The path of a file of states."""
    if not str(path).endswith(ArrowSink.suffixes):
        raise InputError(f"states go into an .arrow file; got {path}.")
    return Path(path)


def stamps_of(inputs: dict[str, Stamp]) -> dict[str, list[int]]:
    """By full name, what files are known by."""
    return {str(Path(name).resolve()): list(stamp) for name, stamp in inputs.items()}
