"""Files in, vectors out: the jobs, as functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from setfold.encoder import StreamingSetEncoder
from setfold.engines import local
from setfold.engines.task import Stamp
from setfold.errors import InputError, StateMismatchError
from setfold.io.columns import Columns, features_of, shown_features
from setfold.io.outputs import ArrowSink, refuse_as_target, sink_for
from setfold.io.states import Provenance, model_bytes, model_from, read_provenance
from setfold.jobs.memory import parse_size
from setfold.jobs.plan import Plan, make_plan
from setfold.jobs.run import Engine, Output, Progress, Run, Summary, published
from setfold.jobs.work import SAVE_EVERY, working

Names = str | Path | Sequence[str | Path]
Job = tuple[Plan, list[Output]]
Tell = Callable[[Progress], None]


def encode_sets(
    model: nn.Module,
    inputs: Names,
    out: str | Path,
    *,
    set: str | None = None,
    features: str | Sequence[str] | None = None,
    explode: bool = False,
    states: str | Path | None = None,
    memory: str | int = "2GB",
    skip_errors: bool = False,
    engine: str = "local",
    address: str | None = None,
    resume: bool = False,
    restart: bool = False,
    save_every: float = SAVE_EVERY,
    progress: Tell | None = None,
) -> Summary:
    """Encode all sets whose elements stand in some files: one vector for each set, in one file.

    Sets may be larger than memory, more than memory holds, and spread over the files in any order. The result
    is sorted by the sets' names.

    Args:
        model: a streaming set encoder. It is put into evaluation mode.
        inputs: files, folders or patterns, such as "events/*.parquet".
        out: a .parquet, .arrow or .npz file: set, count, encoding.
        set: the column that tells which set a row belongs to; without it every file is one set.
        features: columns in the order in which the model takes them, "x, y*0.01" or a list of such; all columns of
            numbers but the set's if left out.
        explode: whether each row holds many elements, in lists.
        states: an .arrow file for the states, which can be updated and merged.
        memory: bytes that the process may take, such as "2GB".
        skip_errors: leave out rows and files that cannot be used, and list them in a file beside the output.
        engine: "local" or "ray".
        address: of a Ray cluster; "auto" for the one that this machine belongs to.
        resume: go on with a run that was killed; begin one if there is none.
        restart: drop what such a run has left.
        save_every: seconds of work that a kill costs at most, if saving is quick.
        progress: is told how far it is.

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
    encoder, compute = streaming(model), chosen_engine(engine, address)
    columns = Columns(features_of(features), set, explode)
    kept = None if states is None else _as_states(states)

    def prepare() -> Job:
        plan = plan_for(encoder, inputs, columns, memory=memory, skip_errors=skip_errors)
        outputs = [Output(Path(out), sink_for(Path(out)), states=False)]
        if kept is not None:
            known = Provenance(model_bytes(encoder), _stamps(plan.inputs), plan.task.columns)
            outputs.append(Output(kept, ArrowSink, True, known.metadata()))
        return plan, outputs

    request = _request("encode", inputs, out, columns=asdict(columns), states=_full(states))
    return _carried_out(request, prepare, compute, resume, restart, progress, save_every)


