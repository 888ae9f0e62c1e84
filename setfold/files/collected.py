"""States that were kept: more elements added to them, several merged, encodings read out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Unpack

from torch import nn

from setfold.errors import InputError, StateMismatchError
from setfold.files.columns import Columns, features_of, shown_features
from setfold.files.engines import local
from setfold.files.job import (
    Job,
    Names,
    ReadOptions,
    RunOptions,
    as_states,
    carried_out,
    chosen_engine,
    completed,
    full_name,
    plan_for,
    request_of,
    stamps_of,
    streaming,
)
from setfold.files.outputs import ArrowSink, sink_for
from setfold.files.run import Output, Summary
from setfold.files.states import Provenance, model_bytes, model_from, read_provenance


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
    again: bool = False,
    **options: Unpack[ReadOptions],
) -> Summary:
    """Add the elements of more files to states that were kept, and to sets that are new.

    Args:
        states: a file of states.
        inputs: files, folders or patterns.
        out: where the new states go; None to replace the old ones.
        model: that made the states; None for the one in their file.
        allow: import paths of classes of yours that the file may name.
        set: as for `encode_sets`; as when the states were made if left out, like `features` and `explode`.
        features: as there.
        explode: as there.
        again: whether files may be added that are in the states already.
        options: of a run, such as memory="4GB", resume=True, skip_errors=True or engine="ray"; all of them are listed
            under `setfold.files.job.ReadOptions`.

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
    chosen = completed(options, ReadOptions)
    old, new, engine = Path(states), as_states(out or states), chosen_engine(chosen)
    asked = Columns(features_of(features), set, explode)

    def prepare() -> Job:
        encoder = streaming(_model_of([old], model, allow))
        columns = _as_before(asked, read_provenance(old)[2].columns, old)
        plan = plan_for(encoder, inputs, columns, chosen, [old])
        known = _united([old], again)
        added = stamps_of({n: stamp for n, stamp in plan.inputs.items() if n != str(old)})
        twice = [name for name in added if name in known]  # grown or not
        if twice and not again:
            raise InputError(
                f"{twice[0]} is in {old} already, and would count twice ({len(twice)} such files). Leave it out, or add "
                "it all the same with --again."
            )
        provenance = Provenance(model_bytes(encoder), known | added, plan.task.columns)
        return plan, [Output(new, ArrowSink, True, provenance.metadata())]

    request = request_of("update", inputs, new, columns=asdict(asked), states=full_name(old))
    return carried_out(request, prepare, engine, chosen)


def merge_states(
    states: Sequence[str | Path],
    out: str | Path,
    *,
    model: nn.Module | None = None,
    allow: Iterable[str] = (),
    again: bool = False,
    **options: Unpack[RunOptions],
) -> Summary:
    """Merge files of states into one; sets that several have in common become one.

    Args:
        states: the files.
        out: an .arrow file.
        model: that made them; None for the one in the first file.
        allow: as for `update_states`.
        again: whether the same input may be in several of the files.
        options: of a run, such as memory="4GB" or resume=True; all of them are listed under
            `setfold.files.job.RunOptions`.

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
    chosen = completed(options, RunOptions)
    paths, new = [Path(path) for path in states], as_states(out)

    def prepare() -> Job:
        encoder = streaming(_model_of(paths, model, allow))
        columns = read_provenance(paths[0])[2].columns
        provenance = Provenance(model_bytes(encoder), _united(paths, again), columns)
        plan = plan_for(encoder, (), Columns(None, None), chosen, paths)
        return plan, [Output(new, ArrowSink, True, provenance.metadata())]

    request = request_of("merge", paths, new)
    return carried_out(request, prepare, local.steps, chosen)


def readout_states(
    states: str | Path,
    out: str | Path,
    *,
    model: nn.Module | None = None,
    allow: Iterable[str] = (),
    **options: Unpack[RunOptions],
) -> Summary:
    """Read the encodings out of a file of states.

    Args:
        states: the file.
        out: a .parquet, .arrow or .npz file.
        model: that made the states, perhaps with another head; None for the one in the file.
        allow: as for `update_states`.
        options: of a run, such as memory="4GB" or resume=True; all of them are listed under
            `setfold.files.job.RunOptions`.

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
    chosen = completed(options, RunOptions)

    def prepare() -> Job:
        encoder = streaming(_model_of([Path(states)], model, allow))
        plan = plan_for(encoder, (), Columns(None, None), chosen, [Path(states)])
        return plan, [Output(Path(out), sink_for(Path(out)), states=False)]

    request = request_of("readout", states, out)
    return carried_out(request, prepare, local.steps, chosen)


def _as_before(asked: Columns, before: Columns | None, path: Path) -> Columns:
    """Which columns are what: as asked, or else as when the states were made."""
    if before is None:
        return asked
    features, old = asked.features or before.features, before.features
    if features and old and features != old and sorted(asked.named) == sorted(before.named):
        raise InputError(
            f"the states of {path} are of {shown_features(old)}, in this order; now it is {shown_features(features)}. "
            "Leave --features out to have them as before."
        )
    if asked.set is not None and before.set is None and not before.explode:
        raise InputError(f"the sets of {path} are whole files; leave --set out.")
    return Columns(features, asked.set or before.set, asked.explode or before.explode)


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
