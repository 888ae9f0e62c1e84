"""The public functions: encode sets from files, and merge and read out saved states."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from setfold.core.arguments import checked
from setfold.core.encoder import StreamingSetEncoder
from setfold.core.passes import MultiPassSetEncoder
from setfold.errors import InputError, StateMismatchError
from setfold.files.columns import ColumnSpec
from setfold.files.engines import local
from setfold.files.execute import Job, Prepare, check_outputs, execute
from setfold.files.outputs import ArrowSink, sink_for
from setfold.files.passes import encode_in_passes
from setfold.files.request import (
    InputNames,
    ReadOptions,
    RunOptions,
    build_plan,
    cast_encoder,
    check_states_path,
    check_unchanged,
    describe_request,
    dtype_of,
    make_columns,
    prepare_encoder,
    read_by,
    resolve_path,
    resolve_stamps,
    select_engine,
    with_defaults,
)
from setfold.files.run import Output, Summary
from setfold.files.states import (
    Provenance,
    collect_inputs,
    common_columns,
    model_from_bytes,
    model_to_bytes,
    read_provenance,
)


@checked
def encode_sets(
    model: nn.Module,
    inputs: InputNames,
    out: str | Path,
    *,
    set: str | Sequence[str] | None = None,
    features: str | Sequence[str] | None = None,
    explode: bool = False,
    root: str | Path | None = None,
    states: str | Path | None = None,
    dtype: str | None = None,
    head: bool = False,
    **options: Unpack[ReadOptions],
) -> Summary:
    """Encode all sets in some files and write one vector per set.

    A set may be larger than memory, there may be more sets than fit in memory, and the rows of a
    set may be spread over the files in any order. The output is sorted by set id.

    Args:
        model: A streaming set encoder, or one of several passes, for which the files are read
            several times. It is switched to evaluation mode.
        inputs: Files, folders or glob patterns, such as "events/*.parquet".
        out: The output, a .parquet, .arrow, .npz or .csv file with set, count and encoding.
        set: The column that holds the set id of each row, or several: "run,event" or a list. If
            None, each file is one set, and its absolute path is the set id.
        features: The columns to encode, in the order the model expects: "x, (y-500)*0.01" or a list
            of such strings; "!weight" for all numeric columns but this one. Defaults to all numeric
            columns except the set column; for files of slides, to the vectors in `features`.
            `setfold.files.features` has the grammar.
        explode: Whether each row holds many elements, stored as lists. If `set` is None, each row
            is one set, and its file and number, in the columns file and row, are the set id.
        root: A folder that contains all inputs. The paths in set ids are then relative to it, with
            "/" on every system.
        states: An .arrow file for the states, which can be merged, read out, and imported into a
            store of live sets.
        dtype: Compute in "float32" or "float64". If None, in the dtype of the model. The model itself
            is not changed.
        head: Whether to apply the head of the model. If False, the encodings are the readouts of
            its encoder. With the head, a model that was trained for a target writes a column
            `prediction`, and the encodings of a classifier are probabilities, in the order of its
            classes.
        options: Options of the run, such as memory="4GB", resume=True, overwrite=True,
            skip_errors=True or engine="ray". `setfold.files.request.ReadOptions` lists all of them.

    >>> import setfold, tempfile
    >>> import pyarrow as pa, pyarrow.parquet as pq
    >>> encoder = setfold.SlotSetEncoder(dim_in=2, num_slots=4, dim_slot=8, dim_out=8)
    >>> events = pa.table({"event": [7, 8, 7], "x": [0.1, 0.2, 0.3], "y": [1.0, 2.0, 3.0]})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pq.write_table(events, f"{folder}/events.parquet")
    ...     out = f"{folder}/encodings.parquet"
    ...     summary = setfold.encode_sets(encoder, f"{folder}/events.parquet", out, set="event")
    ...     print(summary.sets, pq.read_table(out)["count"].to_pylist())
    2 [2, 1]
    """
    settings = with_defaults(options, ReadOptions)
    engine = select_engine(settings)
    columns = make_columns(set, features, explode, root)
    states_path = None if states is None else check_states_path(states)
    stamps: dict[str, list[int]] = {}

    def job_of(encoder: StreamingSetEncoder, out: Path) -> Prepare:
        def prepare(without: Collection[Path]) -> Job:
            plan = build_plan(read_by(encoder, head), inputs, columns, settings, without=without)
            stamps.update(check_unchanged(stamps, resolve_stamps(plan.inputs)))
            outputs = [Output(out, sink_for(out), holds_states=False)]
            if states_path is not None:
                saved = model_to_bytes(encoder)
                provenance = Provenance(saved, stamps, plan.task.columns, dtype_of(encoder))
                outputs.append(Output(states_path, ArrowSink, True, provenance.metadata()))
            return Job(plan, outputs)

        return prepare

    def request_of(out: Path) -> dict[str, Any]:
        more = {"columns": columns.describe(), "states": resolve_path(states), "dtype": dtype}
        return describe_request("encode", inputs, out, **more, head=head)

    def run(encoder: StreamingSetEncoder, out: Path, settings: ReadOptions) -> Summary:
        paths = [out] if states is None else [out, states]
        return execute(request_of(out), paths, job_of(encoder, out), engine, settings)

    path = Path(out)
    if not isinstance(model, MultiPassSetEncoder):
        return run(cast_encoder(prepare_encoder(model), dtype), path, settings)
    if states is not None:
        raise InputError(
            f"{type(model).__name__} needs {model.passes} passes over a set, so its states cannot "
            "be merged with others later. Omit --states."
        )

    def check(encoder: StreamingSetEncoder) -> Summary | None:
        return check_outputs(request_of(path), [path], job_of(encoder, path), settings)

    several = read_by(cast_encoder(model.eval(), dtype), head)
    return encode_in_passes(several, path, settings, check, run)


@checked
def merge_states(
    states: Sequence[str | Path],
    out: str | Path,
    *,
    model: nn.Module | None = None,
    allow: Iterable[str] = (),
    again: bool = False,
    **options: Unpack[RunOptions],
) -> Summary:
    """Merge several state files into one.

    The states of a set that occurs in several files are merged.

    Args:
        states: The state files.
        out: The output, an .arrow file.
        model: The model that computed the states. If None, the model in the first file.
        allow: Import paths of your own classes that the state files may use.
        again: Whether to accept an input that several of the files contain.
        options: Options of the run, such as memory="4GB" or resume=True.
            `setfold.files.request.RunOptions` lists all of them.

    >>> import numpy as np, setfold, tempfile
    >>> encoder = setfold.SlotSetEncoder(dim_in=2, num_slots=4, dim_slot=8, dim_out=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for day in ("monday", "tuesday"):
    ...         name = f"{folder}/{day}"
    ...         np.save(f"{name}.npy", np.ones((5, 2), np.float32))
    ...         _ = setfold.encode_sets(
    ...             encoder, f"{name}.npy", f"{name}.npz", states=f"{name}.arrow"
    ...         )
    ...     days = [f"{folder}/monday.arrow", f"{folder}/tuesday.arrow"]
    ...     setfold.merge_states(days, f"{folder}/both.arrow").elements
    10
    """
    settings = with_defaults(options, RunOptions)
    paths, new = [Path(path) for path in states], check_states_path(out)

    def prepare(_: Collection[Path]) -> Job:
        encoder = _load_encoder(paths, model, allow)
        columns = common_columns(paths)
        inputs, dtype = collect_inputs(paths, again), dtype_of(encoder)
        provenance = Provenance(model_to_bytes(encoder), inputs, columns, dtype)
        plan = build_plan(encoder, (), columns or ColumnSpec(None, None), settings, paths)
        return Job(plan, [Output(new, ArrowSink, True, provenance.metadata())])

    request = describe_request("merge", paths, new)
    return execute(request, [new], prepare, local.steps, settings)


@checked
def readout_states(
    states: str | Path,
    out: str | Path,
    *,
    model: nn.Module | None = None,
    allow: Iterable[str] = (),
    head: bool = False,
    **options: Unpack[RunOptions],
) -> Summary:
    """Compute the encodings of the sets in a state file.

    Args:
        states: The state file.
        out: The output, a .parquet, .arrow, .npz or .csv file.
        model: The model that computed the states; its head may differ. If None, the model in the
            state file.
        allow: Import paths of your own classes that the state file may use.
        head: Whether to apply the head of the model, as for `encode_sets`.
        options: Options of the run, such as memory="4GB" or resume=True.
            `setfold.files.request.RunOptions` lists all of them.

    >>> import numpy as np, setfold, tempfile
    >>> encoder = setfold.SlotSetEncoder(dim_in=2, num_slots=4, dim_slot=8, dim_out=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     name = f"{folder}/scan"
    ...     np.save(f"{name}.npy", np.ones((5, 2), np.float32))
    ...     _ = setfold.encode_sets(encoder, f"{name}.npy", f"{name}.npz", states=f"{name}.arrow")
    ...     _ = setfold.readout_states(f"{name}.arrow", f"{name}.parquet")
    ...     import pyarrow.parquet as pq
    ...     pq.read_table(f"{name}.parquet")["count"].to_pylist()
    [5]
    """
    settings = with_defaults(options, RunOptions)

    def prepare(_: Collection[Path]) -> Job:
        encoder = read_by(_load_encoder([Path(states)], model, allow), head)
        columns = common_columns([Path(states)]) or ColumnSpec(None, None)
        plan = build_plan(encoder, (), columns, settings, [Path(states)])
        return Job(plan, [Output(Path(out), sink_for(Path(out)), holds_states=False)])

    request = describe_request("readout", states, out, head=head)
    return execute(request, [out], prepare, local.steps, settings)


def _load_encoder(
    paths: Sequence[Path], model: nn.Module | None, allow: Iterable[str]
) -> StreamingSetEncoder:
    """Return the given model, or that of the first state file, in the dtype of the states.

    Raises:
        StateMismatchError: The files were computed in different dtypes, or contain no model.
    """
    if not paths:
        raise InputError("expected at least one state file; got none.")
    first, *others = (read_provenance(path)[2] for path in paths)
    for path, other in zip(paths[1:], others, strict=True):
        if other.dtype != first.dtype:
            raise StateMismatchError(
                f"{paths[0]} was computed in {first.dtype}, {path} in {other.dtype}, and such "
                "states cannot be merged. Compute one of them again with the --dtype of the other."
            )
    if model is None:
        if first.model is None:
            raise StateMismatchError(
                f"{paths[0]} does not contain the model that computed it, because that model could "
                "not be saved. Pass it with --model."
            )
        model = model_from_bytes(first.model, allow)
    return cast_encoder(prepare_encoder(model), first.dtype)
