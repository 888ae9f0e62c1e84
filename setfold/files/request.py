"""Options of the public functions, and what follows from them: columns, plan, engine, request."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from copy import copy, deepcopy
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

import torch
from torch import nn

from setfold.core.arguments import check_sizes
from setfold.core.composition import Composition
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.models import DTYPES
from setfold.core.passes import MultiPassSetEncoder
from setfold.core.primitives import SetEncoder
from setfold.core.weights import first_tensor
from setfold.errors import CancelledAttentionWarning, FileError, InputError
from setfold.files.budget import parse_size
from setfold.files.columns import ColumnSpec
from setfold.files.engines import local
from setfold.files.engines.task import Stamp
from setfold.files.inputs import absolute
from setfold.files.journal import SAVE_EVERY
from setfold.files.outputs import ArrowSink
from setfold.files.plan import Plan, computing, make_plan
from setfold.files.run import Engine, Progress
from setfold.preprocessing.targets import Prediction, target_of

Encoder = TypeVar("Encoder", bound=SetEncoder)
InputNames = str | Path | Sequence[str | Path]
ProgressCallback = Callable[[Progress], None]


class RunOptions(TypedDict, total=False):
    """Options of every run.

    Attributes:
        memory: Memory limit of the process in bytes, or as text such as "2GB", the default.
        threads: How many threads read and encode, as far as the memory allows; by default as many
            as torch uses. The result does not depend on it. A model in half precision, or with
            modules that are not part of setfold or torch, is called by one thread at a time.
        resume: Resume an interrupted run from its last checkpoint. Start a new run if there is
            none. If the outputs are already complete, keep them and compute nothing.
        restart: Discard an interrupted run and start over.
        overwrite: Replace outputs that exist. Otherwise they raise an error.
        skip_errors: Skip bad rows and files, and sets that overflow, instead of raising an error.
            List them in a file next to the output.
        save_every: Checkpoint interval in seconds; 20 by default. Checkpoints that are slow to
            write are saved less often.
        progress: Callback that is called with a `setfold.files.run.Progress` after every step.
    """

    memory: str | int
    threads: int | None
    resume: bool
    restart: bool
    overwrite: bool
    skip_errors: bool
    save_every: float
    progress: ProgressCallback | None


class ReadOptions(RunOptions, total=False):
    """Options of runs that read elements, in addition to `RunOptions`.

    Attributes:
        engine: "local", the default, or "ray".
        address: Address of a Ray cluster; "auto" for the cluster that this machine belongs to.
    """

    engine: str
    address: str | None


DEFAULTS: ReadOptions = {
    "memory": "2GB",
    "threads": None,
    "resume": False,
    "restart": False,
    "overwrite": False,
    "skip_errors": False,
    "save_every": SAVE_EVERY,
    "progress": None,
    "engine": "local",
    "address": None,
}


def with_defaults(options: RunOptions | ReadOptions, allowed: type[RunOptions]) -> ReadOptions:
    """Return the options, with defaults for those that are missing.

    Raises:
        TypeError: An option is not in `allowed`.
        InputError: The number of threads is not positive.
    """
    unknown = [name for name in options if name not in allowed.__annotations__]
    if unknown:
        known = ", ".join(sorted(allowed.__annotations__))
        raise TypeError(f"unknown option {unknown[0]!r}; expected one of {known}.")
    found: ReadOptions = {**DEFAULTS, **options}
    if found["threads"] is None:
        found["threads"] = torch.get_num_threads()
    check_sizes(threads=found["threads"])
    return found


def make_columns(
    set: str | Sequence[str] | None,
    features: str | Sequence[str] | None,
    explode: bool,
    root: str | Path | None,
) -> ColumnSpec:
    """Return which columns to read, and how sets are named.

    Raises:
        InputError: There is a root, although the set ids are in a column.
    """
    if root is not None and set is not None:
        raise InputError(
            f"a root is for set ids that are paths, but the column {set!r} holds the set ids. Omit "
            "--root or --set."
        )
    found = ColumnSpec.parse(features, set, explode, None if root is None else absolute(root))
    if len(found.set_names) > 1:
        check_result_names(found.set_names)
    return found


def check_result_names(names: Sequence[str]) -> None:
    """Raise InputError if a column of the set id has the name of another column of the result."""
    for name in names:
        if name in ("count", "prediction", "encoding"):
            raise InputError(f"the set column cannot be named {name!r}. Rename it.")


def build_plan(
    encoder: StreamingSetEncoder,
    inputs: InputNames,
    columns: ColumnSpec,
    options: ReadOptions,
    states: Sequence[Path] = (),
    without: Collection[Path] = (),
) -> Plan:
    """Plan a run on inputs, state files or both, without some files."""
    names = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    if not names and not states:
        raise InputError("there is nothing to read. Pass at least one file, folder or pattern.")
    with computing(encoder):
        return make_plan(
            encoder,
            names,
            columns,
            memory=parse_size(options["memory"]),
            skip=options["skip_errors"],
            threads=options["threads"] or 1,
            states=states,
            without=without,
        )


def prepare_encoder(model: nn.Module) -> StreamingSetEncoder:
    """Switch a streaming encoder to evaluation mode and return it.

    Raises:
        InputError: The model cannot be folded in one pass.
    """
    if isinstance(model, StreamingSetEncoder):
        return model.eval()
    passes = getattr(model, "passes", None)
    if passes is not None:
        raise InputError(
            f"{type(model).__name__} needs {passes} passes over a set, which is possible only for "
            "encode and encode_frame. Use one of them, or an encoder that folds in one pass."
        )
    found = (
        f"expected a streaming set encoder; got {type(model).__name__}, which cannot be folded. "
    )
    raise InputError(
        f"{found}Call setfold.check to see why.", command=f"{found}Run setfold check to see why."
    )


def read_by(encoder: Encoder, head: bool) -> Encoder:
    """Return what reads states out: the encoder without its head, or with it.

    With the head, a model that was trained for a target predicts it: a classifier returns
    probabilities instead of logits.
    The result shares its weights with the encoder.

    Args:
        encoder: The encoder.
        head: Whether to apply its head.
    """
    if not isinstance(encoder, Composition | MultiPassSetEncoder) or encoder.head is None:
        return encoder
    last: nn.Module | None = None
    if head:
        target = target_of(encoder.head)
        last = encoder.head if target is None else Prediction(encoder.head, target)
    if isinstance(encoder, MultiPassSetEncoder):
        several = copy(encoder)
        several._modules = dict(encoder._modules)  # torch's own copy would share it
        several.head = last
        return several.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CancelledAttentionWarning)
        return cast("Encoder", Composition(encoder.encoder, encoder.features, last).eval())


def cast_encoder(encoder: Encoder, dtype: str | None) -> Encoder:
    """Return a copy of an encoder that computes in another dtype, or the encoder itself.

    Args:
        encoder: The encoder.
        dtype: Such as "float64"; None for the dtype that the encoder has.
    """
    if dtype is None or dtype_of(encoder) == dtype:
        return encoder
    if dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(map(repr, DTYPES))}; got {dtype!r}.")
    try:
        return deepcopy(encoder).to(DTYPES[dtype])
    except TypeError as error:  # as on MPS, which has no float64
        raise InputError(
            f"the device of the model does not support {dtype}. Use another device."
        ) from error


def dtype_of(encoder: SetEncoder) -> str:
    """Return the dtype in which an encoder computes, such as "float32"."""
    is_streaming = isinstance(encoder, StreamingSetEncoder)
    weight = encoder.first_weight if is_streaming else first_tensor((encoder,))
    return str(torch.float32 if weight is None else weight.dtype).removeprefix("torch.")


def select_engine(options: ReadOptions) -> Engine:
    """Return the function that computes the steps of a run."""
    name, address = options["engine"], options["address"]
    if name == "local":
        if address is not None:
            raise InputError(
                f"an address is only valid for --engine ray; got {address!r} for the local engine. "
                "Omit it, or choose --engine ray."
            )
        return local.steps
    if name == "ray":
        from setfold.files.engines import ray

        return partial(ray.steps, address=address)
    raise InputError(f"engine must be 'local' or 'ray'; got {name!r}.")


def describe_request(
    command: str, inputs: InputNames, out: str | Path, **more: Any
) -> dict[str, Any]:
    """Describe what the user asked for. A resumed run must have the same description."""
    names = [inputs] if isinstance(inputs, str | Path) else inputs
    return {
        "command": command,
        "inputs": [resolve_path(name) for name in names],
        "out": resolve_path(out),
        **more,
    }


def resolve_path(path: str | Path | None) -> str | None:
    """Return the absolute path as a string."""
    return None if path is None else str(Path(path).resolve())


def check_states_path(path: str | Path) -> Path:
    """Return the path of a state file.

    Raises:
        InputError: The suffix is not one of Arrow's.
    """
    if not str(path).endswith(ArrowSink.suffixes):
        raise InputError(f"states must go to an .arrow file; got {path}. Change the suffix.")
    return Path(path)


def resolve_stamps(inputs: dict[str, Stamp]) -> dict[str, list[int]]:
    """Return the stamps of files by absolute path, as they are saved in a state file."""
    return {str(Path(name).resolve()): list(stamp) for name, stamp in inputs.items()}


def check_unchanged(
    before: dict[str, list[int]], now: dict[str, list[int]]
) -> dict[str, list[int]]:
    """Return the stamps of the inputs of a pass.

    Args:
        before: The stamps in an earlier pass; empty in the first one.
        now: The stamps now.

    Raises:
        FileError: They differ.
    """
    if before and before != now:
        raise FileError(
            "the inputs have changed between two passes. Make sure that nothing writes to them, then "
            "start over with --restart."
        )
    return now