def update_states(
    states: str | Path,
    inputs: Names,
    *,
    out: str | Path | None = None,
    model: nn.Module | None = None,
    allow: Iterable[str] = (),
    set: str | None = None,
    features: str | Sequence[str] | None = None,
    explode: bool = False,
    memory: str | int = "2GB",
    skip_errors: bool = False,
    again: bool = False,
    engine: str = "local",
    address: str | None = None,
    resume: bool = False,
    restart: bool = False,
    save_every: float = SAVE_EVERY,
    progress: Tell | None = None,
) -> Summary:
    """Add the elements of more files to states that were kept, and to sets that are new.

    Args:
        states: a file of states.
        inputs: files, folders or patterns.
        out: where the new states go; None to replace the old ones.
        model: that made the states; None for the one in their file.
        allow: import paths of classes of yours that the file may name.
        set: as for `encode_sets`, like all that follows.
        features: as there.
        explode: as there.
        memory: as there.
        skip_errors: as there.
        again: whether files may be added that are in the states already.
        engine: as there.
        address: as there.
        resume: as there.
        restart: as there.
        save_every: as there.
        progress: as there.

    >>> import numpy as np, setfold, tempfile
    >>> encoder = setfold.SlotSetEncoder(dim_in=2, num_slots=4, dim_slot=8, dim_out=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for day in ("monday", "tuesday"):
    ...         np.save(f"{folder}/{day}.npy", np.ones((5, 2), np.float32))
    ...     states = f"{folder}/states.arrow"
    ...     _ = setfold.encode_sets(
    ...         encoder, f"{folder}/monday.npy", f"{folder}/out.npz", states=states
    ...     )
    ...     setfold.update_states(states, f"{folder}/tuesday.npy").sets
    2
    """
    old, new, compute = Path(states), _as_states(out or states), chosen_engine(engine, address)
    asked = Columns(features_of(features), set, explode)

    def prepare() -> Job:
        encoder = streaming(_model_of([old], model, allow))
        columns = _as_before(asked, read_provenance(old)[2].columns, old)
        plan = plan_for(
            encoder, inputs, columns, memory=memory, skip_errors=skip_errors, states=[old]
        )
        known = _united([old], again)
        added = _stamps({n: stamp for n, stamp in plan.inputs.items() if n != str(old)})
        twice = [name for name in added if name in known]  # grown or not
        if twice and not again:
            raise InputError(
                f"{twice[0]} is in {old} already, and would count twice ({len(twice)} such files). Leave it out, or add "
                "it all the same with --again."
            )
        provenance = Provenance(model_bytes(encoder), known | added, plan.task.columns)
        return plan, [Output(new, ArrowSink, True, provenance.metadata())]

    request = _request("update", inputs, new, columns=asdict(asked), states=_full(old))
    return _carried_out(request, prepare, compute, resume, restart, progress, save_every)


def merge_states(
    states: Sequence[str | Path],
    out: str | Path,
    *,
    model: nn.Module | None = None,
    allow: Iterable[str] = (),
    memory: str | int = "2GB",
    again: bool = False,
    resume: bool = False,
    restart: bool = False,
    progress: Tell | None = None,
) -> Summary:
    """Merge files of states into one; sets that several have in common become one.

    Args:
        states: the files.
        out: an .arrow file.
        model: that made them; None for the one in the first file.
        allow: as for `update_states`.
        memory: as for `encode_sets`, like `resume`, `restart` and `progress`.
        again: whether the same input may be in several of the files.
        resume: as there.
        restart: as there.
        progress: as there.

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
    paths, new = [Path(path) for path in states], _as_states(out)

    def prepare() -> Job:
        encoder = streaming(_model_of(paths, model, allow))
        columns = read_provenance(paths[0])[2].columns
        provenance = Provenance(model_bytes(encoder), _united(paths, again), columns)
        plan = plan_for(encoder, (), Columns(None, None), memory=memory, states=paths)
        return plan, [Output(new, ArrowSink, True, provenance.metadata())]

    request = _request("merge", paths, new)
    return _carried_out(request, prepare, local.steps, resume, restart, progress)


def readout_states(
    states: str | Path,
    out: str | Path,
    *,
    model: nn.Module | None = None,
    allow: Iterable[str] = (),
    memory: str | int = "2GB",
    resume: bool = False,
    restart: bool = False,
    progress: Tell | None = None,
) -> Summary:
    """Read the encodings out of a file of states.

    Args:
        states: the file.
        out: a .parquet, .arrow or .npz file.
        model: that made the states, perhaps with another head; None for the one in the file.
        allow: as for `update_states`.
        memory: as for `encode_sets`, like `resume`, `restart` and `progress`.
        resume: as there.
        restart: as there.
        progress: as there.

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

    def prepare() -> Job:
        encoder = streaming(_model_of([Path(states)], model, allow))
        plan = plan_for(encoder, (), Columns(None, None), memory=memory, states=[Path(states)])
        return plan, [Output(Path(out), sink_for(Path(out)), states=False)]

    request = _request("readout", states, out)
    return _carried_out(request, prepare, local.steps, resume, restart, progress)


# ---- what they share ---------------------------------------------------------------------------


def plan_for(
    encoder: StreamingSetEncoder,
    inputs: Names,
    columns: Columns,
    *,
    memory: str | int,
    skip_errors: bool = False,
    states: Sequence[Path] = (),
) -> Plan:
    """The plan of a job."""
    names = [inputs] if isinstance(inputs, str | Path) else list(inputs)
    if not names and not states:
        raise InputError("there is nothing to read: name files, folders or patterns.")
    return make_plan(
        encoder, names, columns, memory=parse_size(memory), skip=skip_errors, states=states
    )


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


def chosen_engine(name: str, address: str | None) -> Engine:
    """What computes the steps."""
    if name == "local":
        if address is not None:
            raise InputError("an address is for --engine ray.")
        return local.steps
    if name == "ray":
        from setfold.engines import ray

        return partial(ray.steps, address=address)
    raise InputError(f"engine must be 'local' or 'ray'; got {name!r}.")


def _request(doing: str, inputs: Names, out: str | Path, **more: Any) -> dict[str, Any]:
    """What is asked for, to be compared by a run that goes on with it."""
    names = [inputs] if isinstance(inputs, str | Path) else inputs
    return {"job": doing, "inputs": [_full(name) for name in names], "out": _full(out), **more}


def _full(path: str | Path | None) -> str | None:
    return None if path is None else str(Path(path).resolve())


def _as_before(asked: Columns, before: Columns | None, path: Path) -> Columns:
    """Which columns are what: as asked, or else as when the states were made."""
    if before is None:
        return asked
    features, old = asked.features or before.features, before.features
    if features and old and features != old:
        named, known = ([feature.name for feature in each] for each in (features, old))
        if sorted(named) == sorted(known):
            raise InputError(
                f"the states of {path} are of {shown_features(old)}, in this order; now it is {shown_features(features)}. "
                "Leave --features out to have them as before."
            )
    if asked.set is not None and before.set is None and not before.explode:
        raise InputError(f"the sets of {path} are whole files; leave --set out.")
    return Columns(features, asked.set or before.set, asked.explode or before.explode)


def _carried_out(
    request: dict[str, Any],
    prepare: Callable[[], Job],
    engine: Engine,
    resume: bool,
    restart: bool,
    progress: Tell | None,
    save_every: float = SAVE_EVERY,
) -> Summary:
    out = Path(request["out"])
    refuse_as_target(out)
    with (
        torch.no_grad(),
        working(out, request, resume=resume, restart=restart, save_every=save_every) as work,
    ):
        if work.journal is not None and work.journal.publish:  # all was done but this
            return published(work)
        plan, outputs = prepare()
        _refuse_overwriting(plan, outputs)
        return Run(plan, work, engine, outputs, progress).run()


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


def _as_states(path: str | Path) -> Path:
    if not str(path).endswith(ArrowSink.suffixes):
        raise InputError(f"states go into an .arrow file; got {path}.")
    return Path(path)


def _stamps(inputs: dict[str, Stamp]) -> dict[str, list[int]]:
    """By full name, what files are known by."""
    return {str(Path(name).resolve()): list(stamp) for name, stamp in inputs.items()}


def _united(paths: Sequence[Path], again: bool) -> dict[str, list[int]]:
    """The inputs of several files of states."""
    known: dict[str, list[int]] = {}
    for path in paths:
        inputs = read_provenance(path)[2].inputs
        twice = [name for name in inputs if name in known]
        if twice and not again:
            raise InputError(
                f"{twice[0]} is in several of these files, and would count twice. Merge others, or allow it with --again."
            )
        known |= inputs
    return known


def _model_of(paths: Sequence[Path], model: nn.Module | None, allow: Iterable[str]) -> nn.Module:
    if not paths:
        raise InputError("name at least one file of states.")
    if model is not None:
        return model
    content = read_provenance(paths[0])[2].model
    if content is None:
        raise StateMismatchError(
            f"{paths[0]} does not hold the model that made it, which could not be written down: name it with --model."
        )
    return model_from(content, allow)
